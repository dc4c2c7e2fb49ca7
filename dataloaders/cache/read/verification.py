"""verify(): compare every bit of a cache with its checksums, and name what is damaged."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from dataloaders.cache.format.block import DIGEST, HEADER, is_parts_folder, open_file
from dataloaders.cache.format.checksums import BLOCK, checksums
from dataloaders.cache.format.entries import Extent, Shard
from dataloaders.cache.format.index import Index
from dataloaders.cache.printable import shown
from dataloaders.cache.read.shards import folder_of, open_shard
from dataloaders.errors import CacheError
from dataloaders.machine.resources import usable_cores

Progress = Callable[[int, int], None]

# What this process may not do says nothing of a part.
_NO_DAMAGE = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_REPORTED = 256  # blocks between two reports of progress


@dataclass(frozen=True)
class Damage:
    """Some bytes of the file of which at least one bit is not as it was written."""

    offset: int  # of the first byte
    bytes: int  # their number
    what: str  # what they hold: columns, the index, HDF5's own records
    shard: str = ""  # the name of the file, if it is a part


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> list[Damage]:
    """Return what is damaged in the cache at ``path``, in the order of the file.

    Every bit of the file and of its parts is checked. A part that is missing, or is another file,
    is damaged as a whole; so is one in the place of the cache, which is outside a folder of parts.
    If the index is damaged, nothing else can be checked.

    Args:
        path: the path of the file.
        progress: called with the number of bytes checked so far, and of all.

    Raises:
        CacheError: the file cannot be opened or read, or this process may not open a part.
    """
    name, progress = os.fspath(path), progress or _silent
    joined, folder = Path(name), folder_of(Path(name))

    def verified(shard: Shard) -> list[Damage]:
        try:
            descriptor = open_shard(folder, shard, joined)
        except CacheError as error:
            if getattr(error.__cause__, "errno", None) in _NO_DAMAGE:
                raise
            return [Damage(0, shard.file_bytes, str(error), shard.name)]
        _, found = _verified(descriptor, str(folder / shard.name))
        return [replace(damage, shard=shard.name) for damage in found]

    with ThreadPoolExecutor(usable_cores(), "dataloaders-verify") as pool:
        index, damages = _verified(open_file(name), name, progress, pool.map)
        if index is None:
            return damages
        done = index.file_bytes
        # Several shards at once, each in one thread.
        for shard, found in zip(index.shards, pool.map(verified, index.shards), strict=True):
            damages += found
            done += shard.file_bytes
            progress(done, index.all_bytes)
    if "first" in index.fingerprint and not is_parts_folder(joined.absolute().parent):
        length = shown(index.fingerprint.get("length"))
        what = f"it is a part, with {index.samples} of {length} samples, and no whole cache"
        damages.insert(0, Damage(0, index.file_bytes, what))
    return damages


def _silent(done: int, whole: int) -> None:
    pass


def _verified(
    descriptor: int, name: str, progress: Progress = _silent, run: Callable[..., Any] = map
) -> tuple[Index | None, list[Damage]]:
    """Return the index of one file, if it is sound, and what is damaged; close the file."""
    try:
        index = Index.parse(descriptor, name)
        return index, list(_damages(descriptor, index, progress, run))
    except CacheError as error:
        size = os.fstat(descriptor).st_size
        return None, [Damage(0, min(size, HEADER), f"the index: {error}")]
    except OSError as error:
        raise CacheError(f"the cache {name} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _damages(
    descriptor: int, index: Index, progress: Progress, run: Callable[..., Any]
) -> Iterator[Damage]:
    start, end = index.user_block, index.file_bytes
    # The header, which holds the text's length, was compared with its digest.
    begin = HEADER + int.from_bytes(os.pread(descriptor, 8, 16), "little")
    if any(os.pread(descriptor, start - begin, begin)):
        yield Damage(begin, start - begin, "the zeros after the index")
    place, size = index.checksums.values
    table = os.pread(descriptor, 4 * size, place)
    is_whole = blake2b(table, digest_size=DIGEST).hexdigest() == index.checksums.digest
    if not is_whole:
        yield Damage(place, 4 * size, "the table of checksums")
    written = np.frombuffer(table.ljust(4 * size, b"\0"), "<u4").tolist()
    before, places = 0 if index.shards else start, list(index.places())
    found = checksums(descriptor, start, end, (place, place + 4 * size), run)
    for number, checksum in enumerate(found):
        begin = start + number * BLOCK
        last = min(begin + BLOCK, end)
        if checksum != written[number]:
            what = _what_is_at(places, begin, last)
            if checksum < 0:
                what += " (it cannot be read)"
            elif not is_whole:
                what += " (or only its checksum)"
            yield Damage(begin, last - begin, what)
        if number % _REPORTED == _REPORTED - 1 or last == end:
            progress(last - before, index.all_bytes - before)


def _what_is_at(places: list[tuple[str, str, Extent]], begin: int, end: int) -> str:
    """Return what these bytes hold. Compressed values are chunks among HDF5's own records."""
    names, others = [], end - begin
    for name, dtype, (offset, size) in places:
        low, high = max(offset, begin), min(offset + size * np.dtype(dtype).itemsize, end)
        if low < high:
            names.append(name)
            others -= high - low
    if others:
        names.append("HDF5's own records or compressed values")
    return ", ".join(names)
