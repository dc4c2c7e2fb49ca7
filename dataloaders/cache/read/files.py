"""The files of a cache, mapped, and its columns: each row is read from the file that holds it.

    rows 17, 3 ──located──> (1, part 0, its row 3), (0, part 1, its row 7) ──ColumnReader──> leaves

A cache without parts is its own only part. Opening a cache looks at the size of every part, so one
that is missing or cut short is an error at once. A part is mapped when its first row is read: a
process that reads rows of a few parts maps only those.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dataloaders.cache.format.disk import size_of
from dataloaders.cache.format.entries import ColumnEntry, Shard
from dataloaders.cache.format.index import Index
from dataloaders.cache.printable import shown
from dataloaders.cache.read.columns import ColumnReader, Last
from dataloaders.cache.read.shards import check_shards, folder_of, open_shard
from dataloaders.errors import CacheError
from dataloaders.machine.page_cache import (
    DiskWatch,
    expect_exactly,
    is_cut_short,
    map_file,
    will_read,
)

_BYTES_PER_PIXEL = 4  # of an image in Pillow's memory
_MEMORY_PER_BYTE = {"json": 64, "str": 4}  # of the file; ``[],`` becomes a Python list


class MappedFile:
    """A mapped file of a cache: its ``index``, all of its bytes (``data``), and its ``columns``.

    A file that joins parts has no columns itself.
    """

    def __init__(
        self, path: Path, descriptor: int, largest: int | None, last: Last, shard: str = ""
    ) -> None:
        try:
            self.index = Index.parse(descriptor, str(path))
            self._path, self._status = str(path), os.fstat(descriptor)
            self.data = map_file(descriptor, self.index.file_bytes)
        except OSError as error:
            raise CacheError(f"the cache {path} cannot be mapped: {error.strerror}") from error
        finally:
            os.close(descriptor)
        entries = [limited(entry, largest) for entry in self.index.columns]
        self.columns = [
            ColumnReader(entry, self.index.rows, self.data, last, shard)
            for entry in (() if self.index.shards else entries)
        ]

    def refuse_cut_short(self) -> None:
        """Raise a CacheError if the file has become shorter: reading past its end is a SIGBUS."""
        try:
            now = os.stat(self._path)
            is_same = os.path.samestat(now, self._status)
        except OSError:  # removed, or not to be seen: the mapping stays valid
            is_same = False
        if now.st_size < len(self.data) if is_same else is_cut_short(self.data):
            raise CacheError(
                f"{self._path} was cut short while it was open: it had {len(self.data)} bytes. "
                "Whoever writes to it should write a new file next to it and rename that, as "
                "precompute() does; then open it again"
            )


Located: TypeAlias = tuple[int, list[ColumnReader], int]
"""Where a row is: its place among those asked for, the columns of its part, its number there."""


class Files:
    """The files that hold the rows of the cache at ``path``, whose own file is ``own``."""

    def __init__(self, path: Path, own: MappedFile, largest: int | None) -> None:
        self._index = index = own.index
        check_shards(path, index)
        self._path, self._largest = path, largest
        self._bounds = np.cumsum([0, *(each.rows for each in index.shards or [index])])
        self._opened = {} if index.shards else {0: own}
        self._disk, self._is_on_disk = DiskWatch(), False
        self._last: Last = {}

    def located(self, rows: Sequence[int]) -> list[Located]:
        """Return where these rows are, to be read next, in the order of the files.

        So a compressed piece with several rows is decoded once. If rows may be on disk, all are
        requested at once: otherwise each missing page would be waited for, and read with its
        neighbours, before the next one is requested.

        Raises:
            CacheError: a file is another one, or has become shorter.
        """
        reads = self._disk.reads()
        if reads != self._is_on_disk:
            self._is_on_disk = reads
            for file in list(self._opened.values()):  # other threads may add some
                expect_exactly(file.data, reads)
        numbers = np.asarray(rows, np.int64)
        parts = np.searchsorted(self._bounds, numbers, "right") - 1
        own, parts = (numbers - self._bounds[parts]).tolist(), parts.tolist()
        columns = {part: self._part(part).columns for part in set(parts)}
        order = sorted(range(len(rows)), key=rows.__getitem__)
        found = [(place, columns[parts[place]], own[place]) for place in order]
        for _, readers, row in found if reads else ():
            _request(readers, row, row + 1)
        return found

    def will_read(self, first: int, last: int) -> None:
        """Have the kernel start to read rows ``first`` to ``last - 1`` from disk, without waiting.

        Raises:
            CacheError: as `located`.
        """
        low, high = np.searchsorted(self._bounds, [first, last - 1], "right").tolist()
        for part in range(low - 1, high):
            start, end = self._bounds[part : part + 2].tolist()
            if start < end:
                rows = max(first, start) - start, min(last, end) - start
                _request(self._part(part).columns, *rows)

    def _part(self, number: int) -> MappedFile:
        """Return this part; map and check it first if that has not been done."""
        file = self._opened.get(number)
        if file is None:
            file = self._opened[number] = self._mapped(self._index.shards[number])
        file.refuse_cut_short()
        return file

    def _mapped(self, shard: Shard) -> MappedFile:
        folder = folder_of(self._path)
        descriptor = open_shard(folder, shard, self._path)
        file = MappedFile(folder / shard.name, descriptor, self._largest, self._last, shard.name)
        self._check(file.index, shard)
        expect_exactly(file.data, self._is_on_disk)
        return file

    def _check(self, index: Index, shard: Shard) -> None:
        """Raise a CacheError unless the part's rows can be rows of the whole cache.

        A column of one shape in the whole then has this shape and dtype in the part, too.
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
                f"the shard {shard.name} {wrong}, so {self._path} does not join what it "
                "says; delete it and build again: only what is missing is built"
            )


def _request(columns: Sequence[ColumnReader], first: int, last: int) -> None:
    for column in columns:
        for table in column.tables(first, last):
            will_read(table)
        will_read(column.stretch(first, last))


def limited(entry: ColumnEntry, largest: int | None) -> ColumnEntry:
    """Return ``entry``, of which no row may take more than ``largest`` bytes; None: any may."""
    if largest is None:
        return entry
    width = np.dtype(entry.dtype).itemsize
    width *= max(_MEMORY_PER_BYTE.get(kind, 1) for kind, _ in entry.variants)
    values = entry.largest_row
    most = max(width * (values or 0), _BYTES_PER_PIXEL * (entry.most_pixels or 0))
    if most > largest:
        raise CacheError(
            f"column {shown(entry.name)} has values that take {size_of(most)} in memory, and "
            f"largest={largest} allows {size_of(largest)}; give more if you trust the file"
        )
    if values is None:
        entry = replace(entry, most_values=largest // width)
    if entry.most_pixels is None:  # asked only of encoded images
        entry = replace(entry, most_pixels=largest // _BYTES_PER_PIXEL)
    return entry
