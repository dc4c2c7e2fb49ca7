"""The checksums of a cache: a crc32 for each 64 KiB behind the user block.

The table of checksums stands in the file itself; where it does, its bytes count as zero, and the
index has a digest of the table. The index's own is in the user block. So every bit is covered,
against accidents: that is what crc32 is for, at nearly the speed of memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from dataloaders.machine.resources import usable_cores

try:
    from isal.isal_zlib import crc32  # a few times as fast, and the same
except ImportError:
    from zlib import crc32

__all__ = ["BLOCK", "Summed", "checksums", "crc32"]

BLOCK = 1 << 16
"""Bytes of the file that share a checksum, which is a crc32."""

_READ = 16 * BLOCK  # bytes that are read at once
_AT_ONCE = 64  # such reads that are handed to the threads together


class Summed:
    """The checksums of bytes that are written one after the other, in pieces of any size.

    Args:
        begin: where the first one is written, counted from the end of the user block.
    """

    def __init__(self, begin: int) -> None:
        self._at = begin % BLOCK
        self._crc = 0
        self._some = False  # of the block that is not full
        self._full: list[int] = []

    def add(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        data = memoryview(data)
        while data:
            piece = data[: BLOCK - self._at]
            self._crc = crc32(piece, self._crc)
            self._at, self._some = self._at + len(piece), True
            if self._at == BLOCK:
                self._full.append(self._crc)
                self._crc, self._at, self._some = 0, 0, False
            data = data[len(piece) :]

    def sums(self) -> list[int]:
        """One checksum for each block that has some of the bytes, of these alone."""
        return [*self._full, self._crc] if self._some else list(self._full)


def checksums(
    descriptor: int,
    start: int,
    end: int,
    hole: tuple[int, int],
    known: npt.NDArray[np.int64] | None = None,
) -> Iterator[int | None]:
    """The checksum of each block from byte ``start`` to ``end``; None of one that cannot be read.

    Args:
        descriptor: of the file.
        start: its first byte behind the user block.
        end: the byte behind its last one.
        hole: the first byte that counts as zero, and the one behind the last.
        known: of each block its checksum, so that it is not read; -1: it is to be read.
    """

    def some(begin: int) -> list[int | None]:
        last = min(begin + _READ, end)
        if known is not None:
            there = known[(begin - start) // BLOCK :][: len(_blocks(begin, last))].tolist()
            if any(each >= 0 for each in there):
                return [
                    _or_none(descriptor, b, min(b + BLOCK, end), hole) if each < 0 else each
                    for b, each in zip(_blocks(begin, last), there, strict=True)
                ]
        try:
            return list(_checksums(descriptor, begin, last, hole))
        except OSError:
            return [
                _or_none(descriptor, b, min(b + BLOCK, end), hole) for b in _blocks(begin, last)
            ]

    # Reading and hashing both let go of the interpreter's lock.
    with ThreadPoolExecutor(usable_cores(), "dataloaders-checksum") as threads:
        for first in range(start, end, _READ * _AT_ONCE):
            last = min(first + _READ * _AT_ONCE, end)
            for found in threads.map(some, range(first, last, _READ)):
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
