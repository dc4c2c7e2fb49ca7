"""The files of a cache, mapped, and its columns: each row out of the file that has it.

    row 17 ──bisect──> part 1, its row 7 ──ColumnReader──> leaf
    rows   ──sorted by part──> some rows of each ──> leaves, in the order that was asked for

A cache that joins nothing is its only part. When the cache is opened, parts are looked at, and not
opened: one that is missing or cut short is known then, another one with as many bytes when it is
mapped. That is when the first of its rows is read, so that a process that reads some of thousands
of parts has only those.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dataloaders.cache.format.entries import ColumnEntry, Shard
from dataloaders.cache.format.index import Index
from dataloaders.cache.read.columns import ColumnReader
from dataloaders.cache.read.limits import limited
from dataloaders.cache.read.shards import check_shards, folder_of, open_shard
from dataloaders.errors import CacheError
from dataloaders.machine.page_cache import expect_exactly, map_file

__all__ = ["Column", "Files", "MappedFile", "groups"]

Numbers = npt.NDArray[np.int64]
_T = TypeVar("_T")


class MappedFile:
    """An open file of ``size`` bytes, mapped; the descriptor is not kept.

    Attributes:
        data: all of its bytes, read-only.

    Raises:
        CacheError: it cannot be mapped.
    """

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self._path = path
        self._status = os.fstat(descriptor)
        try:
            self.data = map_file(descriptor, size)
        except OSError as error:
            raise CacheError(f"the cache {path} cannot be mapped: {error.strerror}") from error

    def refuse_cut_short(self) -> None:
        """Look whether the file still has all bytes: reading those that it lacks ends the process.

        Raises:
            CacheError: it was cut short.
        """
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
    """The files that have the rows of the cache at ``path``.

    Args:
        path: of the cache.
        index: of it.
        own: the file at ``path``.
        largest: as `CachedDataset` has it.

    Attributes:
        is_joined: whether the rows are in parts.

    Raises:
        CacheError: a part is missing, or another one than was joined.
    """

    def __init__(self, path: Path, index: Index, own: MappedFile, largest: int | None) -> None:
        check_shards(path, index)
        self.is_joined = bool(index.shards)
        self._largest = largest
        self._path = path
        self._index = index
        counts = [shard.rows for shard in index.shards] if self.is_joined else [index.rows]
        self._starts = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
        self._starts_array = np.array(self._starts, np.int64)
        self._opened: dict[int, tuple[MappedFile, list[ColumnReader]]] = {}
        if not self.is_joined:
            self._opened[0] = own, self._columns(index, own)
        self._exactly = False

    def expect_exactly(self, exactly: bool) -> None:
        """How a page that is missing is read, as `page_cache.expect_exactly`."""
        self._exactly = exactly
        for file, _ in list(self._opened.values()):  # other threads may add some
            expect_exactly(file.data, exactly)

    def refuse_cut_short(self, rows: Sequence[int]) -> None:
        """Look at each mapped file that has some of ``rows``.

        Raises:
            CacheError: it is shorter than it was.
        """
        for number in {self.at(row)[0] for row in rows} if self.is_joined else (0,):
            if (opened := self._opened.get(number)) is not None:
                opened[0].refuse_cut_short()

    def between(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Of rows ``first`` to ``last - 1``: each part's number, and its own first and last."""
        number, _ = self.at(first)
        while first < last:
            start, end = self._starts[number], self._starts[number + 1]
            if start < end:
                yield number, first - start, min(last, end) - start
            first, number = end, number + 1

    def at(self, row: int) -> tuple[int, int]:
        """The number of the part that has this row, and the row's number in it."""
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]

    def locate(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """`at` of many rows."""
        if not self.is_joined:
            return np.zeros_like(rows), rows
        numbers = np.searchsorted(self._starts_array, rows, "right") - 1
        return numbers, rows - self._starts_array[numbers]

    def readers(self, number: int) -> list[ColumnReader]:
        """The columns of this part, which is mapped if it is not.

        Raises:
            CacheError: it is not what the joined cache says of it.
        """
        found = self._opened.get(number)
        if found is None:
            found = self._opened[number] = self._mapped(self._index.shards[number])
        return found[1]

    def with_rows(self) -> list[int]:
        """The numbers of the parts that have some rows."""
        return [n for n, start in enumerate(self._starts[:-1]) if start < self._starts[n + 1]]

    def _mapped(self, shard: Shard) -> tuple[MappedFile, list[ColumnReader]]:
        folder = folder_of(self._path)
        name = str(folder / shard.name)
        descriptor = open_shard(folder, shard, self._path)
        try:
            index = Index.parse(descriptor, name)
            self._check(index, shard)
            file = MappedFile(Path(name), descriptor, index.file_bytes)
        finally:
            os.close(descriptor)
        if self._exactly:
            expect_exactly(file.data, True)
        return file, self._columns(index, file)

    def _columns(self, index: Index, file: MappedFile) -> list[ColumnReader]:
        entries = [limited(entry, self._largest) for entry in index.columns]
        return [ColumnReader(entry, index.rows, file.data) for entry in entries]

    def _check(self, index: Index, shard: Shard) -> None:
        """Whether the part's rows can be rows of the joined cache: a joined file may say anything.

        Only then is a column that is fixed here fixed there, with the same shape and type.
        """
        whole = self._index
        wrong = ""
        if index.shards:
            wrong = "is itself a joined cache"
        elif (index.identity, index.rows) != (shard.identity, shard.rows):
            wrong = f"has {index.rows} rows, and {shard.rows} when it was joined"
        elif index.structure != whole.structure:
            wrong = "has samples that are built differently"
        else:
            for entry, other in zip(index.columns, whole.columns, strict=True):
                if not _fits(entry, other):
                    wrong = f"has other values in column {entry.name!r}"
                    break
        if wrong:
            raise CacheError(
                f"the shard {shard.name} {wrong}, so {self._path} does not join what it says; join "
                f"the shards again: dataloaders cache join {self._path.name}"
            )

    def located(self, number: int, error: CacheError) -> CacheError:
        """Return ``error`` with the name of the part that it is about."""
        if not self.is_joined:
            return error
        name, text = self._index.shards[number].name, str(error)
        return CacheError(text if name in text else f"shard {name}: {text}")


def _fits(entry: ColumnEntry, whole: ColumnEntry) -> bool:
    if not set(entry.variants) <= set(whole.variants):
        return False
    return entry.is_none or (entry.dtype == whole.dtype and whole.shape in (None, entry.shape))


class Column:
    """Gives the leaves of one column of a cache.

    Raises:
        CacheError: it has values larger than ``largest``.
    """

    def __init__(
        self, entry: ColumnEntry, number: int, files: Files, largest: int | None = None
    ) -> None:
        self.entry = limited(entry, largest)
        self.files = files
        self._number = number

    def of(self, part: int) -> ColumnReader:
        """The column in this part."""
        return self.files.readers(part)[self._number]

    def packed_bytes(self) -> int | None:
        """What its values take in the file, if some are compressed; looks at all parts."""
        columns = [self.of(part) for part in self.files.with_rows()]
        sizes = [(column, column.packed_bytes()) for column in columns]
        if all(size is None for _, size in sizes):
            return None
        return sum(column.nbytes if size is None else size for column, size in sizes)

    def leaf(self, row: int) -> Any:
        """As `ColumnReader.leaf`."""
        return self._at(row, ColumnReader.leaf)

    def file(self, row: int) -> bytes | None:
        """As `ColumnReader.file`."""
        return self._at(row, ColumnReader.file)

    def cell(self, row: int) -> tuple[str, npt.NDArray[Any] | None]:
        """As `ColumnReader.cell`."""
        return self._at(row, ColumnReader.cell)

    def view(self, row: int) -> npt.NDArray[Any] | None:
        """As `ColumnReader.view`."""
        return self._at(row, ColumnReader.view)

    def _at(self, row: int, what: Callable[[ColumnReader, int], _T]) -> _T:
        part, own = self.files.at(row)
        try:
            return what(self.of(part), own)
        except CacheError as error:
            raise self.files.located(part, error) from error

    def stretches(self, first: int, last: int) -> Iterator[npt.NDArray[Any]]:
        """As `ColumnReader.stretches`; nothing of a part that cannot be opened."""
        for part, low, high in self.files.between(first, last):
            try:
                column = self.of(part)
            except CacheError:  # whoever reads the row is told
                continue
            yield from column.stretches(low, high)

    def leaves(self, rows: Sequence[int]) -> list[Any]:
        """As `ColumnReader.leaves`."""
        if not self.files.is_joined:
            return self.of(0).leaves(rows)
        found: list[Any] = [None] * len(rows)
        numbers, own = self.files.locate(np.asarray(rows, np.int64))
        for part, places in groups(numbers):
            try:
                leaves = self.of(part).leaves(own[places].tolist())
            except CacheError as error:
                raise self.files.located(part, error) from error
            for place, leaf in zip(places.tolist(), leaves, strict=True):
                found[place] = leaf
        return found


def groups(numbers: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Each number that occurs, and the places at which it does."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for places in np.split(order, cuts):
        if len(places):
            yield int(numbers[places[0]]), places
