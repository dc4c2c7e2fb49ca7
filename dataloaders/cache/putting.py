"""Values put at their places in the file of a cache, by threads; compressed ones behind it.

chunks ──_ColumnWriter, one a column──> Writer ──threads──> the file
                                  └───> Packer ──> compressed pieces
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.chunk import Chunk, Column, sizes
from dataloaders.cache.compress import Compressed
from dataloaders.cache.disk import write_all
from dataloaders.cache.entries import ColumnEntry, Extent
from dataloaders.cache.hdf5 import writing_pieces
from dataloaders.cache.index import Index
from dataloaders.cache.laying import values_path
from dataloaders.cache.layout import occupied
from dataloaders.cache.pack import Packed, Packer
from dataloaders.errors import CacheError

__all__ = ["Progress", "Writer", "write_compressed", "write_rows"]

Progress = Callable[[int, int], None]

_PIECE = 4 << 20  # bytes that a thread writes at once
_WAITING = 32  # such pieces that wait for a thread


class Writer:
    """Writes arrays into the file, in threads, and says how far it is."""

    def __init__(
        self, descriptor: int, threads: ThreadPoolExecutor, progress: Progress | None, whole: int
    ) -> None:
        self.descriptor = descriptor
        self._threads = threads
        self._progress = progress
        self.whole = whole
        self._done = 0
        self._under_way: deque[Future[None]] = deque()

    def write(self, offset: int, values: npt.NDArray[Any]) -> None:
        """Have ``values`` put at ``offset``; they must stay as they are until `settle`."""
        data = memoryview(np.ascontiguousarray(values).reshape(-1).view("|u1").data)
        for begin in range(0, len(data), _PIECE):
            # Copying into the page cache lets go of the interpreter's lock.
            piece = data[begin : begin + _PIECE]
            written = self._threads.submit(write_all, self.descriptor, offset + begin, piece)
            self._under_way.append(written)
            if len(self._under_way) > _WAITING:
                self._under_way.popleft().result()

    def settle(self) -> None:
        """Wait until all is written."""
        while self._under_way:
            self._under_way.popleft().result()

    def advance(self, count: int) -> None:
        """So many bytes more are done."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self.whole)


def write_rows(
    chunks: Iterator[Chunk],
    index: Index,
    writer: Writer,
    packer: Packer | None = None,
) -> None:
    """Put all rows at their places.

    Args:
        chunks: all of them, in order. What they have no values of stands in the file already.
        index: of the file.
        writer: puts what is not compressed there.
        packer: takes what is.

    Raises:
        CacheError: the rows are others than those that the file was laid out for.
    """
    packed = count()
    columns = [
        _ColumnWriter(entry, writer, packer, -1 if entry.packing is None else next(packed))
        for entry in index.columns
    ]
    rows = 0
    for chunk in chunks:
        rows += chunk.rows
        if rows > index.rows or chunk.structure != index.structure:
            break
        for column, found in zip(columns, chunk.columns, strict=True):
            column.write(found, chunk.rows)
        if packer is not None:
            packer.flush()
        writer.advance(sum(column.taken() for column in columns))
        del chunk
    if rows != index.rows or any(not column.complete(rows) for column in columns):
        raise CacheError("the chunks were others when they were read for the second time")


def write_compressed(
    name: str, chunks: Iterator[Chunk], index: Index, writer: Writer, compress: Compressed
) -> None:
    """As `write_rows`, with the compressed pieces put behind what is in the file."""
    packed = [
        Packed(values_path(entry), entry.packing, np.dtype(entry.dtype).itemsize)
        for entry in index.columns
        if entry.packing is not None
    ]
    with writing_pieces(name, [column.path for column in packed]) as pieces:
        with Packer(pieces, packed, compress.chosen_level) as packer:
            write_rows(chunks, index, writer, packer)
        tables = [pieces.table(column.path) for column in packed]
    for column, table in zip(packed, tables, strict=True):
        writer.write(column.packing.pieces.offset, table)


class _ColumnWriter:
    def __init__(
        self, entry: ColumnEntry, writer: Writer, packer: Packer | None, packed: int
    ) -> None:
        self.entry = entry
        self.writer = writer
        self.packer = packer
        self.packed = packed  # its number among the compressed columns, or -1
        self.rows = 0
        self.values = 0
        self.bytes = 0
        self.width = np.dtype(entry.dtype).itemsize

    def write(self, column: Column, rows: int) -> None:
        """Put these rows behind those before, but for values that it does not have."""
        entry = self.entry
        if entry.shape is not None and not len(column.codes):
            self.values += rows * math.prod(entry.shape)
            self.rows += rows
            return
        if entry.codes is not None:
            numbers = [entry.variants.index(variant) for variant in column.variants]
            self._put(entry.codes, self.rows, np.array(numbers, "|u1")[column.codes])
        if entry.shape is not None:
            size = math.prod(entry.shape)
            self._put_values(self._filled(column, size), self.values + size * np.arange(rows + 1))
            self.values += rows * size
        else:
            ends = self.values + np.concatenate([[0], np.cumsum(sizes(column))])
            self._put_values(column.values, ends)
            self.values = int(ends[-1])
            if entry.offsets is not None:
                self._put(entry.offsets, self.rows, ends.astype("<u8"))
            if entry.shapes is not None:
                shapes = np.zeros((rows, entry.dimensions), "<u8")
                shapes[:, : column.shapes.shape[1]] = column.shapes
                self._put(entry.shapes, self.rows * entry.dimensions, shapes)
        self.rows += rows

    def _filled(self, column: Column, size: int) -> npt.NDArray[Any]:
        """The values of a fixed column, with zeros for the rows that are None."""
        there = occupied(column)
        if size == 0 or there.all():
            return column.values
        filled = np.zeros((len(there), size), self.entry.dtype)
        if there.any():
            filled[there] = column.values.reshape(-1, size)
        return filled

    def _put_values(self, values: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> None:
        """Put the values of some rows behind those before; row i's are ``ends[i:i + 2]``."""
        if self.entry.packing is None or self.packer is None:
            self._put(self.entry.values, self.values, values)
            return
        self._refuse_more(self.entry.values, self.values, values)
        self.packer.add(self.packed, values, self.rows, ends[1:])
        self.bytes += values.nbytes

    def _put(self, extent: Extent, before: int, values: npt.NDArray[Any]) -> None:
        self._refuse_more(extent, before, values)
        if values.size:
            self.writer.write(extent.offset + before * values.itemsize, values)
            self.bytes += values.nbytes

    def _refuse_more(self, extent: Extent, before: int, values: npt.NDArray[Any]) -> None:
        if before + values.size > extent.size:
            raise CacheError("the chunks were others when they were read for the second time")

    def taken(self) -> int:
        """Bytes written since this was last asked."""
        taken, self.bytes = self.bytes, 0
        return taken

    def complete(self, rows: int) -> bool:
        """Whether as much was written as was announced."""
        return self.rows == rows and self.values == self.entry.values.size
