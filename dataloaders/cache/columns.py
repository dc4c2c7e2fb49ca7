"""The leaves of a mapped column: one row, or many rows at once.

Offsets, shapes and codes come from the file and are checked each time they are used, so that no
file leads outside its own column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.index import ColumnEntry, Extent
from dataloaders.cache.sample import leaf_of
from dataloaders.errors import CacheError

__all__ = ["ColumnReader", "mapped"]

_LARGEST = 1 << 48


def mapped(data: npt.NDArray[np.uint8], dtype: str, extent: Extent) -> npt.NDArray[Any]:
    """The values at ``extent`` of the file, without a copy."""
    width = np.dtype(dtype).itemsize
    return data[extent.offset : extent.offset + extent.size * width].view(dtype)


class ColumnReader:
    """Gives the leaves of one column."""

    def __init__(self, entry: ColumnEntry, rows: int, data: npt.NDArray[np.uint8]) -> None:
        self.entry = entry
        self._kinds = [kind for kind, _ in entry.variants]
        self._dimensions = [of for _, of in entry.variants]
        self._codes = None if entry.codes is None else mapped(data, "|u1", entry.codes)
        values = mapped(data, entry.dtype, entry.values)
        if entry.shape is not None:
            self.values = values.reshape(rows, *entry.shape)
            return
        self.values = values
        self._offsets = mapped(data, "<u8", entry.offsets or Extent(0, 0))
        self._shapes = None
        if entry.shapes is not None:
            self._shapes = mapped(data, "<u8", entry.shapes).reshape(rows, entry.dimensions)

    def leaf(self, row: int) -> Any:
        """The leaf of this row, in memory of its own.

        Raises:
            CacheError: what the file says of it cannot be.
        """
        try:
            kind, values = self._cell(row)
            return None if values is None else leaf_of(kind, values)
        except CacheError as error:
            raise self._located(row, error) from error

    def view(self, row: int) -> npt.NDArray[Any] | None:
        """The values of this row, in their shape, as a view of the file; None: it has none.

        Raises:
            CacheError: as `leaf`.
        """
        try:
            return self._cell(row)[1]
        except CacheError as error:
            raise self._located(row, error) from error

    def _cell(self, row: int) -> tuple[str, npt.NDArray[Any] | None]:
        code = 0 if self._codes is None else int(self._codes[row])
        if code >= len(self._kinds):
            raise CacheError(f"it is of kind number {code}, of {len(self._kinds)}")
        kind = self._kinds[code]
        if kind == "none":
            return kind, None
        if self.entry.fixed:
            return kind, self.values[row, ...]
        first, last = self._offsets[row : row + 2].tolist()
        shape = None if self._shapes is None else self._shapes[row].tolist()
        return kind, self._values(first, last, shape, self._dimensions[code])

    def leaves(self, rows: Sequence[int]) -> list[Any]:
        """The leaves of these rows.

        Raises:
            CacheError: as `leaf`.
        """
        if len(self._kinds) > 1 or not self.entry.fixed:
            return [self.leaf(row) for row in rows]
        kind = self._kinds[0]
        if kind == "none":
            return [None] * len(rows)
        if kind in ("int", "float", "complex"):
            numbers: list[Any] = self.values[np.asarray(rows, np.int64)].tolist()
            return numbers
        values = self.values
        try:
            return [leaf_of(kind, values[row, ...]) for row in rows]
        except CacheError as error:
            raise self._located(None, error) from error

    def _values(
        self, first: int, last: int, shape: list[int] | None, dimensions: int
    ) -> npt.NDArray[Any]:
        """These values of a variable column, in their shape."""
        if not first <= last <= len(self.values):
            raise CacheError(f"it has values {first} to {last}, of {len(self.values)}")
        if shape is None:
            shape = [last - first] if dimensions else []
        elif any(shape[dimensions:]):
            raise CacheError(f"its shape is {shape}, of {dimensions} dimensions")
        shape = shape[:dimensions]
        if math.prod(shape) != last - first or math.prod(filter(None, shape)) > _LARGEST:
            raise CacheError(f"its shape is {shape}, of {last - first} values")
        try:
            return self.values[first:last].reshape(shape)
        except ValueError as error:  # more dimensions than this NumPy has
            raise CacheError(str(error)) from error

    def _located(self, row: int | None, error: CacheError) -> CacheError:
        where = "" if row is None else f", row {row}"
        return CacheError(
            f"column {self.entry.name!r}{where}: {error}; the file is damaged: find where with "
            "verify(), and build it again"
        )
