"""The columns of a whole file, decided by looking at its chunks one after the other.

    chunks ──> merge ──> Layout a column: fixed (one shape in all rows) or variable

The result does not depend on how the rows were cut into chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dataloaders.cache.chunk import MOST_VARIANTS, Chunk, Column, Variant, sizes
from dataloaders.cache.entries import MOST_FIXED
from dataloaders.cache.pieces import piece_of
from dataloaders.cache.sample import Structure, column_names
from dataloaders.errors import CacheError

__all__ = ["Layout", "Layouts", "first_columns"]

_COMPRESSED = ("encoded", "file")
"""Families of kinds that are compressed already."""

_LEAST_BYTES = 2048  # of a row: hdf5.py aligns such columns


@dataclass(frozen=True)
class Layout:
    """How one column stands in the file; the fields are those of `ColumnEntry`.

    Attributes:
        name: of the column.
        dtype: of its values.
        variants: in the order in which they first occur.
        shape: of every row, or None.
        dimensions: the most that a variant has.
        size: how many values there are.
        piece: how many of them are compressed together; 0: they are not compressed.
        most_values: of the largest row, where rows have several shapes; None: it is not known.
        most_pixels: of the largest encoded image; None: there is none, or it is not known.
    """

    name: str
    dtype: str
    variants: tuple[Variant, ...]
    shape: tuple[int, ...] | None
    dimensions: int
    size: int
    piece: int = 0
    most_values: int | None = None
    most_pixels: int | None = None

    def datasets(self, rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each HDF5 dataset of it."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        if self.shape is None:
            found["values"] = (self.dtype, (self.size,))
            found["offsets"] = ("<u8", (rows + 1,))
            if self.dimensions > 1:
                found["shapes"] = ("<u8", (rows, self.dimensions))
        else:
            found["values"] = (self.dtype, (rows, *self.shape))
        if len(self.variants) > 1:
            found["codes"] = ("|u1", (rows,))
        return found


def first_columns(columns: Sequence[Layout], rows: int) -> list[int]:
    """Numbers of the columns that stand first in the file, in this order, where that can be said.

    Large ones of one shape, whose size is known when their number of rows is; then of those of
    several shapes the largest, whose end nobody knows before all rows are read.
    """
    fixed, others = [], []
    for number, column in enumerate(columns):
        if column.piece:
            continue
        least = rows * _LEAST_BYTES
        if not rows or column.size * np.dtype(column.dtype).itemsize < least:
            continue
        if column.shape is None:
            others.append(number)
        elif len(column.variants) == 1 and not _is_encoded(column.variants):
            fixed.append(number)
    others.sort(key=lambda number: -columns[number].size * np.dtype(columns[number].dtype).itemsize)
    return fixed + others[:1]


def _is_encoded(variants: Iterable[Variant]) -> bool:
    """Whether encoded files are among them."""
    return any(kind.partition(":")[0] in _COMPRESSED for kind, _ in variants)


class Layouts:
    """What the chunks seen so far have in common."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.rows = 0
        self._columns: list[_Merged] = []

    def add(self, chunk: Chunk) -> None:
        """Take one more chunk into account.

        Raises:
            CacheError: its rows cannot stand in one file with those before.
        """
        one = Layouts()
        one.structure, one.rows = chunk.structure, chunk.rows
        names = column_names(chunk.structure)
        one._columns = [_Merged.of(*each) for each in zip(names, chunk.columns, strict=True)]
        self.merge(one)

    def merge(self, later: Layouts) -> None:
        """Take into account what ``later`` has seen, as if it was behind these chunks.

        Raises:
            CacheError: as `add`.
        """
        if later.structure is None:
            return
        if self.structure is None:
            self.structure = later.structure
            self._columns = [_Merged(name) for name in column_names(later.structure)]
        elif later.structure != self.structure:
            names, others = column_names(self.structure), column_names(later.structure)
            raise CacheError(
                f"rows 0 to {self.rows - 1} and the {later.rows} from {self.rows} on are built "
                f"differently: {_listed(names)} and {_listed(others)}; a cache needs the same keys "
                "and lengths in all samples. Return what varies as one tensor, array, str or plain "
                "list"
            )
        for merged, column in zip(self._columns, later._columns, strict=True):
            merged.merge(column, self.rows, later.rows)
        self.rows += later.rows

    def done(self, rows: int | None = None, *, compress: bool = False) -> list[Layout]:
        """The columns of all rows; or of so many, if those to come are like those so far.

        Args:
            rows: how many; None: those so far.
            compress: whether columns that are worth it will be compressed.
        """
        scale = 1.0 if rows is None else rows / max(1, self.rows)
        rows = self.rows if rows is None else rows
        return [merged.done(rows, scale, compress=compress) for merged in self._columns]


class _Merged:
    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype: str | None = None
        self.variants: dict[Variant, None] = {}
        self.shape: tuple[int, ...] | None = None
        self.fixed = True
        self.size = 0
        self.largest = 0
        self.pixels: int | None = 0

    @classmethod
    def of(cls, name: str, column: Column) -> _Merged:
        """What one chunk has."""
        found = cls(name)
        found.variants = dict.fromkeys(column.variants)
        found.pixels = column.pixels
        there = occupied(column)
        if there.any():
            found.dtype = column.dtype
            found.size = len(column.values)
            found.largest = int(sizes(column).max())
            found.shape = _shape_of(column, there)
            found.fixed = found.shape is not None
        return found

    def merge(self, later: _Merged, before: int, rows: int) -> None:
        """Take ``later`` into account, of ``rows`` rows; ``before`` them there are so many."""
        self.variants.update(later.variants)
        if len(self.variants) > MOST_VARIANTS:
            raise CacheError(f"column {self.name!r} holds more than {MOST_VARIANTS} kinds of value")
        if self.pixels is not None:
            self.pixels = None if later.pixels is None else max(self.pixels, later.pixels)
        if later.dtype is None:  # None in every row
            return
        if self.dtype is not None and later.dtype != self.dtype:
            raise CacheError(
                f"column {self.name!r} holds {self.dtype} in rows 0 to {before - 1} and "
                f"{later.dtype} in the {rows} from {before} on; convert them to one type in "
                "the dataset"
            )
        self.fixed &= later.fixed and (self.dtype is None or self.shape == later.shape)
        self.dtype, self.shape = later.dtype, later.shape
        self.size += later.size
        self.largest = max(self.largest, later.largest)

    def done(self, rows: int, scale: float, *, compress: bool) -> Layout:
        layout = self._layout(rows, scale)
        if _is_encoded(self.variants):
            layout = replace(layout, most_pixels=self.pixels or None)
        return replace(layout, piece=self._piece(layout, rows)) if compress else layout

    def _layout(self, rows: int, scale: float) -> Layout:
        dimensions = max((of for _, of in self.variants), default=0)
        variants = tuple(self.variants)
        if self.dtype is None:
            # None in every row: a column that takes no bytes.
            return Layout(self.name, "|u1", variants, (0,), dimensions, 0)
        if not self.fixed or self.shape is None:
            size = round(self.size * scale)
            return Layout(
                self.name, self.dtype, variants, None, dimensions, size, most_values=self.largest
            )
        size = rows * math.prod(self.shape)
        return Layout(self.name, self.dtype, variants, self.shape, dimensions, size)

    def _piece(self, layout: Layout, rows: int) -> int:
        """How many values to compress together."""
        if _is_encoded(layout.variants):
            return 0
        width = np.dtype(layout.dtype).itemsize
        return piece_of(width, rows, layout.shape, layout.size, self.largest)


def occupied(column: Column) -> npt.NDArray[np.bool_]:
    """Which rows of ``column`` are not None."""
    kinds = np.array([kind != "none" for kind, _ in column.variants], np.bool_)
    return kinds[column.codes]


def _shape_of(column: Column, there: npt.NDArray[np.bool_]) -> tuple[int, ...] | None:
    """The one shape that the rows of ``column`` have which are ``there``, if they have one."""
    dimensions = {of for kind, of in column.variants if kind != "none"}
    if len(dimensions) > 1:
        return None
    (of,) = dimensions
    shapes = column.shapes[there, :of]
    if of > MOST_FIXED or (shapes != shapes[0]).any():
        return None
    return tuple(int(size) for size in shapes[0])


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{len(names)} leaves ({shown})"
