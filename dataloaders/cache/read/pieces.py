"""Read values out of compressed columns.

    values   0 ........ n │ n ........ 2n │ 2n ..... and zeros      n: the same in all
                 │               │               │
    file     compressed       compressed      as it is, where compressing saves nothing
             place, length    place, length   place, length         a table, one row a piece

What the table and the pieces say is checked each time it is used: a value comes out, or an error.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.format.codecs import Undecodable, codec_of
from dataloaders.cache.format.entries import LARGEST_PIECE, LARGEST_ROW, ColumnEntry
from dataloaders.errors import CacheError

_KEPT = 4  # pieces that a column remembers


class Pieces:
    """The values of a compressed column, from the first to the last of all rows."""

    def __init__(self, entry: ColumnEntry, data: npt.NDArray[np.uint8]) -> None:
        assert entry.packing is not None
        self._dtype = np.dtype(entry.dtype)
        self._piece = entry.packing.piece
        self._bytes = self._piece * self._dtype.itemsize
        self._codec = codec_of(entry.packing.codec, self._dtype.itemsize)
        self._data = data
        offset, count = entry.packing.pieces
        self._table = data[offset : offset + 8 * count].view("<u8").reshape(-1, 2)
        # Whole rows are not read twice: only where several share a piece is it worth keeping.
        shared = entry.shape is None or self._piece > math.prod(entry.shape)
        self._keeps = shared and self._bytes <= LARGEST_PIECE
        # Replaced as a whole: threads that do so at once lose a piece, and nothing else.
        self._kept: tuple[tuple[int, npt.NDArray[Any]], ...] = ()

    def stored_bytes(self) -> int:
        """Return the bytes of all pieces in the file."""
        lengths = np.minimum(self._table[:, 1], self._bytes)  # what the table says may be anything
        return int(lengths.sum(dtype=np.float64))

    def stretch(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of the file from the first to the last piece that has these values."""
        low, high = first // self._piece, (last - 1) // self._piece
        if not 0 <= low <= high < len(self._table):
            return self._data[:0]
        return self._data[int(self._table[low, 0]) : sum(self._table[high].tolist())]

    def take(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return the values from ``first`` to the one before ``last``, not to be written to."""
        if (last - first) * self._dtype.itemsize > LARGEST_ROW:
            raise CacheError(f"it has values {first} to {last}, more than a compressed row may")
        if first == last:
            return np.empty(0, self._dtype)
        low, high = first // self._piece, (last - 1) // self._piece
        # Decoded before the row is allocated, so that only what is there can take memory.
        start = self._decoded(low)[first - low * self._piece : last - low * self._piece]
        if low == high:
            return start
        values = np.empty(last - first, self._dtype)
        values[: len(start)] = start
        for number in range(low + 1, high + 1):
            place = number * self._piece - first
            some = values[place : place + self._piece]
            some[:] = self._decoded(number)[: len(some)]
        values.flags.writeable = False
        return values

    def _decoded(self, number: int) -> npt.NDArray[Any]:
        for known, values in self._kept:
            if known == number:
                return values
        place, length = self._table[number].tolist()
        if not 0 < length <= self._bytes or place + length > len(self._data):
            raise CacheError(
                f"piece {number} of it is said to be {length} bytes at {place}, of the "
                f"{self._bytes} that it may have and the file's {len(self._data)}"
            )
        data = self._data[place : place + length]
        if length == self._bytes:
            return data.view(self._dtype)
        try:
            values = self._codec.decode(data, self._bytes).view(self._dtype)
        except Undecodable as error:
            raise CacheError(
                f"piece {number} of it does not decode to {self._bytes} bytes: {error}"
            ) from error
        if self._keeps:
            self._kept = (*self._kept[1 - _KEPT :], (number, values))
        return values
