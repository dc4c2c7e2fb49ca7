"""Columns of a cache for a batch: numbers and tensors gathered, images as they are in the file."""

from __future__ import annotations

import functools
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

__all__ = ["Parts", "Rows", "Values"]

_Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass
class Rows:
    """The rows of one batch, the random numbers for them, and how they are made.

    Attributes:
        numbers: int64 [n].
        draws: the random numbers of each row.
        pool: where large tensors come from, outside workers.
        threads: share the work on images.
        puts_off: whether a `Trailing` stands for images that end as floats.
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
            self._located = column.files.locate(self.numbers)
        return self._located

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a part of a batch: shared in a worker, else from the pool if large."""
        nbytes = math.prod(shape) * dtype.itemsize
        if get_worker_info() is not None:
            storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
            return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]
        if self.pool.pays_for(nbytes):
            return self.pool.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype)


class Parts:
    """The files that have a column, each with the values of its rows as an array."""

    def __init__(self, column: Column) -> None:
        self.column = column
        self._arrays: dict[int, npt.NDArray[Any] | None] = {}

    def array(self, part: int) -> npt.NDArray[Any] | None:
        """Return the rows of this part; None if they differ in shape or are compressed."""
        if part not in self._arrays:
            column = self.column.of(part)
            values = None
            if column.entry.fixed and column.entry.packing is None:
                values = column.values
                if values.dtype.kind == "b":
                    values = values.view(np.uint8)  # a byte other than 0 and 1 would be neither
                if not values.flags.aligned:  # as columns of a few bytes may be: copying is cheap
                    values = values.copy()
            self._arrays[part] = values
        return self._arrays[part]

    def images(self, rows: Rows) -> list[npt.NDArray[np.uint8]]:
        """Return the values of each row, as they stand in the file.

        Raises:
            NotThisBatch: a row is None.
        """
        images = []
        parts, numbers = rows.located(self.column)
        for part, number in zip(parts.tolist(), numbers.tolist(), strict=True):
            array = self.array(part)
            image = self.column.of(part).view(number) if array is None else array[number]
            if image is None:
                raise NotThisBatch
            images.append(image)
        return images


class Values:
    """A column of one shape, gathered."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        entry = parts.column.entry
        dtype = np.dtype(entry.dtype)
        self._is_bool = dtype.kind == "b"
        self._dtype = np.dtype(np.uint8) if self._is_bool else dtype
        self._shape = entry.shape or ()
        self._is_bfloat16 = entry.variants[0][0] == "tensor:bfloat16"

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return the values of these rows."""
        parts, numbers = rows.located(self._parts.column)
        dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
        out = rows.empty((len(numbers), *self._shape), dtype)
        values = out.numpy()
        for part, places in groups(parts):
            array, own = self._parts.array(part), numbers[places]
            if array is None:
                column = self._parts.column.of(part)
                for number, place in sorted(zip(own.tolist(), places.tolist(), strict=True)):
                    found = column.view(number)  # in the file's order: pieces are decoded once
                    assert found is not None  # its rows are of one kind
                    values[place] = found.view(self._dtype)
            elif len(own) < len(numbers):
                values[places] = array[own]
            else:
                take = functools.partial(_take, array, own, values)
                rows.threads.split(len(own), out.nbytes, take)
        if self._is_bool:
            return out != 0
        return out.view(torch.bfloat16) if self._is_bfloat16 else out


def _take(
    array: npt.NDArray[Any], numbers: _Ints, out: npt.NDArray[Any], begin: int, end: int
) -> None:
    # Not to be clipped, but another mode would buffer what it writes.
    np.take(array, numbers[begin:end], axis=0, out=out[begin:end], mode="clip")
