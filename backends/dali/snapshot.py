"""Remember what decides how a dataset's images are read; the user may change it between epochs.

dataset.transform = gentler    other members of a chain   ┐
subset.indices = others        other rows                 │ noticed at the next iter(), as in
folder.loader = mine           another way to load files  │ torch, which reads the dataset anew
cifar.data = floats            pixels of another type     ┘
dataset.epoch = 3              anything else: read live
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from dataloaders.cache.sample.cut import equal_state
from dataloaders.transforms.find import find_chains

__all__ = ["Snapshot"]

_DEEPEST = 16


class Snapshot:
    """The structure of ``dataset`` at this moment. Reads none of its samples."""

    def __init__(self, dataset: Any) -> None:
        chains = find_chains(dataset)
        parts = list(_parts(dataset))
        # The objects, not their ids: the id of a dead object may be given to another one.
        self._parts = [*parts, *map(type, parts)]
        self._members = [member.transform for found in chains for member in found.members]
        self._ways = [_held(part, name) for part in parts for name in ("indices", "loader")]
        self._pixels = [_sort(_held(part, "data")) for part in parts]
        # Chains of several datasets have to be equal, also after one of them was changed in place.
        several = [[member.transform for member in found.members] for found in chains]
        self._states = [equal_state(chain) for chain in several] if len(several) > 1 else []

    def same_as(self, other: Snapshot, *, own_code: bool = False, stays: bool = False) -> bool:
        """Whether what was found for one of them serves the other.

        Args:
            own_code: whether the dataset's own code loads its images, and reads its own attributes.
            stays: whether it does so in persistent workers, with the dataset as it was for them.
        """
        return (
            _same(self._members, other._members)
            and self._states == other._states
            and (stays or _same(self._parts, other._parts))
            and (own_code or _same(self._ways, other._ways))
            and (own_code or self._pixels == other._pixels)
        )


def _parts(dataset: Any, depth: int = 0) -> Iterator[Any]:
    """Yield ``dataset``, and those that it is a Subset or ConcatDataset of."""
    yield dataset
    inner = _held(dataset, "datasets")
    row = inner if isinstance(inner, (list, tuple)) else [_held(dataset, "dataset")]
    for part in row if depth < _DEEPEST else ():
        if isinstance(part, Dataset):
            yield from _parts(part, depth + 1)


def _held(dataset: Any, name: str) -> Any:
    return getattr(dataset, "__dict__", {}).get(name)


def _sort(pixels: Any) -> tuple[Any, ...]:
    shape = getattr(pixels, "shape", ())
    return type(pixels), str(getattr(pixels, "dtype", "")), tuple(shape)[1:]


def _same(ours: list[Any], others: list[Any]) -> bool:
    return len(ours) == len(others) and all(map(operator.is_, ours, others))
