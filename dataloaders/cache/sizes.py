"""How many bytes each chunk has in one column, told by the worker that read it to all others.

worker of chunk 4 ──put(4, 8_390_656)──> sizes.5e1f ──before(7)──> worker of chunk 7
                   None while one of 0 to 6 is not read, then where chunk 7 begins
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dataloaders.cache.disk import write_all

__all__ = ["Sizes"]

_UNKNOWN = np.uint64(2**64 - 1)
_WIDTH = 8
_AT_ONCE = 4096  # sizes that are read together


class Sizes:
    """The file at ``path``, which `create` made, until `close`; any number of processes use it."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._next = 0  # the chunk in front of which all are counted
        self._sum = 0

    @staticmethod
    def create(path: Path, chunks: int, known: Mapping[int, int]) -> None:
        """Make the file for so many chunks, some of whose sizes are known."""
        sizes = np.full(chunks, _UNKNOWN, "<u8")
        for number, size in known.items():
            sizes[number] = size
        path.write_bytes(sizes.tobytes())

    def put(self, chunk: int, size: int) -> None:
        """Tell all others that ``chunk`` is read, and has so many bytes."""
        # Eight bytes in one call, within a page: a reader has all of them or none.
        write_all(self._file, _WIDTH * chunk, size.to_bytes(_WIDTH, "little"))

    def before(self, chunk: int) -> int | None:
        """Bytes of all chunks before this one; None while not all are known."""
        if self._next < chunk:
            self._count(chunk)
        return self._sum if self._next >= chunk else None

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _count(self, chunk: int) -> None:
        while self._next < chunk:
            wanted = min(chunk - self._next, _AT_ONCE)
            data = os.pread(self._file, _WIDTH * wanted, _WIDTH * self._next)
            sizes = np.frombuffer(data, "<u8", len(data) // _WIDTH)
            missing = np.flatnonzero(sizes == _UNKNOWN)
            counted = int(missing[0]) if len(missing) else len(sizes)
            self._sum += int(sizes[:counted].sum())
            self._next += counted
            if counted < wanted:
                return
