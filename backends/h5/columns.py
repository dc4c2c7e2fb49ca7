"""Read columns of a cache for a batch: gather numbers and tensors, find images in the files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from dataloaders.batches.memory import HostPool
from dataloaders.cache.read.files import Column, groups

from .draws import Draws
from .threads import Threads
from .windows import NotThisBatch

__all__ = ["Rows", "Values"]

_Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass
class Rows:
    """The rows of one batch, and what their batch is made with.

    Attributes:
        numbers: int64 [n].
        draws: gives the random numbers of each row.
        pool: gives memory for large tensors, outside workers.
        threads: share the images.
        puts_off: as in `Batches`.
    """

    numbers: _Ints
    draws: Draws
    pool: HostPool
    threads: Threads
    puts_off: bool
    _located: tuple[_Ints, _Ints] | None = None

    def located(self, column: Column) -> tuple[_Ints, _Ints]:
        """Return the part of each row and its number there; looked up once for all columns."""
        if self._located is None:
            self._located = column.files.locate_all(self.numbers)
        return self._located

    def views(self, column: Column) -> list[npt.NDArray[Any]]:
        """Return the values of each row, as they stand in the file.

        Raises:
            NotThisBatch: a row is None.
        """
        parts, numbers = self.located(column)
        views = []
        for part, number in zip(parts.tolist(), numbers.tolist(), strict=True):
            _, view = column.of(part).stored(number)
            if view is None:
                raise NotThisBatch
            views.append(view)
        return views

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a column."""
        return empty(self.pool, shape, dtype)


def empty(pool: HostPool, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a column: shared in a worker, else from the pool if it is large."""
    if get_worker_info() is None:
        return pool.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]


class Values:
    """Gathers a column whose rows have one shape, and are stored as they are."""

    def __init__(self, column: Column) -> None:
        self._column = column
        entry = column.entry
        dtype = np.dtype(entry.dtype)
        self._is_bool = dtype.kind == "b"
        self._dtype = np.dtype(np.uint8) if self._is_bool else dtype
        self._shape = entry.shape or ()
        self._is_bfloat16 = entry.variants[0][0] == "tensor:bfloat16"
        self._arrays: dict[int, npt.NDArray[Any]] = {}

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return the values of these rows."""
        parts, numbers = rows.located(self._column)
        dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
        out = rows.empty((len(numbers), *self._shape), dtype)
        values = out.numpy()
        for part, places in groups(parts):
            array, own = self._array(part), numbers[places]
            if len(own) < len(numbers):
                values[places] = array[own]
            else:  # not to be clipped, but another mode would buffer what it writes
                np.take(array, own, axis=0, out=values, mode="clip")
        if self._is_bool:
            return out != 0
        return out.view(torch.bfloat16) if self._is_bfloat16 else out

    def _array(self, part: int) -> npt.NDArray[Any]:
        """Return the rows of this part."""
        if part not in self._arrays:
            values = self._column.of(part).values.view(self._dtype)  # a bool may be any byte
            # Columns of a few bytes may be unaligned: copying them is cheap.
            self._arrays[part] = values if values.flags.aligned else values.copy()
        return self._arrays[part]
