"""The checksums of a cache: a crc32 for each 64 KiB behind the user block.

The table of checksums stands in the file itself; where it does, its bytes count as zero, and the
index has a digest of the table. The index's own is in the user block. So every bit is covered,
against accidents: that is what crc32 is for, at nearly the speed of memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

__all__ = ["BLOCK", "checksums"]

BLOCK = 1 << 16
"""Bytes of the file that share a checksum, which is a crc32."""

_READ = 16 * BLOCK  # bytes that are read at once
_AT_ONCE = 64  # such reads that are handed to the threads together


def checksums(
    descriptor: int, start: int, end: int, hole: tuple[int, int], *, threads: int = 0
) -> Iterator[int | None]:
    """Yield the checksum of each block from byte ``start`` to ``end``; None: it cannot be read.

    Args:
        descriptor: of the file.
        start: its first byte behind the user block.
        end: the byte behind its last one.
        hole: the first byte that counts as zero, and the one behind the last.
        threads: that read; 0: this one.
    """

    def some(begin: int) -> list[int | None]:
        last = min(begin + _READ, end)
        try:
            return list(_checksums(descriptor, begin, last, hole))
        except OSError:
            return [
                _or_none(descriptor, b, min(b + BLOCK, end), hole) for b in _blocks(begin, last)
            ]

    if not threads:
        for begin in range(start, end, _READ):
            yield from some(begin)
        return
    # Reading and hashing both let go of the interpreter's lock.
    with ThreadPoolExecutor(threads, "dataloaders-checksum") as pool:
        for first in range(start, end, _READ * _AT_ONCE):
            last = min(first + _READ * _AT_ONCE, end)
            for found in pool.map(some, range(first, last, _READ)):
                yield from found


def _blocks(begin: int, end: int) -> range:
    return range(begin, end, BLOCK)


def _or_none(descriptor: int, begin: int, end: int, hole: tuple[int, int]) -> int | None:
    try:
        (checksum,) = _checksums(descriptor, begin, end, hole)
    except OSError:
        return None
    return checksum


def _checksums(descriptor: int, begin: int, end: int, hole: tuple[int, int]) -> Iterator[int]:
    """The checksums of the blocks in these bytes, those in the ``hole`` taken as zero."""
    data = bytearray(end - begin)
    place = memoryview(data)
    while place:
        read = os.preadv(descriptor, [place], end - len(place))
        if read == 0:
            raise OSError("the file is shorter than it was")
        place = place[read:]
    low, high = max(hole[0], begin), min(hole[1], end)
    if low < high:
        data[low - begin : high - begin] = bytes(high - low)
    whole = memoryview(data)
    for block in _blocks(0, len(data)):
        yield crc32(whole[block : block + BLOCK])
