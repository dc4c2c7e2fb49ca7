"""Make a recorded batch step by step: the very calls that were recorded, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataloaders.batches.tree import map_children
from dataloaders.recording.ops import run
from dataloaders.recording.program import Node, Program, RecordedBatch, Ref, unpack

__all__ = ["evaluate", "put_back", "replayed"]


def evaluate(
    program: Program, wanted: Sequence[int], known: Mapping[int, Any] | None = None
) -> list[Any]:
    """Return what the steps with the numbers ``wanted`` make, exactly as the dataset's code.

    As in torch's workers, one thread of torch must run it: sums of floats depend on their number.

    Args:
        program: see `unpack`.
        wanted: numbers of steps.
        known: by number, what other code has made of steps already.
    """
    nodes = program.nodes
    made: dict[Node, Any] = {nodes[number]: value for number, value in (known or {}).items()}
    return run([nodes[number] for number in wanted], program.slots, made)


def replayed(batch: RecordedBatch) -> Any:
    """Return the batch, as the user's collate_fn would have returned it."""
    wanted: dict[int, Any] = {}
    put_back(batch.rest, lambda number: wanted.setdefault(number))
    values = dict(zip(wanted, evaluate(unpack(batch), list(wanted)), strict=True))
    return put_back(batch.rest, values.__getitem__)


def put_back(rest: Any, value_of: Any) -> Any:
    """Return ``rest`` with each `Ref` replaced by ``value_of`` its number."""
    if type(rest) is Ref:
        return value_of(rest.number)
    return map_children(rest, lambda child: put_back(child, value_of))
