"""The leaves of a mapped column: one row, or many rows at once.

Offsets, shapes and codes come from the file and are checked each time they are used, so that no
file leads outside its own column. Compressed values come out of `Pieces`, all others out of the
map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.format.entries import ColumnEntry, Extent
from dataloaders.cache.printable import shown
from dataloaders.cache.read.pieces import Pieces
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.cache.sample.sample import leaf_of
from dataloaders.errors import CacheError

__all__ = ["ColumnReader", "mapped"]

_LARGEST = 1 << 48


def mapped(data: npt.NDArray[np.uint8], dtype: str, extent: Extent) -> npt.NDArray[Any]:
    """The values at ``extent`` of the file, without a copy."""
    width = np.dtype(dtype).itemsize
    return data[extent.offset : extent.offset + extent.size * width].view(dtype)


class ColumnReader:
    """Gives the leaves of one column.

    Raises:
        MissingDependency: it is compressed, and the codec's package is not installed.
    """

    def __init__(self, entry: ColumnEntry, rows: int, data: npt.NDArray[np.uint8]) -> None:
        self.entry = entry
        self._kinds = [kind for kind, _ in entry.variants]
        self._dimensions = [of for _, of in entry.variants]
        self._codes = None if entry.codes is None else mapped(data, "|u1", entry.codes)
        self._pieces = None if entry.packing is None else Pieces(entry, data)
        if self._pieces is None:
            values = mapped(data, entry.dtype, entry.values)
            self._mapped = values if entry.shape is None else values.reshape(rows, *entry.shape)
        if entry.shape is not None:
            self._size = math.prod(entry.shape)  # values of a row
            return
        self._offsets = mapped(data, "<u8", entry.offsets or Extent(0, 0))
        self._shapes = None
        if entry.shapes is not None:
            self._shapes = mapped(data, "<u8", entry.shapes).reshape(rows, entry.dimensions)

    @property
    def values(self) -> npt.NDArray[Any]:
        """All values as a view of the file: of a fixed column (rows, *shape), else flat.

        Raises:
            CacheError: they are compressed.
        """
        if self.entry.packing is not None:
            raise CacheError(
                f"column {self.entry.name!r} is compressed with {self.entry.packing.codec}, so it "
                "is no array in the file; read rows, or build it without compress="
            )
        return self._mapped

    @property
    def nbytes(self) -> int:
        """Bytes of all values, decompressed."""
        return self.entry.values.size * np.dtype(self.entry.dtype).itemsize

    def packed_bytes(self) -> int | None:
        """Bytes that the compressed values take in the file; None: they are not compressed."""
        return None if self._pieces is None else self._pieces.packed_bytes()

    def leaf(self, row: int) -> Any:
        """The leaf of this row, in memory of its own.

        Raises:
            CacheError: what the file says of it cannot be.
        """
        try:
            kind, values = self._cell(row)
            return None if values is None else leaf_of(kind, values, self.entry.most_pixels)
        except CacheError as error:
            raise self._located(row, error) from error

    def file(self, row: int) -> bytes | None:
        """The encoded image of this row as the bytes of a file; None: it is kept otherwise.

        Raises:
            CacheError: as `leaf`.
        """
        kind, values = self.cell(row)
        return values.tobytes() if values is not None and is_encoded(kind) else None

    def cell(self, row: int) -> tuple[str, npt.NDArray[Any] | None]:
        """The kind of this row, and its values in their shape as a view of the file, if any.

        Raises:
            CacheError: as `leaf`.
        """
        try:
            return self._cell(row)
        except CacheError as error:
            raise self._located(row, error) from error

    def view(self, row: int) -> npt.NDArray[Any] | None:
        """The values of this row, in their shape, as a view of the file; None: it has none.

        Raises:
            CacheError: as `leaf`.
        """
        return self.cell(row)[1]

    def _cell(self, row: int) -> tuple[str, npt.NDArray[Any] | None]:
        code = 0 if self._codes is None else int(self._codes[row])
        if code >= len(self._kinds):
            raise CacheError(f"it is of kind number {code}, of {len(self._kinds)}")
        kind = self._kinds[code]
        if kind == "none":
            return kind, None
        if self.entry.fixed:
            return kind, self._row(row)
        first, last = self._offsets[row : row + 2].tolist()
        shape = None if self._shapes is None else self._shapes[row].tolist()
        return kind, self._values(first, last, shape, self._dimensions[code])

    def _row(self, row: int) -> npt.NDArray[Any]:
        """The values of a row of a fixed column."""
        if self._pieces is None:
            return self._mapped[row, ...]
        assert self.entry.shape is not None
        return self._pieces.take(row * self._size, (row + 1) * self._size).reshape(self.entry.shape)

    def leaves(self, rows: Sequence[int]) -> list[Any]:
        """The leaves of these rows.

        Raises:
            CacheError: as `leaf`.
        """
        if self._pieces is not None:
            # In the file's order, so that rows that share a piece decode it once.
            found: list[Any] = [None] * len(rows)
            for position in sorted(range(len(rows)), key=rows.__getitem__):
                found[position] = self.leaf(rows[position])
            return found
        if len(self._kinds) > 1 or not self.entry.fixed:
            return [self.leaf(row) for row in rows]
        kind = self._kinds[0]
        if kind == "none":
            return [None] * len(rows)
        if kind in ("int", "float", "complex"):
            numbers: list[Any] = self._mapped[np.asarray(rows, np.int64)].tolist()
            return numbers
        values, leaves = self._mapped, []
        for row in rows:
            try:
                leaves.append(leaf_of(kind, values[row, ...], self.entry.most_pixels))
            except CacheError as error:
                raise self._located(row, error) from error
        return leaves

    def stretches(self, first: int, last: int) -> Iterator[npt.NDArray[Any]]:
        """What the file has of rows ``first`` to ``last - 1``, as arrays that lie over it.

        The values of a variable column lie where its offsets say; whatever they say, they are its
        own.
        """
        if self._codes is not None:
            yield self._codes[first:last]
        if self.entry.fixed:
            if self._pieces is None:
                yield self._mapped[first:last]
            else:
                yield self._pieces.stretch(first * self._size, last * self._size)
            return
        offsets = self._offsets[first : last + 1]
        yield offsets
        if self._shapes is not None:
            yield self._shapes[first:last]
        if len(offsets):
            low, high = int(offsets[0]), int(offsets[-1])
            pieces = self._pieces
            yield self._mapped[low:high] if pieces is None else pieces.stretch(low, high)

    def _values(
        self, first: int, last: int, shape: list[int] | None, dimensions: int
    ) -> npt.NDArray[Any]:
        """These values of a variable column, in their shape."""
        if not first <= last <= self.entry.values.size:
            raise CacheError(f"it has values {first} to {last}, of {self.entry.values.size}")
        most = self.entry.most_values
        if most is not None and last - first > most:
            raise CacheError(f"it has {last - first} values, and it may have {most} at most")
        if shape is None:
            shape = [last - first] if dimensions else []
        elif any(shape[dimensions:]):
            raise CacheError(f"its shape is {shape}, of {dimensions} dimensions")
        shape = shape[:dimensions]
        if math.prod(shape) != last - first or math.prod(filter(None, shape)) > _LARGEST:
            raise CacheError(f"its shape is {shape}, of {last - first} values")
        values = (
            self._mapped[first:last] if self._pieces is None else self._pieces.take(first, last)
        )
        try:
            return values.reshape(shape)
        except ValueError as error:  # more dimensions than this NumPy has
            raise CacheError(str(error)) from error

    def _located(self, row: int, error: CacheError) -> CacheError:
        return CacheError(
            f"column {shown(self.entry.name)}, row {row}: {error}; the file is damaged: find where "
            "with verify(), and build it again"
        )
