"""Values written at once where they stand in the finished file, and not a second time.

    study ──> every column of one shape ──> the file laid out, empty: placed.5e1f
    a chunk's large columns ──> their places in it;   the small ones ──> chunk-000017.5e1f
    all chunks as the study said ──> the small columns, checksums, index: it is the cache
    else ────────────────────────> it is where the chunks' large columns are read from

Of a file of images that is half of the disk, and of the time after reading.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataloaders.cache.chunk import Column
from dataloaders.cache.index import ColumnEntry, Index
from dataloaders.cache.layout import Layouts
from dataloaders.cache.sample import Cell
from dataloaders.errors import CacheError

__all__ = ["Place", "Placed", "Placement", "placeable"]

_LEAST_BYTES = 2048  # of a row: hdf5.py aligns such columns
_MOST_BUFFERS = 1024  # in one call, as the system has it (IOV_MAX)


def placeable(layouts: Layouts | None, rows: int) -> bool:
    """Whether files of such rows can be laid out before they are read, and are worth it."""
    if layouts is None or not rows:
        return False
    columns = layouts.done(rows)
    return all(column.shape is not None for column in columns) and any(
        len(column.variants) == 1
        and column.size * np.dtype(column.dtype).itemsize >= rows * _LEAST_BYTES
        for column in columns
    )


@dataclass(frozen=True)
class Place:
    """Where a column's rows go, one after the other.

    Attributes:
        column: its number.
        offset: byte of the file at which the first row begins.
        kind, dtype, shape: of each cell that may go there.
        bytes: of a row.
    """

    column: int
    offset: int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int

    def takes(self, cell: Cell) -> bool:
        """Whether ``cell`` is what was foreseen."""
        values = cell.values
        return (cell.kind, values.dtype.str, values.shape) == (self.kind, self.dtype, self.shape)

    def at(self, row: int) -> int:
        """The byte at which this row begins."""
        return self.offset + row * self.bytes


@dataclass(frozen=True)
class Placement:
    """What a worker has to know of it.

    Attributes:
        file: that is laid out.
        places: of the columns that are written there, in their order.
    """

    file: str
    places: tuple[Place, ...]

    @property
    def columns(self) -> frozenset[int]:
        """The numbers of these columns."""
        return frozenset(place.column for place in self.places)

    def takes(self, rows: Sequence[Sequence[Cell]]) -> bool:
        """Whether these rows, each as its cells, are what was foreseen."""
        return all(
            place.column < len(cells) and place.takes(cells[place.column])
            for place in self.places
            for cells in rows
        )

    def write(self, first: int, rows: Sequence[Sequence[Cell]], digests: list[int]) -> int:
        """Write ``rows``, of which the first one has number ``first`` in the file.

        Args:
            first: a row's number.
            rows: each as its cells.
            digests: the crc32 of each column so far; brought up to date.

        Returns:
            How many bytes that were.
        """
        file = os.open(self.file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for n, place in enumerate(self.places):
                arrays = [row[place.column].values.reshape(-1).view("|u1") for row in rows]
                cells = [array.data for array in arrays]
                for cell in cells:
                    digests[n] = zlib.crc32(cell, digests[n])
                for begin in range(0, len(cells), _MOST_BUFFERS):
                    _write_all(file, place.at(first + begin), cells[begin : begin + _MOST_BUFFERS])
        finally:
            os.close(file)
        return len(rows) * sum(place.bytes for place in self.places)


def _write_all(file: int, offset: int, buffers: list[memoryview]) -> None:
    while buffers:
        written = os.pwritev(file, buffers, offset)
        offset += written
        while buffers and written >= len(buffers[0]):
            written -= len(buffers.pop(0))
        if written:
            buffers[0] = buffers[0][written:]


class Placed:
    """The file that is laid out, and filled while samples are read.

    Attributes:
        name: of the file, in the build's folder.
        index: what the finished file will say of itself, but for its checksums.
    """

    def __init__(self, folder: Path, name: str, index: Index) -> None:
        self.name = name
        self.index = index
        self.path = folder / name
        self._map: memoryview | None = None

    @classmethod
    def load(cls, settings: Path) -> Placed | None:
        """The one that `save` told of, if its file is there."""
        try:
            found = json.loads(settings.read_bytes())
            text = json.dumps(found["index"], sort_keys=True, separators=(",", ":")).encode()
            size = os.path.getsize(settings.with_name(found["name"]))
            index = Index.from_text(text, found["user_block"], size)
        except (OSError, ValueError, TypeError, KeyError, CacheError):
            return None
        return cls(settings.parent, found["name"], index)

    def save(self) -> bytes:
        """What `load` needs, as the contents of a file."""
        found = {
            "name": self.name,
            "user_block": self.index.user_block,
            "index": json.loads(self.index.text()),
        }
        return json.dumps(found).encode()

    @property
    def placement(self) -> Placement:
        """For the workers."""
        return Placement(str(self.path), tuple(self._places()))

    def _places(self) -> Iterator[Place]:
        for number, entry in enumerate(self.index.columns):
            size = _row_bytes(entry)
            if entry.shape is not None and len(entry.variants) == 1 and size >= _LEAST_BYTES:
                kind, offset = entry.variants[0][0], entry.values.offset
                yield Place(number, offset, kind, entry.dtype, entry.shape, size)

    def is_as(self, layouts: Layouts) -> bool:
        """Whether all rows turned out as they were foreseen."""
        now, then = layouts.done(), self.index.columns
        return (layouts.structure, layouts.rows) == (self.index.structure, self.index.rows) and [
            (one.dtype, one.variants, one.shape, one.dimensions) for one in now
        ] == [(one.dtype, one.variants, one.shape, one.dimensions) for one in then]

    def columns(self, first: int, rows: int) -> dict[int, Column]:
        """Each placed column's rows from ``first`` on, as views of the file."""
        found = {}
        for place in self._places():
            dimensions = len(place.shape)
            shapes = np.broadcast_to(np.array(place.shape, np.uint64), (rows, dimensions))
            values = np.frombuffer(self.bytes_of(place, first, rows), "|u1").view(place.dtype)
            variants = ((place.kind, dimensions),)
            codes = np.zeros(rows, np.uint8)
            found[place.column] = Column(place.dtype, variants, codes, shapes, values)
        return found

    def digests(self, first: int, rows: int) -> list[int]:
        """The crc32 of each placed column's rows from ``first`` on."""
        return [zlib.crc32(self.bytes_of(place, first, rows)) for place in self._places()]

    def bytes_of(self, place: Place, first: int, rows: int) -> memoryview:
        """Some rows of a column, as a view of the file."""
        if self._map is None:
            with open(self.path, "rb") as file:
                self._map = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return self._map[place.at(first) : place.at(first + rows)]


def _row_bytes(entry: ColumnEntry) -> int:
    shape = entry.shape or ()
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(entry.dtype).itemsize
