"""The columns of several parts as those of one cache.

    parts' columns ──> an entry: fixed, if it is so in all of them with one shape, else variable
    a part's rows  ──> offsets, shapes and codes as they count in the whole; its values

A joined cache leaves values where they are; a merged one has a copy, as if written at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.build.rows import other_structure, refuse_many
from dataloaders.cache.format.entries import ColumnEntry, Shard
from dataloaders.cache.format.hdf5 import Source
from dataloaders.cache.format.index import Index
from dataloaders.cache.format.writing import path_of
from dataloaders.cache.read.columns import mapped
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.errors import CacheError


@dataclass(frozen=True)
class MappedPart:
    """One part that is combined with others: its name from the folder of the whole, and itself."""

    name: str
    cached: CachedDataset

    @property
    def index(self) -> Index:
        """The index of the part."""
        return self.cached.index

    @property
    def shard(self) -> Shard:
        """The entry of the part in the index of the joined cache."""
        index = self.index
        return Shard(self.name, index.rows, index.samples, index.file_bytes, index.identity)


class Combined:
    """The structure, the number of rows and the column entries of all parts, without places.

    Raises:
        CacheError: parts that cannot stand in one cache; the message names both.
    """

    def __init__(self, parts: Sequence[MappedPart]) -> None:
        self._parts = [part for part in parts if part.index.rows]
        self.rows = sum(part.index.rows for part in self._parts)
        self.structure = self._parts[0].index.structure if self._parts else None
        for part in self._parts:
            if part.index.structure != self.structure:
                who = f"the samples of the parts {self._parts[0].name} and {part.name}"
                raise other_structure(who, self.structure, part.index.structure)
        count = len(self._parts[0].index.columns) if self._parts else 0
        self.entries = [self._entry(number) for number in range(count)]

    def _entry(self, number: int) -> ColumnEntry:
        columns = [part.index.columns[number] for part in self._parts]
        name = columns[0].name
        variants = tuple(dict.fromkeys(variant for each in columns for variant in each.variants))
        refuse_many(name, variants)
        pairs = zip(self._parts, columns, strict=True)
        there = [(part, each) for part, each in pairs if not each.is_none]
        if not there:
            return ColumnEntry.of_rows(name, "|u1", variants, (0,), self.rows)
        first, one = there[0]
        for part, each in there:
            if each.dtype != one.dtype:
                raise CacheError(
                    f"column {name!r} holds {one.dtype} in the part {first.name} and {each.dtype} "
                    f"in {part.name}; convert them to one type in the dataset"
                )
        is_fixed = len(there) == len(columns) and len({each.shape for each in columns}) == 1
        largest = [
            each.most_values if each.shape is None else math.prod(each.shape) for _, each in there
        ]
        return ColumnEntry.of_rows(
            name,
            one.dtype,
            variants,
            one.shape if is_fixed else None,
            self.rows,
            size=sum(each.values.size for _, each in there),
            most_values=None if None in largest else max(filter(None, largest), default=0),
            most_pixels=_pixels(columns),
        )

    def sources(self, number: int) -> tuple[Source, ...]:
        """Return where the values of this column are in the parts."""
        found, rows, values = [], 0, 0
        whole = self.entries[number]
        for part in self._parts:
            entry = part.index.columns[number]
            if entry.values.size and not entry.is_none:
                shape = entry.shape_of("values", part.index.rows)
                first = values if whole.shape is None else rows
                found.append(Source(part.name, path_of(entry, "values"), shape, first))
                values += entry.values.size
            rows += part.index.rows
        return tuple(found)

    def blocks(self, number: int, name: str) -> Iterator[npt.NDArray[Any]]:
        """Yield the arrays that make up one dataset of a column; CacheError: a part is damaged."""
        whole, values = self.entries[number], 0
        if name == "offsets":
            yield np.zeros(1, "<u8")
        for part in self._parts:
            entry = part.index.columns[number]
            if name == "values":
                yield from self._values(part, number)
            elif name == "codes":
                numbers = [whole.variants.index(variant) for variant in entry.variants]
                yield np.array(numbers, "|u1")[_codes(entry, part)]
            elif name == "shapes":
                yield _shapes(entry, part, whole)
            else:
                ends = values + np.cumsum(_counts(entry, part))
                values = int(ends[-1])
                yield ends.astype("<u8")

    def _values(self, part: MappedPart, number: int) -> Iterator[npt.NDArray[Any]]:
        entry, reader = part.index.columns[number], part.cached.file.columns[number]
        if entry.packing is None and not entry.is_none:
            yield reader.values
        elif not entry.is_none:
            zeros = np.zeros(entry.shape or (), entry.dtype)
            for row in range(part.index.rows):
                _, values = reader.stored(row)
                if values is not None:
                    yield values
                elif entry.shape is not None:
                    yield zeros


def _counts(entry: ColumnEntry, part: MappedPart) -> npt.NDArray[np.int64]:
    """Return how many values each row of a part has; zeros that stand for None count, too."""
    if entry.is_none or entry.shape is not None:
        count = 0 if entry.is_none else math.prod(entry.shape or ())
        return np.full(part.index.rows, count, np.int64)
    assert entry.offsets is not None
    ends = mapped(part.cached.file.data, "<u8", entry.offsets)
    if ends[0] != 0 or ends[-1] != entry.values.size or (ends[1:] < ends[:-1]).any():
        raise _damaged(entry, part, f"its rows do not end at 0 to {entry.values.size}, in order")
    return np.diff(ends).astype(np.int64)


def _shapes(entry: ColumnEntry, part: MappedPart, whole: ColumnEntry) -> npt.NDArray[np.uint64]:
    """Return the shapes of a part's rows, of as many dimensions as in the whole."""
    shapes = np.zeros((part.index.rows, whole.dimensions), "<u8")
    if entry.shape is not None and not entry.is_none:
        shapes[:, : len(entry.shape)] = entry.shape
    elif entry.shapes is not None:
        found = mapped(part.cached.file.data, "<u8", entry.shapes).reshape(-1, entry.dimensions)
        shapes[:, : entry.dimensions] = found
    elif whole.dimensions:
        dimensions = np.array([of for _, of in entry.variants], np.int64)[_codes(entry, part)]
        shapes[:, 0] = np.where(dimensions == 1, _counts(entry, part), 0)
    return shapes


def _codes(entry: ColumnEntry, part: MappedPart) -> npt.NDArray[np.uint8]:
    if entry.codes is None:
        return np.zeros(part.index.rows, np.uint8)
    codes = mapped(part.cached.file.data, "|u1", entry.codes)
    if codes.max() >= len(entry.variants):
        raise _damaged(entry, part, f"a row is of kind number {codes.max()}")
    return codes


def _pixels(columns: Sequence[ColumnEntry]) -> int | None:
    """Return the pixels of the largest encoded image; None: there is none, or it is not known."""
    encoded = [each for each in columns if any(is_encoded(kind) for kind, _ in each.variants)]
    pixels = [each.most_pixels for each in encoded]
    return None if None in pixels else max(filter(None, pixels), default=None)


def _damaged(column: ColumnEntry, part: MappedPart, what: str) -> CacheError:
    return CacheError(
        f"the part {part.name} is damaged, in column {column.name!r}: {what}; delete it and build "
        "again"
    )
