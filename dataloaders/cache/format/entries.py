"""What an index has entries for: places in a file, the columns and shards of a cache.

ColumnEntry "image" ──values──> Extent(4096, 990)    offset in bytes, and how many values
Shard "train.parts/00500.h5", 500 rows               a file beside the one that joins it

Decoded as they are annotated (fields.py), and compared with each other (index.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

Variant: TypeAlias = tuple[str, int]  # a leaf's kind, and how many dimensions it has

MOST_VARIANTS = 255
MOST_FIXED = 31  # dimensions of a row in a fixed column: HDF5 has 32, the first counts the rows
MOST_SHARDS = 1 << 16  # files of a joined cache: the kernel maps about as many for a process
LARGEST_ROW = 1 << 28  # bytes of a row of a compressed column, which a reader has to allocate
LARGEST_PIECE = 1 << 18  # bytes compressed together, unless one row of a fixed column has more

_LONGEST_NAME = 255  # bytes of a file's name


class Extent(NamedTuple):
    """The place of the first of some values in the file, and how many there are; without any 0."""

    offset: int
    size: int


@dataclass(frozen=True)
class Checksums:
    """The table of a file's checksums."""

    block: int  # bytes after the user block that share one
    values: Extent  # uint32, a crc32 each
    digest: str  # of their bytes, in hexadecimal


@dataclass(frozen=True)
class Failed:
    """The samples that were left out."""

    rows: Extent  # uint64, their numbers
    messages: Extent  # uint8, JSON: a list of texts


@dataclass(frozen=True)
class Shard:
    """One file of a joined cache."""

    name: str  # its path from the folder of the joined file
    rows: int
    samples: int  # of the dataset that it was built from, those left out included
    file_bytes: int
    identity: str  # its `Index.identity`


@dataclass(frozen=True)
class Packing:
    """How a column's values are compressed."""

    codec: str  # a name in `CODECS`
    piece: int  # values that are compressed together; zeros follow the last ones
    # uint64: the place of each piece in the file, and its length in bytes. A piece as long as its
    # values is not compressed.
    pieces: Extent


@dataclass(frozen=True)
class ColumnEntry:
    """One column of a cache: one leaf of all rows."""

    name: str  # unique; its path under ``/columns`` in the HDF5 file
    dtype: str  # of the values, as NumPy writes it
    variants: tuple[Variant, ...]  # the kinds of leaf that occur
    shape: tuple[int, ...] | None  # that of every row of a fixed column; None where it varies
    dimensions: int  # the most that a variant has
    # Of all rows. In a fixed column of an older file, a row that is None has zeros. Where they are
    # compressed, or in shards, their place is 0.
    values: Extent
    # uint64, of a variable column: value offsets[i] is row i's first, offsets[i + 1] after its last
    offsets: Extent | None
    shapes: Extent | None  # uint64, (rows, dimensions), of a variable column with more than one
    codes: Extent | None  # uint8, each row's number in ``variants``, if there are several
    packing: Packing | None = None  # None: the values are not compressed
    most_values: int | None = None  # of the largest row of a variable column; None: not known
    most_pixels: int | None = None  # width times height of the largest encoded image; None: as well

    @property
    def largest_row(self) -> int | None:
        """How many values its largest row has; None: not known."""
        return self.most_values if self.shape is None else math.prod(self.shape)

    @property
    def is_none(self) -> bool:
        """Whether every row is None: then its dtype and shape mean nothing."""
        return all(kind == "none" for kind, _ in self.variants)

    @property
    def bytes(self) -> int:
        """The bytes of all its datasets, before compression."""
        return sum(extent.size * np.dtype(dtype).itemsize for _, dtype, extent in self.sized())

    def sized(self) -> Iterable[tuple[str, str, Extent]]:
        """Yield name, dtype and place of each of its datasets, compressed values included."""
        yield "values", self.dtype, self.values
        pieces = None if self.packing is None else self.packing.pieces
        for name, extent in (
            ("pieces", pieces),
            ("offsets", self.offsets),
            ("shapes", self.shapes),
        ):
            if extent is not None:
                yield name, "<u8", extent
        if self.codes is not None:
            yield "codes", "|u1", self.codes

    def parts(self) -> Iterable[tuple[str, str, Extent]]:
        """Yield the same of those that have one place in the file."""
        return (each for each in self.sized() if each[0] != "values" or self.packing is None)

    def shape_of(self, part: str, rows: int) -> tuple[int, ...]:
        """Return the shape of one of its datasets."""
        if part == "values":
            return (self.values.size,) if self.shape is None else (rows, *self.shape)
        if part == "pieces" and self.packing is not None:
            return self.packing.pieces.size // 2, 2
        if part == "shapes":
            return rows, self.dimensions
        return (rows + (part == "offsets"),)

    def placed(self, places: Mapping[str, Extent]) -> ColumnEntry:
        """Return the entry with these of its datasets at these places."""
        packing, own = self.packing, {n: place for n, place in places.items() if n != "pieces"}
        if packing is not None and "pieces" in places:
            packing = replace(packing, pieces=places["pieces"])
        return replace(self, packing=packing, **own)  # type: ignore[arg-type]

    @classmethod
    def of_rows(
        cls,
        name: str,
        dtype: str,
        variants: tuple[Variant, ...],
        shape: tuple[int, ...] | None,
        rows: int,
        *,
        size: int = 0,
        most_values: int | None = None,
        most_pixels: int | None = None,
    ) -> ColumnEntry:
        """Return the entry of a column of so many rows that is still to be written.

        ``size`` is how many values a variable column has; the rest is as in the entry.
        """
        dimensions = max(of for _, of in variants)
        fixed = shape is not None
        return cls(
            name,
            dtype,
            variants,
            shape,
            dimensions,
            Extent(0, size if shape is None else rows * math.prod(shape)),
            None if fixed else Extent(0, rows + 1),
            Extent(0, rows * dimensions) if not fixed and dimensions > 1 else None,
            Extent(0, rows) if len(variants) > 1 else None,
            most_values=None if fixed else most_values,
            most_pixels=most_pixels,
        )


def is_shard_name(name: str) -> bool:
    """Return whether ``name`` is of a file beside this one or in a folder there, and printable."""
    names = name.split("/")
    return len(names) <= 2 and all(
        each not in ("", ".", "..")
        and each.isprintable()
        and "\\" not in each
        and len(each.encode("utf-8", "replace")) <= _LONGEST_NAME
        for each in names
    )
