"""Values written at once where they stand in the finished file, and not a second time.

    study ──> large columns, first in the file ──> the file laid out, empty: placed.5e1f
    a row of one shape ───────> its place is known
    a row of several shapes ──> known as soon as all chunks before are read: sizes.py
    the rest of a row ────────> chunk-000017.5e1f, and a checksum of each block that was placed
    all stands where it should ──> names, small columns, checksums, index: it is the cache
    else ────────────────────────> it is where the chunks' large columns are read from

Of a file of images that is half of the disk, and of the time after reading.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataloaders.cache.checksums import BLOCK, Summed
from dataloaders.cache.chunk import Chunk, Column, sizes
from dataloaders.cache.disk import write_all
from dataloaders.cache.index import Index
from dataloaders.cache.layout import Layouts, first_columns
from dataloaders.cache.sample import Cell
from dataloaders.cache.sizes import Sizes
from dataloaders.errors import CacheError

__all__ = ["Place", "Placed", "Placement", "Placer", "Span", "placeable"]

Span = tuple[int, int]
"""The byte of the file at which a chunk's values of a column begin, and how many bytes they are."""

_ELSEWHERE = Cell("none", np.empty(0, np.uint8))
_AT_ONCE = 512 << 10  # bytes: what was just taken apart is still in the core's cache
_POLL_S = 0.001
_PATIENCE = 0.1  # of the time that a chunk took: writing it twice takes about as long


def placeable(layouts: Layouts | None, rows: int) -> bool:
    """Whether files of such rows can be laid out before they are read, and are worth it."""
    return layouts is not None and rows > 0 and bool(first_columns(layouts.done(rows), rows))


@dataclass(frozen=True)
class Place:
    """Where a column's rows go, one after the other.

    Attributes:
        column: its number.
        offset: byte of the file at which the first row begins.
        kind, dtype, shape: of each cell that may go there; of rows of several shapes the shape is
            None, and any kind may.
    """

    column: int
    offset: int
    kind: str
    dtype: str
    shape: tuple[int, ...] | None

    def takes(self, cell: Cell) -> bool:
        """Whether ``cell`` is what was foreseen."""
        array = cell.array
        if self.shape is None:
            return cell.kind == "none" or array.dtype.str == self.dtype
        return (cell.kind, array.dtype.str, array.shape) == (self.kind, self.dtype, self.shape)

    @property
    def bytes(self) -> int:
        """Of a row; rows of several shapes have no such number."""
        assert self.shape is not None
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Placement:
    """What a worker has to know of it.

    Attributes:
        file: that is laid out.
        user_block: bytes in front of its first block.
        places: of the columns that are written there, in their order.
        sizes: the file of the `Sizes` of the one column among them whose rows are of several
            shapes, if there is one.
    """

    file: str
    user_block: int
    places: tuple[Place, ...]
    sizes: str


class Placer:
    """Puts the rows of a chunk at their places, a few at a time, as soon as these are known.

    One at a time, small rows would each cost a call of the system.

    Args:
        placement: where they go.
        chunk: its number.
        first: the number of its first row, if no sample was left out before.
    """

    def __init__(self, placement: Placement, chunk: int, first: int) -> None:
        self._chunk = chunk
        varies = any(place.shape is None for place in placement.places)
        self._sizes = Sizes(placement.sizes) if varies else None
        self._size = 0  # of the column that the sizes are of
        self._begun = time.monotonic()
        self._spots = [_Spot(place, placement.user_block, first) for place in placement.places]
        self._most = max((place.column for place in placement.places), default=-1)
        self._found = all(spot.begin is not None for spot in self._spots)
        self._held = 0  # bytes that could be written
        # Since `settle`: cells of a row, and where each of its columns was put; -1: not yet.
        self._rows: list[tuple[list[Cell], list[int]]] = []
        self._placing = True
        self._file = os.open(placement.file, os.O_RDWR | os.O_CLOEXEC)

    def put(self, cells: list[Cell]) -> int:
        """Have the columns of the next row written, and then nothing of them in ``cells``.

        What has no place yet stays in ``cells`` until it has one, or `settle` gives it up. A row
        that is not what was foreseen has the chunk's columns `stop`ped.

        Returns:
            How many bytes are not in memory any more.
        """
        for spot in self._spots:
            if spot.place.shape is None and spot.place.column < len(cells):
                self._size += cells[spot.place.column].array.nbytes
        if not self._placing:
            return 0
        if len(cells) <= self._most or not all(
            spot.place.takes(cells[spot.place.column]) for spot in self._spots
        ):
            self.stop()
            return 0
        self._find()
        self._rows.append((cells, [-1] * len(self._spots)))
        for spot in self._spots:
            if spot.is_open:
                self._held += cells[spot.place.column].array.nbytes
        return self._write() if self._held >= _AT_ONCE else 0

    def settle(self) -> None:
        """Have all rows since the last call at their places, or give up those that have none.

        It waits for the chunks before this one, as long as writing it twice would take.
        """
        if not self._rows:
            return
        end = time.monotonic() + _PATIENCE * (time.monotonic() - self._begun)
        while self._placing and not self._find() and time.monotonic() < end:
            time.sleep(_POLL_S)
        self._write()
        for spot in self._spots:
            if spot.begin is None:  # nothing of it is written, so that all of it can stay
                spot.given_up = True
            spot.rows = 0
        self._rows.clear()

    def tell(self) -> None:
        """Tell the others how large the chunk is, whose rows are all read."""
        if self._sizes is not None:
            self._sizes.put(self._chunk, self._size)

    def waits(self) -> bool:
        """Whether rows are left that have no place yet; those that have one now are written."""
        return self._placing and bool(self._rows) and not self._find()

    def stop(self) -> None:
        """Have all columns of the rows since `settle` in their cells again, and of those to come.

        Raises:
            CacheError: the file does not have what was written.
        """
        for cells, offsets in self._rows:
            for spot, offset in zip(self._spots, offsets, strict=True):
                if offset >= 0:
                    self._give_back(spot.place, offset, cells)
        self._placing = False
        self._rows.clear()

    @property
    def whole(self) -> frozenset[int]:
        """The numbers of columns of which the rows before `settle` have nothing in their cells."""
        return self._written(fixed=True)

    @property
    def values(self) -> frozenset[int]:
        """The numbers of those of which they have kind and shape."""
        return self._written(fixed=False)

    @property
    def size(self) -> int:
        """Bytes of the column whose rows are of several shapes, wherever they are."""
        return self._size

    @property
    def spans(self) -> tuple[Span, ...]:
        """What was written, for each place."""
        return tuple((spot.begin or 0, spot.bytes) for spot in self._spots)

    @property
    def sums(self) -> list[int]:
        """The checksums of what was written, as `Placed.sums` has them."""
        return [each for spot in self._spots for each in spot.sums()]

    def close(self) -> None:
        """Close the files."""
        os.close(self._file)
        if self._sizes is not None:
            self._sizes.close()

    def _written(self, *, fixed: bool) -> frozenset[int]:
        if not self._placing:
            return frozenset()
        return frozenset(
            spot.place.column
            for spot in self._spots
            if (spot.place.shape is not None) == fixed and not spot.given_up
        )

    def _find(self) -> bool:
        """Whether all places are known; rows that waited for one of them are written."""
        if self._found:
            return True
        missing = [spot for spot in self._spots if spot.begin is None and not spot.given_up]
        if not missing:
            return True
        assert self._sizes is not None
        before = self._sizes.before(self._chunk)
        if before is None:
            return False
        for spot in missing:
            spot.begin_at(spot.place.offset + before)
        self._found = True
        self._write()
        return True

    def _write(self) -> int:
        """Write what has a place and is not there; how many bytes it is."""
        written, self._held = 0, 0
        for n, spot in enumerate(self._spots):
            if not spot.is_open:
                continue
            column, fixed = spot.place.column, spot.place.shape is not None
            begin, pieces, rows = spot.end, list[bytes | memoryview](), self._rows[spot.rows :]
            for cells, offsets in rows:
                offsets[n] = spot.end
                for piece in cells[column].pieces:
                    spot.add(piece)
                    pieces.append(piece)
            write_all(self._file, begin, *pieces)
            written += spot.end - begin
            spot.rows = len(self._rows)
            for cells, _ in rows:
                cells[column] = _ELSEWHERE if fixed else _hollow(cells[column])
        return written

    def _give_back(self, place: Place, offset: int, cells: list[Cell]) -> None:
        kind, dtype, shape = place.kind, np.dtype(place.dtype), place.shape
        if shape is None:
            cell = cells[place.column]
            kind, dtype, shape = cell.kind, cell.array.dtype, cell.array.shape
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        data = os.pread(self._file, size, offset)
        if len(data) != size:
            raise CacheError(f"{size} bytes that were just written are not there")
        values = np.frombuffer(data, "|u1").view(dtype).reshape(shape)
        cells[place.column] = replace(cells[place.column], kind=kind, array=values)


def _hollow(cell: Cell) -> Cell:
    """``cell`` with values of the same type and shape that take no room."""
    dtype, shape = cell.array.dtype, cell.array.shape
    values = np.ndarray(shape, dtype, bytes(dtype.itemsize), strides=(0,) * len(shape))
    return replace(cell, array=values)


class _Spot:
    """Where a chunk's rows of one column go, and how far they are.

    Attributes:
        place: of the column.
        begin: the byte at which they begin; None: not known yet.
        bytes: written so far.
        rows: of those that the placer has, how many are written.
        given_up: whether they are not written there.
    """

    def __init__(self, place: Place, user_block: int, first: int) -> None:
        self.place = place
        self.begin: int | None = None
        self.bytes = 0
        self.rows = 0
        self.given_up = False
        self._user_block = user_block
        self._summed = Summed(0)
        if place.shape is not None:
            self.begin_at(place.offset + first * place.bytes)

    def begin_at(self, offset: int) -> None:
        """The first row goes there."""
        self.begin = offset
        self._summed = Summed(offset - self._user_block)

    @property
    def is_open(self) -> bool:
        """Whether rows can be written there."""
        return self.begin is not None and not self.given_up

    @property
    def end(self) -> int:
        """The byte where the next ones go."""
        assert self.begin is not None
        return self.begin + self.bytes

    def add(self, data: bytes | memoryview) -> None:
        """Count these bytes, which are the next ones."""
        self._summed.add(data)
        self.bytes += len(data)

    def sums(self) -> list[int]:
        """Checksums of all that was added."""
        return self._summed.sums() if self.bytes else []


class Placed:
    """The file that is laid out, and filled while samples are read.

    Attributes:
        name: of the file, in the build's folder.
        index: what the finished file would say of itself, if all rows were as those that were read
            before: of a column of several shapes only the place is sure.
        columns: numbers of those that are placed.
    """

    def __init__(self, folder: Path, name: str, index: Index, columns: Sequence[int]) -> None:
        self.name = name
        self.index = index
        self.columns = tuple(columns)
        self.path = folder / name
        self._map: memoryview | None = None
        self.places = tuple(self._places())

    @classmethod
    def load(cls, settings: Path) -> Placed | None:
        """The one that `save` told of, if its file is there."""
        try:
            found = json.loads(settings.read_bytes().decode("ascii"))
            text = json.dumps(found["index"], sort_keys=True, separators=(",", ":")).encode()
            index = Index.from_text(text, found["user_block"], found["index"]["file_bytes"])
            there = settings.with_name(found["name"]).is_file()
            placed = cls(settings.parent, found["name"], index, found["columns"])
        except (OSError, ValueError, TypeError, LookupError, RecursionError, CacheError):
            return None
        return placed if there else None

    def save(self) -> bytes:
        """What `load` needs, as the contents of a file."""
        found = {
            "name": self.name,
            "user_block": self.index.user_block,
            "columns": self.columns,
            "index": json.loads(self.index.text()),
        }
        return json.dumps(found).encode()

    def placement(self, sizes: str) -> Placement:
        """For the workers; ``sizes``: the file of the `Sizes`."""
        return Placement(str(self.path), self.index.user_block, self.places, sizes)

    @property
    def varies(self) -> bool:
        """Whether rows of several shapes are among what is placed."""
        return any(place.shape is None for place in self.places)

    def _places(self) -> Iterator[Place]:
        for number in self.columns:
            entry = self.index.columns[number]
            kind = entry.variants[0][0]
            yield Place(number, entry.values.offset, kind, entry.dtype, entry.shape)

    def stands_as(self, index: Index) -> bool:
        """Whether in a file that is as ``index`` says the same columns stand at the same places."""
        if (index.user_block, index.structure) != (self.index.user_block, self.index.structure):
            return False
        for place in self.places:
            now, then = index.columns[place.column], self.index.columns[place.column]
            same = (now.dtype, now.shape, now.values.offset)
            if same != (then.dtype, then.shape, then.values.offset):
                return False
            if now.shape is not None and now.variants != then.variants:
                return False
        return True

    def completed(self, chunk: Chunk, offsets: Sequence[int]) -> tuple[Chunk, list[int]]:
        """``chunk`` with the values that stand here, as views; and how many bytes of each place.

        Args:
            chunk: a part of one.
            offsets: of each place, where the values of its first row are.
        """
        found, taken = {}, []
        for place, offset in zip(self.places, offsets, strict=True):
            column = chunk.columns[place.column]
            size = self.bytes_in(place, chunk)
            taken.append(size)
            if not size:
                continue  # this part was not placed, or there is nothing in it
            if place.shape is not None:
                shapes = np.array(place.shape, np.uint64)
                column = Column(
                    place.dtype,
                    ((place.kind, len(place.shape)),),
                    np.zeros(chunk.rows, np.uint8),
                    np.broadcast_to(shapes, (chunk.rows, len(place.shape))),
                    column.values,
                )
            values = np.frombuffer(self._bytes((offset, size)), "|u1").view(column.dtype)
            found[place.column] = replace(column, values=values)
        return chunk.completed(found), taken

    def bytes_in(self, place: Place, chunk: Chunk) -> int:
        """How many bytes of a part's column stand here, and not in the chunk."""
        column = chunk.columns[place.column]
        if place.shape is not None:
            return 0 if len(column.codes) else chunk.rows * place.bytes
        missing = int(sizes(column).sum()) - len(column.values)
        return missing * np.dtype(column.dtype).itemsize

    def sums(self, spans: Sequence[Span]) -> list[int]:
        """The checksums of these spans, one a place: of what of each block is in it, in order."""
        found: list[int] = []
        for begin, size in spans:
            if size:
                summed = Summed(begin - self.index.user_block)
                summed.add(self._bytes((begin, size)))
                found += summed.sums()
        return found

    def known_blocks(
        self, spans: Sequence[Span], sums: npt.NDArray[np.uint32]
    ) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """What is known of the file's checksums: the number of a block, and those from it on.

        Args:
            spans: one a place.
            sums: as `sums` gives them. Of these, only those of whole blocks are the file's.
        """
        position = 0
        for begin, size in spans:
            if not size:
                continue
            first, last = begin - self.index.user_block, begin - self.index.user_block + size
            low, high = -(-first // BLOCK), last // BLOCK
            skipped = position + low - first // BLOCK
            if low < high:
                yield low, sums[skipped : skipped + high - low]
            position += -(-last // BLOCK) - first // BLOCK

    def _bytes(self, span: Span) -> memoryview:
        """A view of the file."""
        begin, size = span
        if self._map is None or len(self._map) < begin + size:
            with open(self.path, "rb") as file:
                self._map = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if len(self._map) < begin + size:
            raise CacheError(f"{self.path} is shorter than what was written into it")
        return self._map[begin : begin + size]
