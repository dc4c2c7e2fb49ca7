"""Values written at once where they stand in the finished file, and not a second time.

    study ──> every column of one shape ──> the file laid out, empty: placed.5e1f
    a row's large columns ──> their places in it;   the small ones ──> chunk-000017.5e1f
    all chunks as the study said ──> the small columns, checksums, index: it is the cache
    else ────────────────────────> it is where the chunks' large columns are read from

Of a file of images that is half of the disk, and of the time after reading.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataloaders.cache.chunk import Chunk, Column
from dataloaders.cache.disk import write_all
from dataloaders.cache.index import ColumnEntry, Index
from dataloaders.cache.layout import Layouts
from dataloaders.cache.sample import Cell
from dataloaders.errors import CacheError

__all__ = ["Place", "Placed", "Placement", "Placer", "placeable"]

_LEAST_BYTES = 2048  # of a row: hdf5.py aligns such columns
_ELSEWHERE = Cell("none", np.empty(0, np.uint8))


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


class Placer:
    """Puts rows at their places, each as soon as it is read: it is still in the cores' caches.

    Attributes:
        columns: the numbers of the columns that it puts there.
        digests: the crc32 of each of them so far.
        placed: bytes so far.
    """

    def __init__(self, placement: Placement) -> None:
        self.columns = placement.columns
        self.digests = [0] * len(placement.places)
        self.placed = 0
        self._places = placement.places
        self._file = os.open(placement.file, os.O_RDWR | os.O_CLOEXEC)

    def put(self, row: int, cells: list[Cell]) -> bool:
        """Write the columns of row number ``row``, and have nothing in their places in ``cells``.

        Returns:
            Whether they are what was foreseen; else nothing is done.
        """
        for place in self._places:
            if place.column >= len(cells) or not place.takes(cells[place.column]):
                return False
        for n, place in enumerate(self._places):
            data = cells[place.column].values.reshape(-1).view("|u1").data
            self.digests[n] = zlib.crc32(data, self.digests[n])
            write_all(self._file, place.at(row), data)
            self.placed += len(data)
            cells[place.column] = _ELSEWHERE
        return True

    def give_back(self, row: int, cells: list[Cell]) -> None:
        """Have the columns in ``cells`` again that were put at the places of this row."""
        for place in self._places:
            data = os.pread(self._file, place.bytes, place.at(row))
            if len(data) != place.bytes:
                raise CacheError(f"{place.bytes} bytes that were just written are not there")
            values = np.frombuffer(data, "|u1").view(place.dtype).reshape(place.shape)
            cells[place.column] = Cell(place.kind, values)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


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
            found = json.loads(settings.read_bytes().decode("ascii"))
            text = json.dumps(found["index"], sort_keys=True, separators=(",", ":")).encode()
            size = os.path.getsize(settings.with_name(found["name"]))
            index = Index.from_text(text, found["user_block"], size)
        except (OSError, ValueError, TypeError, KeyError, RecursionError, CacheError):
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

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the columns that are placed."""
        return sum(place.bytes for place in self._places())

    def is_as(self, layouts: Layouts) -> bool:
        """Whether all rows turned out as they were foreseen."""
        now, then = layouts.done(), self.index.columns
        return (layouts.structure, layouts.rows) == (self.index.structure, self.index.rows) and [
            (one.dtype, one.variants, one.shape, one.dimensions) for one in now
        ] == [(one.dtype, one.variants, one.shape, one.dimensions) for one in then]

    def completed(self, chunk: Chunk, first: int) -> Chunk:
        """``chunk`` with the columns that stand here, as views; its first row is row ``first``."""
        rows, found = chunk.rows, {}
        for place in self._places():
            if len(chunk.columns[place.column].codes):
                continue  # this part was not placed
            dimensions = len(place.shape)
            shapes = np.broadcast_to(np.array(place.shape, np.uint64), (rows, dimensions))
            values = np.frombuffer(self.bytes_of(place, first, rows), "|u1").view(place.dtype)
            variants = ((place.kind, dimensions),)
            codes = np.zeros(rows, np.uint8)
            found[place.column] = Column(place.dtype, variants, codes, shapes, values)
        return chunk.completed(found)

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
