"""Walk through Subset and ConcatDataset, and rebuild what was read.

Subset(ConcatDataset([a, b]), indices) ──read(a), read(b)──row──part──> the same of what was read
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.utils.data import ConcatDataset, Subset

from dataloaders.observing import held

__all__ = ["is_own", "is_read_as", "read_nested"]

T = TypeVar("T")


def read_nested(
    dataset: Any,
    read: Callable[[Any], T | str],
    *,
    part: Callable[[T, Sequence[Any]], T],
    row: Callable[[list[T]], T | str],
) -> T | str:
    """Return what ``read`` makes of ``dataset``, inside of Subset and ConcatDataset too.

    A dataset that names its own files (`is_own`) is read as it is.

    Args:
        dataset: any dataset.
        read: reads a dataset that is neither; returns a text if it cannot.
        part: restricts what was read of a Subset's dataset to these indices.
        row: concatenates what was read of several datasets; or returns a text.
    """
    if is_own(dataset):
        return read(dataset)
    if is_read_as(dataset, Subset):
        inner = read_nested(dataset.dataset, read, part=part, row=row)
        return inner if isinstance(inner, str) else part(inner, dataset.indices)
    if is_read_as(dataset, ConcatDataset):
        parts = []
        for each in dataset.datasets:
            one = read_nested(each, read, part=part, row=row)
            if isinstance(one, str):
                return one
            parts.append(one)
        return row(parts)
    return read(dataset)


def is_own(dataset: Any) -> bool:
    """Whether it has the methods ``encoded(index)`` and ``target(index)``."""
    return all(callable(held(dataset, name)) for name in ("encoded", "target"))


def is_read_as(dataset: Any, base: type) -> bool:
    """Whether its samples, one and many at once, come from the very methods of ``base``."""
    ways = ("__getitem__", "__getitems__")
    return all(getattr(type(dataset), way, None) is getattr(base, way, None) for way in ways)
