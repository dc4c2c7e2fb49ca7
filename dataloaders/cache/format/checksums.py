"""The checksums of a cache: a crc32 for each 64 KiB after the user block.

The table of checksums stands in the file itself; where it does, its bytes count as zero, and the
index has a digest of the table. The index's own is in the user block. So every bit is covered,
against accidents: that is what crc32 is for, at nearly the speed of memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

BLOCK = 1 << 16  # bytes of the file that share a checksum, which is a crc32
_AT_ONCE = 256 * BLOCK  # bytes of one thread's task


def checksums(
    descriptor: int, start: int, end: int, hole: tuple[int, int], run: Callable[..., Any] = map
) -> Iterator[int]:
    """Yield the checksum of each block from byte ``start`` to ``end``; -1: it cannot be read.

    The bytes from the first to the one before the second of ``hole`` count as zero. A pool's `map`
    reads in its threads: reading and hashing both let go of the interpreter's lock.
    """

    def some(first: int) -> list[int]:
        last = min(first + _AT_ONCE, end)
        return [
            _checksum(descriptor, begin, min(begin + BLOCK, end), hole)
            for begin in range(first, last, BLOCK)
        ]

    for found in run(some, range(start, end, _AT_ONCE)):
        yield from found


def _checksum(descriptor: int, begin: int, end: int, hole: tuple[int, int]) -> int:
    try:
        data = os.pread(descriptor, end - begin, begin)
    except OSError:
        return -1
    if len(data) < end - begin:  # the file is shorter than it was
        return -1
    low, high = max(hole[0], begin), min(hole[1], end)
    if low < high:
        data = data[: low - begin] + bytes(high - low) + data[high - begin :]
    return crc32(data)
