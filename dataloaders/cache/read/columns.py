"""Read the leaves of a mapped column: one row, or many rows at once.

Offsets, shapes and codes come from the file, so they are checked each time they are used: no file
can lead outside its own column. `Pieces` decodes compressed values; all others are read as they
are mapped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.cache.format.codecs import Codec, Undecodable
from dataloaders.cache.format.entries import LARGEST_PIECE, LARGEST_ROW, ColumnEntry, Extent
from dataloaders.cache.format.fields import LARGEST
from dataloaders.cache.printable import shown
from dataloaders.cache.sample.leaf import value_of
from dataloaders.errors import CacheError
from dataloaders.options import option

Last: TypeAlias = dict[str, tuple[object, int, npt.NDArray[Any]]]
"""The last piece of each column, by its name: of whose values, its number, and what it decodes to.

Rows of a batch are read in the file's order. All parts of a cache share it, because a piece of each
part would take more memory the more parts there are.
"""


def mapped(data: npt.NDArray[np.uint8], dtype: str, extent: Extent) -> npt.NDArray[Any]:
    """Return the values at ``extent`` of the file, without a copy."""
    width = np.dtype(dtype).itemsize
    return data[extent.offset : extent.offset + extent.size * width].view(dtype)


class ColumnReader:
    """Reads one column of a file with so many ``rows``; of a part, ``shard`` is the file's name.

    Where the file contradicts itself, each method raises a CacheError that names the row.
    """

    def __init__(
        self,
        entry: ColumnEntry,
        rows: int,
        data: npt.NDArray[np.uint8],
        last: Last,
        shard: str = "",
    ) -> None:
        self.entry = entry
        self._shard = shard
        self._kinds = [kind for kind, _ in entry.variants]
        self._dimensions = [of for _, of in entry.variants]
        self._codes = None if entry.codes is None else mapped(data, "|u1", entry.codes)
        self._pieces = None if entry.packing is None else Pieces(entry, data, last)
        if self._pieces is None:
            values = mapped(data, entry.dtype, entry.values)
            self._mapped = values if entry.shape is None else values.reshape(rows, *entry.shape)
        self._offsets = mapped(data, "<u8", entry.offsets or Extent(0, 0))
        self._shapes = None
        if entry.shapes is not None:
            self._shapes = mapped(data, "<u8", entry.shapes).reshape(rows, entry.dimensions)

    @property
    def values(self) -> npt.NDArray[Any]:
        """All values, as a view of the file: (rows, *shape) if rows have one shape, else flat."""
        if self.entry.packing is not None:
            raise CacheError(
                f"column {self.entry.name!r} is compressed with {self.entry.packing.codec}, so it "
                f"is no array in the file; read rows, or build it without {option('compress')}"
            )
        return self._mapped

    def all_values(self) -> Iterator[npt.NDArray[Any]]:
        """Yield the values of all rows, in their order; compressed ones piece by piece."""
        if self._pieces is None:
            yield self._mapped
            return
        size, piece = self.entry.values.size, self._pieces.piece
        for first in range(0, size, piece):
            yield self._pieces.take(first, min(first + piece, size))

    def leaf(self, row: int) -> Any:
        """Return the leaf of this row, in memory of its own."""
        try:
            kind, values = self._stored(row)
            return None if values is None else value_of(kind, values, self.entry.most_pixels)
        except CacheError as error:
            raise self._located(row, error) from error

    def stored(self, row: int) -> tuple[str, npt.NDArray[Any] | None]:
        """Return the kind of this row, and its values in their shape as a view of the file."""
        try:
            return self._stored(row)
        except CacheError as error:
            raise self._located(row, error) from error

    def stretch(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return a view of what the file has as values of rows ``first`` to ``last - 1``."""
        if self.entry.shape is None:
            first, last = self._offsets[[first, last]].tolist()
        elif self._pieces is not None:
            size = math.prod(self.entry.shape)
            first, last = first * size, last * size
        return (
            self._mapped[first:last] if self._pieces is None else self._pieces.stretch(first, last)
        )

    def tables(self, first: int, last: int) -> Iterator[npt.NDArray[Any]]:
        """Yield views of what says where and what these rows are, beside their values."""
        for table, more in ((self._codes, 0), (self._offsets, 1), (self._shapes, 0)):
            if table is not None and len(table):
                yield table[first : last + more]

    def _stored(self, row: int) -> tuple[str, npt.NDArray[Any] | None]:
        code = 0 if self._codes is None else int(self._codes[row])
        if code >= len(self._kinds):
            raise CacheError(f"it is of kind number {code}, of {len(self._kinds)}")
        kind, shape = self._kinds[code], self.entry.shape
        if kind == "none":
            return kind, None
        if shape is None:
            return kind, self._values(row, self._dimensions[code])
        if self._pieces is None:
            return kind, self._mapped[row, ...]
        size = math.prod(shape)
        return kind, self._pieces.take(row * size, (row + 1) * size).reshape(shape)

    def _values(self, row: int, dimensions: int) -> npt.NDArray[Any]:
        """Return the values of this row, in the shape that the file has for it."""
        first, last = self._offsets[row : row + 2].tolist()
        if not first <= last <= self.entry.values.size:
            raise CacheError(f"it has values {first} to {last}, of {self.entry.values.size}")
        most = self.entry.most_values
        if most is not None and last - first > most:
            raise CacheError(f"it has {last - first} values, and it may have {most} at most")
        if self._shapes is None:
            shape = [last - first] if dimensions else []
        else:
            shape = self._shapes[row].tolist()
            if any(shape[dimensions:]):
                raise CacheError(f"its shape is {shape}, of {dimensions} dimensions")
            shape = shape[:dimensions]
        if math.prod(shape) != last - first or math.prod(filter(None, shape)) > LARGEST:
            raise CacheError(f"its shape is {shape}, of {last - first} values")
        pieces = self._pieces
        values = self._mapped[first:last] if pieces is None else pieces.take(first, last)
        try:
            return values.reshape(shape)
        except ValueError as error:  # more dimensions than this NumPy has
            raise CacheError(str(error)) from error

    def _located(self, row: int, error: CacheError) -> CacheError:
        where = f"shard {self._shard}: " if self._shard else ""
        return CacheError(
            f"{where}column {shown(self.entry.name)}, row {row}: {error}; the file is damaged: "
            "find where with verify(), and build it again"
        )


class Pieces:
    """The values of a compressed column, those of all rows one after the other.

    values   0 ........ n │ n ........ 2n │ 2n ..... and zeros      n is the same for all pieces
                 │               │               │
    file     compressed       compressed      as it is, where compressing saves nothing
             place, length    place, length   place, length         a table with a row a piece
    """

    def __init__(self, entry: ColumnEntry, data: npt.NDArray[np.uint8], last: Last) -> None:
        assert entry.packing is not None
        self._dtype = np.dtype(entry.dtype)
        self.piece = entry.packing.piece
        self._bytes = self.piece * self._dtype.itemsize
        self._codec = Codec(entry.packing.codec, self._dtype.itemsize)
        self._data = data
        offset, count = entry.packing.pieces
        self._table = data[offset : offset + 8 * count].view("<u8").reshape(-1, 2)
        # A piece is worth keeping only if several rows share it.
        shared = entry.shape is None or self.piece > math.prod(entry.shape)
        self._keeps = shared and self._bytes <= LARGEST_PIECE
        self._name, self._own = entry.name, object()
        # An entry is replaced as a whole, so threads that do this at once only lose it.
        self._last = last

    def stretch(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of the file from the first to the last piece with these values."""
        low, high = first // self.piece, (last - 1) // self.piece
        if not 0 <= low <= high < len(self._table):
            return self._data[:0]
        return self._data[int(self._table[low, 0]) : sum(self._table[high].tolist())]

    def take(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return values ``first`` to ``last - 1``, which must not be written to."""
        if (last - first) * self._dtype.itemsize > LARGEST_ROW:
            raise CacheError(f"it has values {first} to {last}, more than a compressed row may")
        if first == last:
            return np.empty(0, self._dtype)
        low, high = first // self.piece, (last - 1) // self.piece
        # Decoded before the row is allocated: a row that is not in the file takes no memory.
        start = self._decoded(low)[first - low * self.piece : last - low * self.piece]
        if low == high:
            return start
        values = np.empty(last - first, self._dtype)
        values[: len(start)] = start
        for number in range(low + 1, high + 1):
            place = number * self.piece - first
            some = values[place : place + self.piece]
            some[:] = self._decoded(number)[: len(some)]
        values.flags.writeable = False
        return values

    def _decoded(self, number: int) -> npt.NDArray[Any]:
        last = self._last.get(self._name)
        if last is not None and last[:2] == (self._own, number):
            return last[2]
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
            self._last[self._name] = self._own, number, values
        return values
