"""The files of a cache, mapped, and its columns: each row out of the file that has it.

    row 17 ──bisect──> part 1, its row 7 ──ColumnReader──> leaf
    rows   ──sorted by part──> some rows of each ──> leaves, in the order that was asked for

A cache that joins nothing is its only part. When the cache is opened, parts are looked at: one that
is missing or cut short is known then. Each is mapped when the first of its rows is read, so that a
process that reads some of thousands has only those.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.format.disk import size_of
from dataloaders.cache.format.entries import ColumnEntry, Shard
from dataloaders.cache.format.index import Index
from dataloaders.cache.printable import shown
from dataloaders.cache.read.columns import ColumnReader
from dataloaders.cache.read.shards import check_shards, folder_of, open_shard
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.errors import CacheError
from dataloaders.machine.page_cache import expect_exactly, map_file

Numbers = npt.NDArray[np.int64]

_BYTES_PER_PIXEL = 4  # as Pillow has colours in memory
_MEMORY_PER_BYTE = {"json": 64, "str": 4}  # of what the file has: of JSON, ``[],`` is a list


class MappedFile:
    """One file of a cache, mapped: its index, its bytes (``data``), its columns (``readers``)."""

    def __init__(self, path: Path, descriptor: int, largest: int | None, shard: str = "") -> None:
        try:
            self.index = Index.parse(descriptor, str(path))
            self._path, self._status = str(path), os.fstat(descriptor)
            self.data = map_file(descriptor, self.index.file_bytes)
        except OSError as error:
            raise CacheError(f"the cache {path} cannot be mapped: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self.readers = [
            ColumnReader(limited(entry, largest), self.index.rows, self.data, shard)
            for entry in (() if self.index.shards else self.index.columns)
        ]

    def refuse_cut_short(self) -> None:
        """Raise a CacheError if the file was cut short: reading what it lacks ends the process."""
        try:
            found = os.stat(self._path)
        except OSError:  # removed, or not to be seen: what is open stays
            return
        if os.path.samestat(found, self._status) and found.st_size < len(self.data):
            raise CacheError(
                f"{self._path} was cut short while it was open: it has {found.st_size} bytes, and "
                f"had {len(self.data)}. Whoever writes to it should write a new file next to it "
                "and rename that, as precompute() does; then open it again"
            )


class Files:
    """The files that have the ``rows`` of the cache at ``path``, which is the file ``own``."""

    def __init__(self, path: Path, own: MappedFile, largest: int | None) -> None:
        self._index = index = own.index
        check_shards(path, index)
        self.rows = index.rows
        self._path, self._largest = path, largest
        self._bounds = np.cumsum([0, *(each.rows for each in index.shards or [index])])
        self._starts: list[int] = self._bounds.tolist()
        self._opened = {} if index.shards else {0: own}
        self._exactly = False

    def readers(self, part: int) -> list[ColumnReader]:
        """Return the columns of this part, which is opened if it is not, and compared."""
        found = self._opened.get(part)
        if found is None:
            found = self._opened[part] = self._mapped(self._index.shards[part])
        return found.readers

    def at(self, row: int) -> tuple[int, int]:
        """Return the number of the part that has this row, and the row's number in it."""
        part = bisect_right(self._starts, row) - 1
        return part, row - self._starts[part]

    def locate(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Return `at` of many rows."""
        parts = np.searchsorted(self._bounds, rows, "right") - 1
        return parts, rows - self._bounds[parts]

    def split(self, rows: Sequence[int]) -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
        """Yield each part that has some of ``rows``, their positions, and their numbers in it."""
        if not self._index.shards:
            yield 0, range(len(rows)), rows
            return
        parts, own = self.locate(np.asarray(rows, np.int64))
        for part, places in groups(parts):
            yield part, places.tolist(), own[places].tolist()

    def between(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield of rows ``first`` to ``last - 1`` each part's number, its own first and last."""
        part, _ = self.at(first)
        while first < last:
            start, end = self._starts[part], self._starts[part + 1]
            if start < end:
                yield part, first - start, min(last, end) - start
            first, part = end, part + 1

    def expect_exactly(self, exactly: bool) -> None:
        """Set how a page that is missing is read, as `page_cache.expect_exactly`."""
        self._exactly = exactly
        for file in list(self._opened.values()):  # other threads may add some
            expect_exactly(file.data, exactly)

    def refuse_cut_short(self, rows: Sequence[int]) -> None:
        """Look at each mapped file that has some of ``rows``."""
        parts = self.locate(np.asarray(rows, np.int64))[0].tolist() if self._index.shards else [0]
        for part in {*parts}.intersection(self._opened):
            self._opened[part].refuse_cut_short()

    def _mapped(self, shard: Shard) -> MappedFile:
        folder = folder_of(self._path)
        descriptor = open_shard(folder, shard, self._path)
        file = MappedFile(folder / shard.name, descriptor, self._largest, shard.name)
        self._check(file.index, shard)
        expect_exactly(file.data, self._exactly)
        return file

    def _check(self, index: Index, shard: Shard) -> None:
        """Check that the part's rows can be rows of the joined cache, which may say anything.

        Only then is a column that is fixed here fixed there, with the same shape and type.
        """
        wrong = ""
        if index.shards:
            wrong = "is itself a joined cache"
        elif index.rows != shard.rows:
            wrong = f"has {index.rows} rows, and {shard.rows} when it was joined"
        elif index.structure != self._index.structure:
            wrong = "has samples that are built differently"
        else:
            for entry, whole in zip(index.columns, self._index.columns, strict=True):
                is_like = entry.dtype == whole.dtype and whole.shape in (None, entry.shape)
                if not set(entry.variants) <= set(whole.variants) or not (entry.is_none or is_like):
                    wrong = f"has other values in column {entry.name!r}"
                    break
        if wrong:
            raise CacheError(
                f"the shard {shard.name} {wrong}, so {self._path} does not join what it says; join "
                f"the shards again: dataloaders cache join {self._path.name}"
            )


class Column:
    """One column of a cache: its rows in all files."""

    def __init__(self, entry: ColumnEntry, number: int, files: Files) -> None:
        self.entry, self.files, self._number = entry, files, number

    def of(self, part: int) -> ColumnReader:
        """Return the column in this part."""
        return self.files.readers(part)[self._number]

    def compressed(self) -> tuple[str, int] | None:
        """Return the codec, and the bytes of the values in all files; opens all of them.

        None: they are compressed in none.
        """
        columns = [self.of(part) for part, _, _ in self.files.between(0, self.files.rows)]
        codecs = [each.entry.packing.codec for each in columns if each.entry.packing is not None]
        return (codecs[0], sum(each.stored_bytes() for each in columns)) if codecs else None

    def cell(self, row: int) -> tuple[str, npt.NDArray[Any] | None]:
        """As `ColumnReader.cell`."""
        part, own = self.files.at(row)
        return self.of(part).cell(own)

    def file(self, row: int) -> bytes | None:
        """Return the encoded image of this row as the bytes of a file; None: it is none."""
        kind, values = self.cell(row)
        return values.tobytes() if values is not None and is_encoded(kind) else None

    def leaves(self, rows: Sequence[int]) -> list[Any]:
        """As `ColumnReader.leaves`."""
        found: list[Any] = [None] * len(rows)
        for part, positions, own in self.files.split(rows):
            for position, leaf in zip(positions, self.of(part).leaves(own), strict=True):
                found[position] = leaf
        return found


def groups(numbers: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Yield each number that occurs, and the places at which it does."""
    order = np.argsort(numbers, kind="stable")
    found, firsts = np.unique(numbers[order], return_index=True)
    for number, (first, last) in zip(
        found.tolist(), pairwise([*firsts.tolist(), len(order)]), strict=True
    ):
        yield number, order[first:last]  # np.split takes ten times as long


def limited(entry: ColumnEntry, largest: int | None) -> ColumnEntry:
    """Return ``entry`` with no row of more than ``largest`` bytes in memory; None: as it is."""
    if largest is None:
        return entry
    width = np.dtype(entry.dtype).itemsize
    width *= max((_MEMORY_PER_BYTE.get(kind, 1) for kind, _ in entry.variants), default=1)
    values = entry.most_values if entry.shape is None else math.prod(entry.shape)
    says = max(width * (values or 0), _BYTES_PER_PIXEL * (entry.most_pixels or 0))
    if says > largest:
        raise CacheError(
            f"column {shown(entry.name)} has values that take {size_of(says)} in memory, and "
            f"largest={largest} allows {size_of(largest)}; give more if you trust the file"
        )
    if values is None:
        entry = replace(entry, most_values=largest // width)
    if entry.most_pixels is None and any(is_encoded(kind) for kind, _ in entry.variants):
        entry = replace(entry, most_pixels=largest // _BYTES_PER_PIXEL)
    return entry
