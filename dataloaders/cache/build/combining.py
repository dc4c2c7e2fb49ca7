"""The columns of several parts as those of one cache.

    parts' columns ──> an entry: fixed, if it is so in all of them with one shape, else variable
    a part's rows  ──> offsets, shapes and codes as they count in the whole; its values

A joined cache leaves values where they are; a merged one has a copy, as if written at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.build.rows import other_structure, refuse_many
from dataloaders.cache.format.entries import ColumnEntry, Shard
from dataloaders.cache.format.hdf5 import Source
from dataloaders.cache.format.writing import Table, path_of
from dataloaders.cache.read.columns import mapped
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.errors import CacheError


def combined_table(
    parts: Sequence[CachedDataset], folder: Path, *, one_file: bool = False
) -> Table:
    """Return the rows of all parts as those of one cache in ``folder``.

    Unless it is ``one_file``, the values stay in the parts, its shards.

    Raises:
        CacheError: parts that cannot stand in one cache; the message names both.
    """
    shards = [
        Shard(
            os.path.relpath(part.path, folder),
            part.index.rows,
            part.index.samples,
            part.index.file_bytes,
            part.identity,
        )
        for part in parts
    ]
    pairs = zip(shards, parts, strict=True)
    rows = _Combined([(shard.name, part) for shard, part in pairs if shard.rows])
    said = rows.structure, rows.count, rows.entries, rows.blocks
    return Table(*said) if one_file else Table(*said, shards, rows.sources)


class _Combined:
    """Parts that have rows, with their names."""

    def __init__(self, parts: Sequence[tuple[str, CachedDataset]]) -> None:
        self._parts = parts
        self.count = sum(len(part) for _, part in parts)
        self.structure = parts[0][1].index.structure if parts else None
        for name, part in parts:
            if part.index.structure != self.structure:
                who = f"the samples of the parts {parts[0][0]} and {name}"
                raise other_structure(who, self.structure, part.index.structure)
        count = len(parts[0][1].columns) if parts else 0
        self.entries = [self._entry(number) for number in range(count)]

    def _entry(self, number: int) -> ColumnEntry:
        columns = [(name, part.columns[number]) for name, part in self._parts]
        name = columns[0][1].name
        variants = tuple(dict.fromkeys(each for _, entry in columns for each in entry.variants))
        refuse_many(name, variants)
        there = [(part, entry) for part, entry in columns if not entry.is_none]
        if not there:
            return ColumnEntry.of_rows(name, "|u1", variants, (0,), self.count)
        first, one = there[0]
        for part, entry in there:
            if entry.dtype != one.dtype:
                raise CacheError(
                    f"column {name!r} holds {one.dtype} in the part {first} and {entry.dtype} in "
                    f"{part}; convert them to one type in the dataset"
                )
        is_fixed = len({entry.shape for _, entry in columns}) == 1 and len(there) == len(columns)
        largest = [entry.largest_row for _, entry in there]
        encoded = [
            entry.most_pixels
            for _, entry in there
            if any(is_encoded(kind) for kind, _ in entry.variants)
        ]
        return ColumnEntry.of_rows(
            name,
            one.dtype,
            variants,
            one.shape if is_fixed else None,
            self.count,
            size=sum(entry.values.size for _, entry in there),
            most_values=None if None in largest else max(filter(None, largest), default=0),
            most_pixels=None if None in encoded else max(filter(None, encoded), default=None),
        )

    def sources(self, number: int) -> tuple[Source, ...]:
        """Return where the values of this column are in the parts."""
        found, rows, values = [], 0, 0
        is_fixed = self.entries[number].shape is not None
        for name, part in self._parts:
            entry = part.columns[number]
            if entry.values.size and not entry.is_none:
                shape = entry.shape_of("values", len(part))
                found.append(
                    Source(name, path_of(entry, "values"), shape, rows if is_fixed else values)
                )
                values += entry.values.size
            rows += len(part)
        return tuple(found)

    def blocks(self, number: int, dataset: str) -> Iterator[npt.NDArray[Any]]:
        """Yield the arrays that make up one dataset of a column; CacheError: a part is damaged."""
        whole, values = self.entries[number], 0
        if dataset == "offsets":
            yield np.zeros(1, "<u8")
        for name, part in self._parts:
            rows = _Rows(name, part, number)
            if dataset == "values":
                try:
                    if not rows.entry.is_none:
                        yield from part.file.columns[number].all_values()
                except CacheError as error:
                    raise rows.damaged(str(error)) from error
            elif dataset == "codes":
                numbers = [whole.variants.index(variant) for variant in rows.entry.variants]
                yield np.array(numbers, "|u1")[rows.codes()]
            elif dataset == "shapes":
                yield rows.shapes(whole.dimensions)
            else:
                ends = values + np.cumsum(rows.sizes())
                values = int(ends[-1])
                yield ends.astype("<u8")


class _Rows:
    """What a part says of its rows of one column."""

    def __init__(self, name: str, part: CachedDataset, number: int) -> None:
        self.entry, self._name, self._part = part.columns[number], name, part

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return how many values each row has; zeros that stand for None count, too."""
        entry = self.entry
        if entry.is_none or entry.shape is not None:
            count = 0 if entry.is_none else math.prod(entry.shape or ())
            return np.full(len(self._part), count, np.int64)
        assert entry.offsets is not None
        ends = mapped(self._part.file.data, "<u8", entry.offsets)
        if ends[0] != 0 or ends[-1] != entry.values.size or (ends[1:] < ends[:-1]).any():
            raise self.damaged(f"its rows do not end at 0 to {entry.values.size}, in order")
        return np.diff(ends).astype(np.int64)

    def shapes(self, dimensions: int) -> npt.NDArray[np.uint64]:
        """Return the shape of each row, with so many dimensions."""
        entry, shapes = self.entry, np.zeros((len(self._part), dimensions), "<u8")
        if entry.shape is not None and not entry.is_none:
            shapes[:, : len(entry.shape)] = entry.shape
        elif entry.shapes is not None:
            found = mapped(self._part.file.data, "<u8", entry.shapes).reshape(-1, entry.dimensions)
            shapes[:, : entry.dimensions] = found
        elif dimensions:
            own = np.array([of for _, of in entry.variants], np.int64)[self.codes()]
            shapes[:, 0] = np.where(own == 1, self.sizes(), 0)
        return shapes

    def codes(self) -> npt.NDArray[np.uint8]:
        """Return the number of each row's variant."""
        if self.entry.codes is None:
            return np.zeros(len(self._part), np.uint8)
        codes = mapped(self._part.file.data, "|u1", self.entry.codes)
        if codes.max() >= len(self.entry.variants):
            raise self.damaged(f"a row is of kind number {codes.max()}")
        return codes

    def damaged(self, what: str) -> CacheError:
        """Return the error of a part that is not as it says."""
        return CacheError(
            f"the part {self._name} is damaged, in column {self.entry.name!r}: {what}; delete it "
            "and build again"
        )
