"""Some rows of a cache that is being built, column by column, as one file of a build's folder.

    magic, header bytes (8), header (JSON), then each column's codes, shapes and values

A column's values stand one row after the other. Rows of a column share a type; their kind
(``int``, ``image:RGB``, ``none``) and shape may differ, which `Column.codes` and `Column.shapes`
say row by row. Of a column whose values stand elsewhere (placing.py) there is nothing in the file,
or codes and shapes without values.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.sample import Cell, Structure, column_names
from dataloaders.errors import CacheError

__all__ = ["MOST_VARIANTS", "Chunk", "Column", "Variant", "sizes"]

_MAGIC = b"dlchunk1"

Variant = tuple[str, int]
"""A cell's kind, and how many dimensions it has."""

MOST_VARIANTS = 255


@dataclass(frozen=True)
class Column:
    """One leaf of some rows.

    Attributes:
        dtype: of the values, as NumPy writes it; "|u1" where every row is None.
        variants: the kinds that occur, in the order in which they first do.
        codes: uint8, a row's variant.
        shapes: uint64, (rows, most dimensions); what a row does not have is 0.
        values: of all rows but those that are None, in C order, one after the other.
        pixels: of the largest encoded image; 0 without one, None where nobody has counted.
    """

    dtype: str
    variants: tuple[Variant, ...]
    codes: npt.NDArray[np.uint8]
    shapes: npt.NDArray[np.uint64]
    values: npt.NDArray[Any]
    pixels: int | None = 0


@dataclass(frozen=True)
class Chunk:
    """Some rows, split into columns; ``structure`` puts them together again.

    Attributes:
        structure: of each row.
        columns: one a leaf.
        rows: how many there are, which rows without a leaf (an empty dict) do not show.
    """

    structure: Structure
    columns: tuple[Column, ...]
    rows: int

    @classmethod
    def of(
        cls,
        rows: Iterable[tuple[int, Structure, Sequence[Cell]]],
        elsewhere: Collection[int] = (),
        hollow: Collection[int] = (),
    ) -> Chunk | None:
        """The chunk of these rows: (number, for messages; structure; cells). None without rows.

        Of the columns with the numbers ``elsewhere`` it has no rows, of those that are ``hollow``
        kinds and shapes, but no values.

        Raises:
            CacheError: rows that cannot stand in one column; the message names them.
        """
        structure: Structure | None = None
        first = 0
        table: list[list[Cell]] = []
        numbers: list[int] = []
        for number, found, cells in rows:
            if structure is None:
                structure, first = found, number
            elif found != structure:
                raise CacheError(
                    f"samples {first} and {number} are built differently: {_shown(structure)} and "
                    f"{_shown(found)}; a cache needs the same keys in the same order, and the same "
                    "lengths, in all of them. Return what varies as one tensor, array, str or "
                    "plain list"
                )
            table.append(list(cells))
            numbers.append(number)
        if structure is None:
            return None
        names = column_names(structure)
        columns = tuple(
            _column(name, [cells[n] for cells in table if n not in elsewhere], numbers, n in hollow)
            for n, name in enumerate(names)
        )
        return cls(structure, columns, len(table))

    def to_bytes(self) -> list[bytes | memoryview]:
        """What a file of it consists of, in order."""
        header = {
            "structure": self.structure,
            "rows": self.rows,
            "columns": [
                {
                    "dtype": column.dtype,
                    "variants": [list(variant) for variant in column.variants],
                    "rows": len(column.codes),
                    "dimensions": column.shapes.shape[1],
                    "values": len(column.values),
                    "pixels": column.pixels,
                }
                for column in self.columns
            ],
        }
        text = json.dumps(header, separators=(",", ":")).encode("ascii")
        parts: list[bytes | memoryview] = [_MAGIC, len(text).to_bytes(8, "little"), text]
        for column in self.columns:
            for array in (column.codes, column.shapes.astype("<u8"), column.values):
                parts.append(np.ascontiguousarray(array).reshape(-1).view("|u1").data)
        return parts

    def completed(self, columns: Mapping[int, Column]) -> Chunk:
        """The same rows with these columns, by number, in place of those that it has."""
        found = tuple(columns.get(n, column) for n, column in enumerate(self.columns))
        return replace(self, columns=found)

    @classmethod
    def from_buffer(cls, data: bytes | memoryview) -> Chunk:
        """The chunk of which ``data`` is the file; its arrays are views of ``data``.

        A build reads its own files, after comparing their digests: this is no defence.
        """
        if bytes(data[:8]) != _MAGIC:
            raise CacheError("this is no file of a cache that is being built")
        size = int.from_bytes(data[8:16], "little")
        header = json.loads(bytes(data[16 : 16 + size]))
        position = 16 + size
        columns = []

        def take(dtype: str, count: int) -> npt.NDArray[Any]:
            nonlocal position
            # Not aligned: what is next to a header of any length is copied before it is used.
            length = np.dtype(dtype).itemsize * count
            array = np.frombuffer(data[position : position + length], "|u1").view(dtype)
            position += length
            return array

        for each in header["columns"]:
            codes = take("|u1", each["rows"])
            shapes = take("<u8", each["rows"] * each["dimensions"])
            shapes = shapes.reshape(each["rows"], each["dimensions"])
            values = take(each["dtype"], each["values"])
            variants = tuple((kind, dimensions) for kind, dimensions in each["variants"])
            pixels = each.get("pixels")  # which a build that an older version began does not have
            columns.append(Column(each["dtype"], variants, codes, shapes, values, pixels))
        return cls(header["structure"], tuple(columns), header["rows"])


def _column(name: str, cells: list[Cell], numbers: list[int], hollow: bool) -> Column:
    dtype, dtype_of = "|u1", -1
    variants: dict[Variant, int] = {}
    codes = np.empty(len(cells), np.uint8)
    dimensions = max((cell.values.ndim for cell in cells if cell.kind != "none"), default=0)
    shapes = np.zeros((len(cells), dimensions), np.uint64)
    for row, cell in enumerate(cells):
        found = cell.values.dtype.str
        if cell.kind == "none":
            pass
        elif dtype_of < 0:
            dtype, dtype_of = found, row
        elif found != dtype:
            raise CacheError(
                f"column {name!r} holds {dtype} ({cells[dtype_of].kind}) in sample "
                f"{numbers[dtype_of]} and {found} ({cell.kind}) in sample {numbers[row]}; convert "
                "them to one type in the dataset"
            )
        variant = (cell.kind, 0 if cell.kind == "none" else cell.values.ndim)
        code = variants.setdefault(variant, len(variants))
        if code >= MOST_VARIANTS:
            raise CacheError(f"column {name!r} holds more than {MOST_VARIANTS} kinds of value")
        codes[row] = code
        if cell.kind != "none":
            shapes[row, : cell.values.ndim] = cell.values.shape
    # As bytes: of big-endian arrays `concatenate` makes one in the machine's own order.
    full = [] if hollow else [cell.values for cell in cells if cell.kind != "none"]
    arrays = [values.reshape(-1).view("|u1") for values in full]
    values = np.concatenate(arrays) if arrays else np.empty(0, "|u1")
    pixels = max((cell.pixels for cell in cells), default=0)
    return Column(dtype, tuple(variants), codes, shapes, values.view(dtype), pixels)


def sizes(column: Column) -> npt.NDArray[np.int64]:
    """How many values each row of ``column`` has."""
    counts = np.ones(len(column.codes), np.int64)
    dimensions = np.array([d for _, d in column.variants], np.int64)[column.codes]
    for axis in range(column.shapes.shape[1]):
        counts *= np.where(dimensions > axis, column.shapes[:, axis].astype(np.int64), 1)
    none = np.array([kind == "none" for kind, _ in column.variants], bool)[column.codes]
    counts[none] = 0
    return counts


def _shown(structure: Structure) -> str:
    names = column_names(structure)
    return f"{len(names)} leaves ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"
