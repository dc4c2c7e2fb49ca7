"""The columns of several shards as those of one cache, and what of them is written again.

    shards' columns ──> Layout: fixed, if it is so in all of them with one shape, else variable
    a shard's rows  ──> offsets, shapes and codes as they count in the whole

Values are not touched: they stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataloaders.cache.chunk import MOST_VARIANTS
from dataloaders.cache.columns import mapped
from dataloaders.cache.decode import is_encoded
from dataloaders.cache.entries import ColumnEntry
from dataloaders.cache.hdf5 import Piece
from dataloaders.cache.index import Index
from dataloaders.cache.layout import Layout
from dataloaders.cache.sample import column_names
from dataloaders.errors import CacheError

__all__ = ["Part", "Rows", "merged_columns", "piece_of", "rows_of", "values_in"]


@dataclass(frozen=True)
class Part:
    """One shard that is joined.

    Attributes:
        name: of its file.
        index: its own.
        data: all bytes of the file.
    """

    name: str
    index: Index
    data: npt.NDArray[np.uint8]


def merged_columns(parts: Sequence[Part]) -> list[Layout]:
    """The columns of all rows, as if they had been written into one file.

    But where rows are of one shape in a shard and vary elsewhere: those that are None then have
    zeros among the values, as in their shard.

    Raises:
        CacheError: shards that cannot stand in one cache; the message names both.
    """
    full = [part for part in parts if part.index.rows]
    if not full:
        return []
    first = full[0]
    for part in full:
        if part.index.structure != first.index.structure:
            names = [column_names(each.index.structure or 0) for each in (first, part)]
            shown = [", ".join(each[:8]) for each in names]
            raise CacheError(
                f"the samples of the shards {first.name} and {part.name} are built differently: "
                f"{len(names[0])} leaves ({shown[0]}) and {len(names[1])} ({shown[1]}); a cache "
                "needs the same keys and lengths in all of them. Return what varies as one tensor, "
                "array, str or plain list"
            )
    return [_merged(number, full) for number in range(len(first.index.columns))]


def _merged(number: int, parts: Sequence[Part]) -> Layout:
    columns = [part.index.columns[number] for part in parts]
    name = columns[0].name
    variants = tuple(dict.fromkeys(variant for each in columns for variant in each.variants))
    if len(variants) > MOST_VARIANTS:
        raise CacheError(f"column {name!r} holds more than {MOST_VARIANTS} kinds of value")
    dimensions = max(of for _, of in variants)
    there = [(part, each) for part, each in zip(parts, columns, strict=True) if not _is_none(each)]
    if not there:
        return Layout(name, "|u1", variants, (0,), dimensions, 0)
    first, one = there[0]
    for part, each in there:
        if each.dtype != one.dtype:
            raise CacheError(
                f"column {name!r} holds {one.dtype} in the shard {first.name} and {each.dtype} in "
                f"{part.name}; convert them to one type in the dataset"
            )
    if one.shape is not None and all(each.shape == one.shape for _, each in there):
        rows = sum(part.index.rows for part in parts)
        size = rows * math.prod(one.shape)
        return Layout(
            name, one.dtype, variants, one.shape, dimensions, size, most_pixels=_pixels(columns)
        )
    size = sum(values_in(each, part.index.rows) for part, each in there)
    largest = [
        each.most_values if each.shape is None else math.prod(each.shape) for _, each in there
    ]
    return Layout(
        name,
        one.dtype,
        variants,
        None,
        dimensions,
        size,
        most_values=None if None in largest else max(filter(None, largest), default=0),
        most_pixels=_pixels(columns),
    )


def _pixels(columns: Sequence[ColumnEntry]) -> int | None:
    """Of the largest encoded image; None: there is none, or some shard does not say."""
    encoded = [each for each in columns if any(is_encoded(kind) for kind, _ in each.variants)]
    pixels = [each.most_pixels for each in encoded]
    return None if None in pixels else max(filter(None, pixels), default=None)


def _is_none(column: ColumnEntry) -> bool:
    """Whether every row is None: then its dtype and shape mean nothing."""
    return all(kind == "none" for kind, _ in column.variants)


def values_in(column: ColumnEntry, rows: int) -> int:
    """How many values there are, of whatever form they are kept in."""
    if _is_none(column):
        return 0
    return column.values.size if column.shape is None else rows * math.prod(column.shape)


def piece_of(column: ColumnEntry, part: Part, layout: Layout, rows: int, values: int) -> Piece:
    """The column's values in this shard as a part of those of all.

    Args:
        column: the shard's.
        part: the shard.
        layout: of all.
        rows: that the shards before it have.
        values: that they have.
    """
    path = f"/columns/{column.name}"
    if column.shape is None or len(column.variants) > 1:
        path += "/values"
    if column.shape is None:
        return Piece(part.name, path, (values_in(column, part.index.rows),), values)
    first = values if layout.shape is None else rows
    return Piece(part.name, path, (part.index.rows, *column.shape), first)


class Rows(NamedTuple):
    """Some rows of a shard's column, as they count in the whole.

    Attributes:
        ends: the value behind each row's last one.
        shapes: (rows, dimensions).
        codes: each row's variant.
    """

    ends: npt.NDArray[np.uint64]
    shapes: npt.NDArray[np.uint64]
    codes: npt.NDArray[np.uint8]


def rows_of(column: ColumnEntry, part: Part, layout: Layout, rows: range, values: int) -> Rows:
    """These ``rows`` of the shard.

    Args:
        column: the shard's.
        part: the shard.
        layout: of all.
        rows: counted in the shard.
        values: that the shards before it have.

    Raises:
        CacheError: the shard is damaged.
    """
    codes = np.zeros(len(rows), np.uint8)
    if column.codes is not None:
        codes = np.array(mapped(part.data, "|u1", column.codes)[rows.start : rows.stop])
        if len(codes) and codes.max() >= len(column.variants):
            raise _damaged(column, part, f"a row is of kind number {codes.max()}")
    dimensions = np.array([of for _, of in column.variants], np.int64)[codes]
    if layout.shape is not None:
        ends = np.zeros(0, np.uint64)
        shapes = np.zeros((0, 0), np.uint64)
    else:
        starts, ends = _places(column, part, rows)
        shapes = np.zeros((len(rows), layout.dimensions), np.uint64)
        if column.shape is not None:
            if not _is_none(column):
                there = np.array([kind != "none" for kind, _ in column.variants])[codes]
                shapes[there, : len(column.shape)] = column.shape
        elif column.shapes is not None:
            found = mapped(part.data, "<u8", column.shapes).reshape(-1, column.dimensions)
            shapes[:, : column.dimensions] = found[rows.start : rows.stop]
        elif layout.dimensions:
            shapes[:, 0] = np.where(dimensions == 1, ends - starts, 0)
        ends = ends + np.uint64(values)
    numbers = [layout.variants.index(variant) for variant in column.variants]
    return Rows(ends, shapes, np.array(numbers, np.uint8)[codes])


def _places(
    column: ColumnEntry, part: Part, rows: range
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Where the values of these rows begin and end in the shard."""
    if column.shape is not None or column.offsets is None:
        size = 0 if _is_none(column) else math.prod(column.shape or ())
        places = np.arange(rows.start, rows.stop + 1, dtype=np.uint64) * np.uint64(size)
        return places[:-1], places[1:]
    whole = mapped(part.data, "<u8", column.offsets)
    size = values_in(column, part.index.rows)
    if whole[0] != 0 or whole[-1] != size:
        raise _damaged(column, part, f"its rows begin at {whole[0]} and end at {whole[-1]}")
    places = np.array(whole[rows.start : rows.stop + 1])
    if (places[1:] < places[:-1]).any() or places[-1] > size:
        raise _damaged(column, part, "rows have values in another order, or outside")
    return places[:-1], places[1:]


def _damaged(column: ColumnEntry, part: Part, what: str) -> CacheError:
    return CacheError(
        f"the shard {part.name} is damaged, in column {column.name!r}: {what}; find where with "
        "verify(), and build it again"
    )
