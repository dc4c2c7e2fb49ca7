"""The columns of a joined cache: each row out of the shard that has it.

    row 17 ──bisect──> shard 1, its row 7 ──ColumnReader──> leaf
    rows   ──sorted by shard──> some rows of each ──> leaves, in the order that was asked for

When the cache is opened, parts are looked at, and not opened: one that is missing or cut short is
known then, another one with as many bytes when it is mapped. That is when the first of its rows is
read, so that a process that reads some of thousands of parts has only those.
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
from dataloaders.cache.read.mapping import MappedFile
from dataloaders.cache.read.shards import check_shards, folder_of, open_shard
from dataloaders.errors import CacheError
from dataloaders.machine.page_cache import expect_exactly

__all__ = ["JoinedColumn", "Shards", "groups"]

Numbers = npt.NDArray[np.int64]
_T = TypeVar("_T")


class Shards:
    """The shards of the joined cache at ``path``; ``largest`` as `CachedDataset` has it.

    Raises:
        CacheError: one is missing, or another one than was joined.
    """

    def __init__(self, path: Path, index: Index, largest: int | None = None) -> None:
        check_shards(path, index)
        self._largest = largest
        self._path = path
        self._index = index
        self._folder = folder_of(path)
        self._starts = [0]
        for shard in index.shards:
            self._starts.append(self._starts[-1] + shard.rows)
        self._starts_array = np.array(self._starts, np.int64)
        self._readers: dict[int, list[ColumnReader]] = {}
        self._files: dict[int, MappedFile] = {}
        self._exactly = False

    def expect_exactly(self, exactly: bool) -> None:
        """How a page that is missing is read, as `page_cache.expect_exactly`."""
        self._exactly = exactly
        for file in list(self._files.values()):  # other threads may add some
            expect_exactly(file.data, exactly)

    def refuse_cut_short(self, rows: Sequence[int]) -> None:
        """Look at each mapped shard that has some of ``rows``.

        Raises:
            CacheError: it is shorter than it was.
        """
        for number in {self.at(row)[0] for row in rows}:
            if (file := self._files.get(number)) is not None:
                file.refuse_cut_short()

    def between(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Of rows ``first`` to ``last - 1``: each shard's number, and its own first and last."""
        number, _ = self.at(first)
        while first < last:
            start, end = self._starts[number], self._starts[number + 1]
            if start < end:
                yield number, first - start, min(last, end) - start
            first, number = end, number + 1

    def at(self, row: int) -> tuple[int, int]:
        """The number of the shard that has this row, and the row's number in it."""
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]

    def locate(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """`at` of many rows."""
        numbers = np.searchsorted(self._starts_array, rows, "right") - 1
        return numbers, rows - self._starts_array[numbers]

    def readers(self, number: int) -> list[ColumnReader]:
        """The columns of this shard, which is mapped if it is not.

        Raises:
            CacheError: it is not what the joined cache says of it.
        """
        found = self._readers.get(number)
        if found is None:
            found = self._readers[number] = self._mapped(number)
        return found

    def with_rows(self) -> list[int]:
        """The numbers of the shards that have some rows."""
        return [number for number, shard in enumerate(self._index.shards) if shard.rows]

    def name(self, number: int) -> str:
        """The file that this shard is."""
        return self._index.shards[number].name

    def _mapped(self, number: int) -> list[ColumnReader]:
        shard = self._index.shards[number]
        name = str(self._folder / shard.name)
        descriptor = open_shard(self._folder, shard, self._path)
        try:
            index = Index.parse(descriptor, name)
            self._check(index, shard)
            file = MappedFile(Path(name), descriptor, index.file_bytes)
        finally:
            os.close(descriptor)
        if self._exactly:
            expect_exactly(file.data, True)
        self._files[number] = file
        entries = [limited(entry, self._largest) for entry in index.columns]
        return [ColumnReader(entry, index.rows, file.data) for entry in entries]

    def _check(self, index: Index, shard: Shard) -> None:
        """Whether the shard's rows can be rows of the joined cache: a joined file may say anything.

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


def _fits(entry: ColumnEntry, whole: ColumnEntry) -> bool:
    if not set(entry.variants) <= set(whole.variants):
        return False
    if all(kind == "none" for kind, _ in entry.variants):
        return True
    return entry.dtype == whole.dtype and whole.shape in (None, entry.shape)


class JoinedColumn:
    """Gives the leaves of one column of a joined cache; as `ColumnReader`, but for ``values``."""

    def __init__(self, entry: ColumnEntry, number: int, shards: Shards) -> None:
        self.entry = entry
        self.shards = shards
        self._number = number

    def of(self, shard: int) -> ColumnReader:
        """The column in this shard."""
        return self.shards.readers(shard)[self._number]

    def packed_bytes(self) -> int | None:
        """What its values take in the shards, if some are compressed; looks at all of them."""
        taken, packed = 0, False
        for shard in self.shards.with_rows():
            column = self.of(shard)
            size = column.packed_bytes()
            packed = packed or size is not None
            plain = column.entry.values.size * np.dtype(column.entry.dtype).itemsize
            taken += plain if size is None else size
        return taken if packed else None

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
        shard, own = self.shards.at(row)
        try:
            return what(self.of(shard), own)
        except CacheError as error:
            raise self._located(shard, error) from error

    def stretches(self, first: int, last: int) -> Iterator[npt.NDArray[Any]]:
        """As `ColumnReader.stretches`; nothing of a shard that cannot be opened."""
        for shard, low, high in self.shards.between(first, last):
            try:
                column = self.of(shard)
            except CacheError:  # whoever reads the row is told
                continue
            yield from column.stretches(low, high)

    def leaves(self, rows: Sequence[int]) -> list[Any]:
        """The leaves of these rows.

        Raises:
            CacheError: as `leaf`.
        """
        found: list[Any] = [None] * len(rows)
        numbers, own = self.shards.locate(np.asarray(rows, np.int64))
        for shard, places in groups(numbers):
            try:
                leaves = self.of(shard).leaves(own[places].tolist())
            except CacheError as error:
                raise self._located(shard, error) from error
            for place, leaf in zip(places.tolist(), leaves, strict=True):
                found[place] = leaf
        return found

    def _located(self, shard: int, error: CacheError) -> CacheError:
        name = self.shards.name(shard)
        text = str(error)
        return CacheError(text if name in text else f"shard {name}: {text}")


def groups(numbers: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Each number that occurs, and the places at which it does."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for places in np.split(order, cuts):
        if len(places):
            yield int(numbers[places[0]]), places
