"""Which steps a recorded batch refers to, and the batch with their values in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataloaders.batches.tree import map_children
from dataloaders.recording.program import Ref


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
