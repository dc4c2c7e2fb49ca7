"""Values of compressed columns on their way into the file: cut, compressed in threads, in order.

    chunk ──> pieces that are full ──sort: (row, column)──> threads ──> file

A piece goes into the file when the row that fills it has come, pieces of one row in the columns'
order. So their order depends on the rows alone, however these were cut into chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.codecs import codec_of
from dataloaders.cache.codecs.codec import Bytes, Codec
from dataloaders.cache.entries import Packing
from dataloaders.cache.hdf5 import PieceWriter
from dataloaders.machine.resources import usable_cores

__all__ = ["Packed", "Packer"]

_WAITING = 64 << 20  # bytes of pieces that are being compressed
_PER_CORE = 4
_WORTH = 16  # a piece that does not lose a part in so many is kept as it is


@dataclass(frozen=True)
class Packed:
    """A column to be compressed.

    Attributes:
        path: of its HDF5 dataset.
        packing: how it is compressed.
        width: bytes of a value.
    """

    path: str
    packing: Packing
    width: int


class Packer:
    """Compresses columns into a file; a context, at whose end all pieces are in the file.

    Args:
        pieces: writes them.
        columns: that are compressed.
        level: of their codecs.
    """

    def __init__(self, pieces: PieceWriter, columns: Sequence[Packed], level: int) -> None:
        self._pieces = pieces
        self._level = level
        self._cutters = [_Cutter(column) for column in columns]
        self._codecs = [codec_of(column.packing.codec, column.width) for column in columns]
        self._paths = [column.path for column in columns]
        self._ready: list[tuple[int, int, int, Bytes]] = []  # row, column, number, bytes
        cores = usable_cores()
        self._threads = ThreadPoolExecutor(cores, "dataloaders-compress")
        self._most = _PER_CORE * cores
        self._waiting: deque[tuple[int, int, Bytes, Future[bytes | None]]] = deque()
        self._bytes = 0

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                for column, cutter in enumerate(self._cutters):
                    self._ready += [(0, column, *piece) for piece in cutter.rest()]
                self.flush()
                while self._waiting:
                    self._write()
        finally:
            self._threads.shutdown(cancel_futures=True)

    def add(self, column: int, values: npt.NDArray[Any], rows: int, ends: Any) -> None:
        """Take more values of a column.

        Args:
            column: its number in ``columns``.
            values: that come behind those before.
            rows: that came before.
            ends: the number of the value behind the last one, for each row that ``values`` has.
        """
        for number, piece in self._cutters[column].cut(values):
            last = (number + 1) * self._cutters[column].piece
            row = rows + int(np.searchsorted(ends, last))
            self._ready.append((row, column, number, piece))

    def flush(self) -> None:
        """Compress and write what is there, after the same rows were added to all columns."""
        self._ready.sort(key=lambda piece: piece[:3])
        for _, column, number, piece in self._ready:
            while self._waiting and (
                len(self._waiting) >= self._most or self._bytes + piece.size > _WAITING
            ):
                self._write()
            future = self._threads.submit(_encoded, self._codecs[column], piece, self._level)
            self._waiting.append((column, number, piece, future))
            self._bytes += piece.size
        self._ready.clear()

    def _write(self) -> None:
        column, number, piece, future = self._waiting.popleft()
        self._bytes -= piece.size
        encoded = future.result()
        data = piece.tobytes() if encoded is None else encoded
        self._pieces.write(self._paths[column], number, data, encoded=encoded is not None)


class _Cutter:
    """Cuts one column into pieces of one size."""

    def __init__(self, column: Packed) -> None:
        self.piece = column.packing.piece
        self._bytes = self.piece * column.width
        self._number = 0
        self._left: list[Bytes] = []  # less than a piece
        self._size = 0

    def cut(self, values: npt.NDArray[Any]) -> list[tuple[int, Bytes]]:
        """The pieces that are full, with their numbers."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        found = []
        while self._size + data.size >= self._bytes:
            first, data = np.split(data, [self._bytes - self._size])
            found.append(self._next(first))
        if data.size:
            # A copy: a view would keep the whole chunk.
            self._left.append(data.copy())
            self._size += data.size
        return found

    def rest(self) -> list[tuple[int, Bytes]]:
        """The last piece, with zeros behind its values, if anything is left."""
        return [self._next(np.zeros(self._bytes - self._size, np.uint8))] if self._size else []

    def _next(self, last: Bytes) -> tuple[int, Bytes]:
        piece = np.concatenate([*self._left, last]) if self._left else last
        self._left, self._size = [], 0
        self._number += 1
        return self._number - 1, piece


def _encoded(codec: Codec, piece: Bytes, level: int) -> bytes | None:
    """The bytes to keep of ``piece``, fewer than it has; None: its own."""
    encoded = codec.encode(piece, level)
    return encoded if len(encoded) < piece.size - piece.size // _WORTH else None
