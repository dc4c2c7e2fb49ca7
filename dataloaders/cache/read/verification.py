"""Whether a cache is as it was written, bit by bit, and what is damaged if it is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dataloaders.cache.format.block import DIGEST, HEADER, open_file
from dataloaders.cache.format.checksums import BLOCK, checksums
from dataloaders.cache.format.entries import Shard
from dataloaders.cache.format.index import Index
from dataloaders.cache.printable import shown
from dataloaders.cache.read.shards import folder_of, open_shard
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
        what: what stands there: columns, the index, HDF5's own records.
        shard: the name of the file, if it is a part of the one that was given.
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
    told = progress or _silent
    index, damages = _verified(open_file(name), name, told, threads=usable_cores())
    if index is None or not index.shards:
        return damages
    joined, folder = Path(name), folder_of(Path(name))

    def verified(shard: Shard) -> list[Damage]:
        try:
            descriptor = open_shard(folder, shard, joined)
        except CacheError as error:
            return [Damage(0, shard.file_bytes, str(error), shard.name)]
        _, found = _verified(descriptor, str(folder / shard.name), _silent)
        return [replace(damage, shard=shard.name) for damage in found]

    done = index.file_bytes
    # Several shards at once, each in one thread: reading and hashing let go of Python's lock.
    with ThreadPoolExecutor(usable_cores(), "dataloaders-verify") as pool:
        for shard, found in zip(index.shards, pool.map(verified, index.shards), strict=True):
            damages += found
            done += shard.file_bytes
            told(done, index.all_bytes)
    return damages


def _silent(done: int, whole: int) -> None:
    pass


def _verified(
    descriptor: int, name: str, progress: Progress, *, threads: int = 0
) -> tuple[Index | None, list[Damage]]:
    """The index of one file, if it is sound, and what is damaged in it; closes it."""
    try:
        try:
            index = Index.parse(descriptor, name)
        except CacheError as error:
            size = os.fstat(descriptor).st_size
            return None, [Damage(0, min(size, HEADER), f"the index: {error}")]
        found = _blocks(descriptor, index, progress, threads)
        return index, [*_user_block(descriptor, index), *found]
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


def _blocks(descriptor: int, index: Index, progress: Progress, threads: int) -> Iterator[Damage]:
    start, end = index.user_block, index.file_bytes
    place, size = index.checksums
    table = os.pread(descriptor, size * _WIDTH, place)
    whole = blake2b(table, digest_size=DIGEST).hexdigest() == index.checksums_digest
    if not whole:
        yield Damage(place, size * _WIDTH, "the table of checksums")
    written = np.frombuffer(table.ljust(size * _WIDTH, b"\0"), "<u4").tolist()
    hole = (place, place + size * _WIDTH)
    parts: list[_Part] = []
    found = checksums(descriptor, start, end, hole, threads=threads)
    for number, checksum in enumerate(found):
        begin = start + number * BLOCK
        last = min(begin + BLOCK, end)
        if checksum != written[number]:
            parts = parts or list(_parts(descriptor, index))
            what = ", ".join(_what(parts, begin, last))
            if checksum is None:
                what += " (it cannot be read)"
            elif not whole:
                what += " (or only its checksum)"
            yield Damage(begin, last - begin, what)
        if number % _REPORTED == _REPORTED - 1 or last == end:
            before = 0 if index.shards else start
            progress(last - before, index.all_bytes - before)


class _Part(NamedTuple):
    begin: int
    end: int
    name: str


def _parts(descriptor: int, index: Index) -> Iterator[_Part]:
    """Yield what stands where."""
    for what, dtype, (offset, size) in index.places():
        yield _Part(offset, offset + size * np.dtype(dtype).itemsize, what)
    for column in index.columns:
        if column.packing is not None:
            offset, count = column.packing.pieces
            data = os.pread(descriptor, 8 * count, offset)
            table = np.frombuffer(data[: len(data) // 16 * 16], "<u8").reshape(-1, 2)
            table = table[(table <= index.file_bytes).all(axis=1)]  # it may be damaged itself
            if len(table):
                ends = (table[:, 0] + table[:, 1]).max()
                yield _Part(int(table[:, 0].min()), int(ends), f"column {shown(column.name)}")


def _what(parts: list[_Part], begin: int, end: int) -> Iterator[str]:
    """Yield what stands at these bytes."""
    covered, own = begin, False
    for part in sorted(parts):
        low, high = max(part.begin, begin), min(part.end, end)
        if low < high:
            own = own or low > covered
            covered = max(covered, high)
            yield part.name
    if own or covered < end:
        yield "HDF5's own records"
