"""Make a recorded batch step by step: the very calls that were recorded, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataloaders.batches.tree import map_children
from dataloaders.recording.ops import run
from dataloaders.recording.program import RecordedBatch, Ref, unpack


def replayed(batch: RecordedBatch) -> Any:
    """Return the batch, as the user's collate_fn would have returned it.

    As in torch's workers, one thread of torch must run it: sums of floats depend on their number.
    """
    nodes, slots = unpack(batch)
    numbers = wanted_of(batch.rest)
    values = run([nodes[number] for number in numbers], slots)
    return put_back(batch.rest, dict(zip(numbers, values, strict=True)).__getitem__)


def wanted_of(rest: Any) -> list[int]:
    """Return the numbers of the steps that a batch refers to, each once."""
    found: dict[int, None] = {}
    put_back(rest, found.setdefault)
    return list(found)


def put_back(rest: Any, value_of: Callable[[int], Any]) -> Any:
    """Return ``rest`` with each `Ref` replaced by ``value_of`` its number."""
    if type(rest) is Ref:
        return value_of(rest.number)
    return map_children(rest, lambda child: put_back(child, value_of))
