"""The files of a cache, mapped, and its columns: each row is read from the file that holds it.

    row 17 ──bisect──> part 1, its row 7 ──ColumnReader──> leaf

A cache without parts is its own only part. Opening a cache looks at the size of every part, so one
that is missing or cut short is an error at once. A part is mapped when its first row is read: a
process that reads rows of a few parts maps only those.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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

_BYTES_PER_PIXEL = 4  # of an image in Pillow's memory
_MEMORY_PER_BYTE = {"json": 64, "str": 4}  # of the file; ``[],`` becomes a Python list


class MappedFile:
    """A mapped file of a cache: its ``index``, its bytes (``data``), its columns (``readers``)."""

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
        """Raise a CacheError if the file has become shorter: reading past its end is a SIGBUS."""
        try:
            now = os.stat(self._path)
        except OSError:  # removed, or not to be seen: the mapping stays valid
            return
        if os.path.samestat(now, self._status) and now.st_size < len(self.data):
            raise CacheError(
                f"{self._path} was cut short while it was open: it has {now.st_size} bytes, and "
                f"had {len(self.data)}. Whoever writes to it should write a new file next to it "
                "and rename that, as precompute() does; then open it again"
            )


class Files:
    """The files that hold the rows of the cache at ``path``, whose own file is ``own``."""

    def __init__(self, path: Path, own: MappedFile, largest: int | None) -> None:
        self._index = index = own.index
        check_shards(path, index)
        self._path, self._largest = path, largest
        self._bounds = np.cumsum([0, *(each.rows for each in index.shards or [index])])
        self._starts: list[int] = self._bounds.tolist()
        self._opened = {} if index.shards else {0: own}
        self._exactly = False

    def readers(self, part: int) -> list[ColumnReader]:
        """Return the columns of this part; map and check it first if that has not been done."""
        file = self._opened.get(part)
        if file is None:
            file = self._opened[part] = self._mapped(self._index.shards[part])
        return file.readers

    def located(self, rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield for each of these rows its place among them, its part, and its number in that.

        In the order of the files, so that a compressed piece with several rows is decoded once.
        """
        parts, own = self._parts_of(rows)
        for place in sorted(range(len(rows)), key=rows.__getitem__):
            yield place, parts[place], own[place]

    def _parts_of(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        numbers = np.asarray(rows, np.int64)
        parts = np.searchsorted(self._bounds, numbers, "right") - 1
        return parts.tolist(), (numbers - self._bounds[parts]).tolist()

    def between(self, first: int, last: int) -> Iterator[tuple[list[ColumnReader], int, int]]:
        """Yield the columns of each part with some of rows ``first`` to ``last - 1``.

        With each come the first of its own rows that is among them, and the one after the last.
        """
        part = bisect_right(self._starts, first) - 1
        while first < last:
            start, end = self._starts[part : part + 2]
            if start < end:
                readers = self.readers(part)
                self._opened[part].refuse_cut_short()
                yield readers, first - start, min(last, end) - start
            first, part = end, part + 1

    def expect_exactly(self, exactly: bool) -> None:
        """Set how a missing page is read, as `page_cache.expect_exactly` does."""
        self._exactly = exactly
        for file in list(self._opened.values()):  # other threads may add some
            expect_exactly(file.data, exactly)

    def refuse_cut_short(self, rows: Sequence[int]) -> None:
        """Raise a CacheError if a file with one of these rows is mapped and has become shorter."""
        parts = {0} if len(self._starts) == 2 else set(self._parts_of(rows)[0])
        for part in parts:
            if (file := self._opened.get(part)) is not None:
                file.refuse_cut_short()

    def _mapped(self, shard: Shard) -> MappedFile:
        folder = folder_of(self._path)
        descriptor = open_shard(folder, shard, self._path)
        file = MappedFile(folder / shard.name, descriptor, self._largest, shard.name)
        self._check(file.index, shard)
        expect_exactly(file.data, self._exactly)
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

    def file(self, row: int) -> bytes | None:
        """Return the bytes of this row's encoded image, as of a file; None: it is none."""
        ((kind, values),) = self.stored([row])
        return values.tobytes() if values is not None and is_encoded(kind) else None

    def leaves(self, rows: Sequence[int]) -> list[Any]:
        """Return the leaves of these rows, in this order."""
        return self._read(rows, ColumnReader.leaf)

    def stored(self, rows: Sequence[int]) -> list[tuple[str, npt.NDArray[Any] | None]]:
        """Return the kinds and values of these rows, as `ColumnReader.stored` does."""
        return self._read(rows, ColumnReader.stored)

    def _read(self, rows: Sequence[int], read: Callable[[ColumnReader, int], Any]) -> list[Any]:
        found: list[Any] = [None] * len(rows)
        for place, part, row in self.files.located(rows):
            found[place] = read(self.of(part), row)
        return found


def limited(entry: ColumnEntry, largest: int | None) -> ColumnEntry:
    """Return ``entry``, of which no row may take more than ``largest`` bytes; None: any may."""
    if largest is None:
        return entry
    width = np.dtype(entry.dtype).itemsize
    width *= max((_MEMORY_PER_BYTE.get(kind, 1) for kind, _ in entry.variants), default=1)
    values = entry.most_values if entry.shape is None else math.prod(entry.shape)
    most = max(width * (values or 0), _BYTES_PER_PIXEL * (entry.most_pixels or 0))
    if most > largest:
        raise CacheError(
            f"column {shown(entry.name)} has values that take {size_of(most)} in memory, and "
            f"largest={largest} allows {size_of(largest)}; give more if you trust the file"
        )
    if values is None:
        entry = replace(entry, most_values=largest // width)
    if entry.most_pixels is None and any(is_encoded(kind) for kind, _ in entry.variants):
        entry = replace(entry, most_pixels=largest // _BYTES_PER_PIXEL)
    return entry
