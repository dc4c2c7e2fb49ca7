"""Whether a cache is as it was written, bit by bit, and what is damaged if it is not."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from dataloaders.cache.block import DIGEST, HEADER, open_file
from dataloaders.cache.checksums import BLOCK, checksums
from dataloaders.cache.entries import ColumnEntry
from dataloaders.cache.index import Index
from dataloaders.cache.printable import shown
from dataloaders.cache.shards import folder_of, open_shard
from dataloaders.errors import CacheError
from dataloaders.machine.resources import usable_cores

__all__ = ["Damage", "verify"]

Progress = Callable[[int, int], None]

_REPORTED = 256  # blocks between two reports of progress
_WIDTH = 4  # bytes of a checksum


@dataclass(frozen=True)
class Damage:
    """A part of the file that is not as it was written.

    Attributes:
        offset: its first byte.
        bytes: how many there are; the damage may be a single bit among them.
        what: what stands there: columns and their rows, the index, HDF5's own records.
        shard: the name of the file, if it is a shard of the one that was given.
    """

    offset: int
    bytes: int
    what: str
    shard: str = ""


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> list[Damage]:
    """Return the damaged parts of the cache at ``path``, in the order of the file.

    Every bit of the file and of its shards is checked. A shard that is missing, or is a different
    file, is damaged as a whole. If the index is damaged, nothing else can be checked.

    Args:
        path: the path of the file.
        progress: called with the bytes checked so far, and those in all.

    Raises:
        CacheError: the file cannot be opened or read.
    """
    name = os.fspath(path)
    index, damages = _verified(open_file(name), name, progress)
    if index is None or not index.shards:
        return damages
    folder = folder_of(Path(name))
    before = index.file_bytes
    for shard in index.shards:
        try:
            descriptor = open_shard(folder, shard, Path(name))
        except CacheError as error:
            damages.append(Damage(0, shard.file_bytes, str(error), shard.name))
        else:
            told = None if progress is None else _after(before, index.all_bytes, progress)
            _, found = _verified(descriptor, str(folder / shard.name), told)
            damages += [replace(damage, shard=shard.name) for damage in found]
        before += shard.file_bytes
    return damages


def _after(before: int, whole: int, progress: Progress) -> Progress:
    """``progress`` of one shard told as that of all."""
    return lambda done, _: progress(before + done, whole)


def _verified(
    descriptor: int, name: str, progress: Progress | None
) -> tuple[Index | None, list[Damage]]:
    """The index of one file, if it is sound, and what is damaged in it; closes it."""
    try:
        try:
            index = Index.parse(descriptor, name)
        except CacheError as error:
            size = os.fstat(descriptor).st_size
            return None, [Damage(0, min(size, HEADER), f"the index: {error}")]
        if progress is not None and index.shards:
            progress = _after(0, index.all_bytes, progress)
        return index, [*_user_block(descriptor, index), *_blocks(descriptor, index, progress)]
    except OSError as error:
        raise CacheError(f"the cache {name} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _user_block(descriptor: int, index: Index) -> Iterator[Damage]:
    """What is not zero between the index and the HDF5 file."""
    # The text's length stands in the header, whose digest is right.
    length = int.from_bytes(os.pread(descriptor, 8, 16), "little")
    begin = HEADER + length
    padding = os.pread(descriptor, index.user_block - begin, begin)
    if any(padding):
        yield Damage(begin, len(padding), "the zeros behind the index")


def _blocks(descriptor: int, index: Index, progress: Progress | None) -> Iterator[Damage]:
    start, end = index.user_block, index.file_bytes
    place, size = index.checksums
    bytes_of_table = size * _WIDTH
    table = os.pread(descriptor, bytes_of_table, place)
    whole = blake2b(table, digest_size=DIGEST).hexdigest() == index.checksums_digest
    if not whole:
        yield Damage(place, bytes_of_table, "the table of checksums")
    parts = _parts(index)
    packed: list[_PackedColumn] | None = None
    hole = (place, place + bytes_of_table)
    for number, checksum in enumerate(
        checksums(descriptor, start, end, hole, threads=usable_cores())
    ):
        begin = start + number * BLOCK
        last = min(begin + BLOCK, end)
        written = int.from_bytes(table[number * _WIDTH : (number + 1) * _WIDTH], "little")
        if checksum != written:
            if packed is None:
                packed = [
                    _PackedColumn(descriptor, one, index) for one in index.columns if one.packing
                ]
            pieces = [part for one in packed if (part := one.part_at(begin, last)) is not None]
            found = sorted([*parts, *pieces], key=lambda part: part.begin) if pieces else parts
            what = ", ".join(_what(descriptor, found, begin, last))
            if checksum is None:
                what += " (it cannot be read)"
            elif not whole:
                what += " (or only its checksum)"
            yield Damage(begin, last - begin, what)
        if progress is not None and (number % _REPORTED == _REPORTED - 1 or last == end):
            progress(last - start, end - start)


@dataclass(frozen=True)
class _Part:
    begin: int
    end: int
    name: str
    row_bytes: int = 0  # of a part with a row after the other
    offsets: int = 0  # where those of its rows stand that have different lengths
    rows: int = 0
    width: int = 1

    def rows_at(self, descriptor: int, low: int, high: int) -> str:
        """Which rows have these bytes; empty if that cannot be said."""
        if self.row_bytes:
            first = (low - self.begin) // self.row_bytes
            last = (high - 1 - self.begin) // self.row_bytes
        elif self.offsets:
            data = os.pread(descriptor, 8 * (self.rows + 1), self.offsets)
            places = np.frombuffer(data[: len(data) // 8 * 8], "<u8")
            if (places[1:] < places[:-1]).any():
                return ""
            ends = [(low - self.begin) // self.width, (high - 1 - self.begin) // self.width]
            first, last = np.searchsorted(places, np.array(ends, "<u8"), "right") - 1
        else:
            return ""
        return _rows_text(first, last, self.rows)


class _PackedColumn:
    """Where the pieces of a compressed column stand, as far as its table can be believed."""

    def __init__(self, descriptor: int, column: ColumnEntry, index: Index) -> None:
        assert column.packing is not None
        offset, count = column.packing.pieces
        data = os.pread(descriptor, 8 * count, offset)
        table = np.frombuffer(data[: len(data) // 16 * 16], "<u8").reshape(-1, 2)
        inside = np.all(table <= index.file_bytes, axis=1)
        table = table * inside[:, np.newaxis]
        places, lengths = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        self._order = np.argsort(places, kind="stable")
        self._begins = places[self._order]
        self._ends = self._begins + lengths[self._order]
        self._column = column
        self._rows = index.rows
        self._offsets = None
        if column.offsets is not None:
            data = os.pread(descriptor, 8 * column.offsets.size, column.offsets.offset)
            self._offsets = np.frombuffer(data[: len(data) // 8 * 8], "<u8")

    def part_at(self, begin: int, end: int) -> _Part | None:
        """The pieces that have some of these bytes, as one."""
        last = int(np.searchsorted(self._begins, end, "left"))
        first = max(int(np.searchsorted(self._begins, begin, "right")) - 1, 0)
        if first < last and self._ends[first] <= begin:
            first += 1
        if first >= last:
            return None
        numbers = self._order[first:last]
        name = f"column {shown(self._column.name)}{self._rows_of(numbers.min(), numbers.max())}"
        return _Part(int(self._begins[first]), int(self._ends[first:last].max()), name)

    def _rows_of(self, first: int, last: int) -> str:
        """The rows of the pieces from number ``first`` to ``last``."""
        column, offsets = self._column, self._offsets
        assert column.packing is not None
        piece = column.packing.piece
        ends = [int(first) * piece, int(last + 1) * piece - 1]
        if column.shape is not None:
            first, last = (end // math.prod(column.shape) for end in ends)
        elif offsets is None or (offsets[1:] < offsets[:-1]).any():
            return ""
        else:
            first, last = np.searchsorted(offsets, np.array(ends, "<u8"), "right") - 1
        return _rows_text(first, last, self._rows)


def _rows_text(first: int, last: int, rows: int) -> str:
    # The last offset is of no row, and damaged ones end before their values do.
    first, last = min(max(first, 0), rows - 1), min(last, rows - 1)
    return f" row {first}" if first >= last else f" rows {first} to {last}"


def _parts(index: Index) -> list[_Part]:
    """What stands where, in the order of the file."""
    found = []
    place, size = index.checksums
    found.append(_Part(place, place + size * _WIDTH, "the table of checksums"))
    for extent, width in zip(index.failed or (), (8, 1), strict=False):
        end = extent.offset + extent.size * width
        found.append(_Part(extent.offset, end, "the list of failed samples"))
    if index.attributes is not None:
        end = index.attributes.offset + index.attributes.size
        found.append(_Part(index.attributes.offset, end, "the dataset's classes"))
    for column in index.columns:
        found.extend(_column_parts(index, column))
    return sorted((part for part in found if part.begin < part.end), key=lambda part: part.begin)


def _column_parts(index: Index, column: ColumnEntry) -> Iterator[_Part]:
    rows = index.rows
    for name, dtype, (offset, size) in index.parts(column):
        length = size * np.dtype(dtype).itemsize
        text = f"column {shown(column.name)}" + ("" if name == "values" else f" ({name})")
        if name == "pieces":
            yield _Part(offset, offset + length, text)
            continue
        part = _Part(offset, offset + length, text, rows=rows, width=np.dtype(dtype).itemsize)
        if name == "values" and column.offsets is not None:
            yield replace(part, offsets=column.offsets.offset)
        else:
            yield replace(part, row_bytes=8 if name == "offsets" else length // max(rows, 1))


def _what(descriptor: int, parts: list[_Part], begin: int, end: int) -> Iterator[str]:
    """What stands at these bytes."""
    covered = begin
    own = False
    for part in parts:
        low, high = max(part.begin, begin), min(part.end, end)
        if low >= high:
            continue
        own = own or low > covered
        covered = max(covered, high)
        yield part.name + part.rows_at(descriptor, low, high)
    if own or covered < end:
        yield "HDF5's own records"
