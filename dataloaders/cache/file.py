"""Chunks put together into the one file of a cache.

    chunks ──> Layouts ──> skeleton (HDF5: names, types, places)
    chunks again ────────────> values written at their places ──> checksums ──> index, fsync

The index comes last: a file without it is no cache, so an unfinished one never opens.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.checksums import checksums
from dataloaders.cache.chunk import Chunk, Column, sizes
from dataloaders.cache.hdf5 import skeleton
from dataloaders.cache.index import (
    BLOCK,
    DIGEST,
    VERSION,
    ColumnEntry,
    Extent,
    Index,
    block_for,
)
from dataloaders.cache.layout import Layout, Layouts, occupied
from dataloaders.errors import CacheError
from dataloaders.workers import usable_cores

__all__ = ["About", "assemble", "fill", "lay_out", "layouts_of"]

Progress = Callable[[int, int], None]

_WIDEST = Extent((1 << 48) - 1, (1 << 48) - 1)  # no place in a file takes more digits
_TRIES = 10
_REPORTED = 256  # blocks between two reports of progress
_PIECE = 4 << 20  # bytes that a thread writes at once
_WAITING = 32  # such pieces that wait for a thread


@dataclass(frozen=True)
class About:
    """What a file says besides its rows.

    Attributes:
        samples: length of the dataset.
        failed: number and message of each sample that was left out, in order.
        fingerprint: of the dataset and what it stands on, as JSON has it.
        head: the transforms whose result the rows are.
        tail: those that are still to be applied.
    """

    samples: int
    failed: Sequence[tuple[int, str]] = ()
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    head: Sequence[str] = ()
    tail: Sequence[str] = ()


def assemble(
    chunks: Callable[[], Iterator[Chunk]],
    path: str | os.PathLike[str],
    about: About,
    *,
    progress: Progress | None = None,
) -> Index:
    """The index of the cache that is written to ``path``, which it replaces, and synced.

    The same rows give the same file to the bit, however they are cut into chunks.

    Args:
        chunks: called twice; gives the chunks in order, each of which is let go before the next.
        path: of the file. It is written in place: rename it afterwards.
        about: what it says of itself.
        progress: called with the bytes written and checked so far, and those in all.

    Raises:
        CacheError: the rows do not belong into one file, or it cannot be written.
        MissingDependency: h5py is not installed.
    """
    index = lay_out(path, layouts_of(chunks()), about)
    return fill(chunks(), path, index, about, progress=progress)


def layouts_of(chunks: Iterator[Chunk]) -> Layouts:
    """What these chunks have in common.

    Raises:
        CacheError: their rows do not belong into one file.
    """
    layouts = Layouts()
    for chunk in chunks:
        layouts.add(chunk)
        del chunk
    return layouts


def lay_out(
    path: str | os.PathLike[str], layouts: Layouts, about: About, rows: int | None = None
) -> Index:
    """The index, but for the checksums, of the file that is made at ``path`` without any values.

    Args:
        path: of the file, which is replaced.
        layouts: of its rows.
        about: what it says of itself.
        rows: how many there will be, if those to come are like those of ``layouts``.

    Raises:
        CacheError: it cannot be written.
        MissingDependency: h5py is not installed.
    """
    name = str(Path(path))
    columns = layouts.done(rows)
    rows = layouts.rows if rows is None else rows
    _check_failed(about.failed, about.samples, rows)
    numbers, messages = _failures(about)
    index = Index(
        user_block=0,
        file_bytes=_WIDEST.size,
        rows=rows,
        samples=about.samples,
        structure=layouts.structure,
        columns=tuple(_entry(column, rows, {}) for column in columns),
        checksums=_WIDEST,
        checksums_digest="0" * 2 * DIGEST,
        failed=(_WIDEST, _WIDEST) if about.failed else None,
        fingerprint=dict(about.fingerprint),
        head=tuple(about.head),
        tail=tuple(about.tail),
    )
    user_block = block_for(len(index.text()))
    datasets = {
        f"{_path(column.name)}{part}": found
        for column in columns
        for part, found in _named(column, rows).items()
    }
    if about.failed:
        datasets["/failed/rows"] = ("<u8", numbers.shape)
        datasets["/failed/messages"] = ("|u1", messages.shape)
    attributes: dict[str, dict[str, str | int]] = {
        "/": {"format": "dataloaders cache", "version": VERSION, "rows": rows}
    }
    for column in columns:
        attributes[_path(column.name)] = {"kinds": " ".join(kind for kind, _ in column.variants)}
    places = _laid_out(name, datasets, user_block, attributes)
    return replace(
        index,
        user_block=user_block,
        file_bytes=os.path.getsize(name),
        columns=tuple(_entry(column, rows, places) for column in columns),
        checksums=places["/checksums"],
        failed=(places["/failed/rows"], places["/failed/messages"]) if about.failed else None,
    )


def fill(
    chunks: Iterator[Chunk],
    path: str | os.PathLike[str],
    index: Index,
    about: About,
    *,
    there: Collection[int] = (),
    progress: Progress | None = None,
) -> Index:
    """The index, whole, of the file at ``path`` that was laid out, and is now written and synced.

    Args:
        chunks: all rows, in order.
        path: of the file.
        index: as `lay_out` gave it.
        about: the same as there.
        there: numbers of columns whose values stand in the file already.
        progress: called with the bytes written and checked so far, and those in all.

    Raises:
        CacheError: it cannot be written.
    """
    name = str(Path(path))
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            with ThreadPoolExecutor(usable_cores(), "dataloaders-write") as threads:
                whole = index.file_bytes - index.user_block + _bytes(index, there)
                writer = _Writer(descriptor, threads, progress, whole)
                _write_rows(chunks, index, there, writer)
                if index.failed is not None:
                    for extent, values in zip(index.failed, _failures(about), strict=True):
                        writer.write(extent.offset, values)
                writer.settle()
            index = replace(index, checksums_digest=_write_checksums(index, writer))
            _write_all(descriptor, 0, index.encode())
            os.fsync(descriptor)
            return Index.parse(descriptor, name)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CacheError(
            f"the cache {name} of {index.file_bytes} bytes cannot be written: {error.strerror}; "
            "make room, or give a path elsewhere"
        ) from error


def _failures(about: About) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The numbers of the samples that were left out, and their messages as JSON."""
    numbers = np.array([row for row, _ in about.failed], "<u8")
    text = json.dumps([text for _, text in about.failed]).encode("ascii")
    return numbers, np.frombuffer(text, "|u1")


def _check_failed(failed: Sequence[tuple[int, str]], samples: int, rows: int) -> None:
    numbers = [-1, *(row for row, _ in failed), samples]
    if any(one >= next_one for one, next_one in pairwise(numbers)) or rows + len(failed) > samples:
        raise CacheError(
            f"{rows} rows and {len(failed)} failed samples cannot be those of {samples} samples: "
            "failed samples are given in order, each once"
        )


def _named(layout: Layout, rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The column's datasets: itself one, or several below it."""
    found = layout.datasets(rows)
    if layout.shape is not None and len(found) == 1:
        return {"": found["values"]}
    return {f"/{part}": each for part, each in found.items()}


def _path(column: str) -> str:
    return f"/columns/{column}"


def _entry(layout: Layout, rows: int, places: Mapping[str, Extent]) -> ColumnEntry:
    path, named, found = _path(layout.name), _named(layout, rows), layout.datasets(rows)

    def place(part: str) -> Extent | None:
        if part not in found:
            return None
        return places.get(f"{path}/{part}" if f"/{part}" in named else path, _WIDEST)

    return ColumnEntry(
        layout.name,
        layout.dtype,
        layout.variants,
        layout.shape,
        layout.dimensions,
        place("values") or _WIDEST,
        place("offsets"),
        place("shapes"),
        place("codes"),
    )


def _laid_out(
    name: str,
    datasets: Mapping[str, tuple[str, tuple[int, ...]]],
    user_block: int,
    attributes: Mapping[str, Mapping[str, str | int]],
) -> dict[str, Extent]:
    """The places of all datasets, among them one with a checksum for each block of the file.

    How long the file is depends on the number of checksums, and that on how long the file is.
    """
    blocks = 1
    for _ in range(_TRIES):
        table = {"/checksums": ("<u4", (blocks,))}
        places = skeleton(name, {**datasets, **table}, user_block, attributes)
        needed = -(-(os.path.getsize(name) - user_block) // BLOCK)
        if needed == blocks:
            return places
        blocks = needed
    raise CacheError(f"the cache {name} cannot be laid out: its checksums do not fit its length")


def _bytes(index: Index, there: Collection[int]) -> int:
    """Of all columns but these."""
    return sum(
        extent.size * np.dtype(dtype).itemsize
        for number, column in enumerate(index.columns)
        for _, dtype, extent in column.parts()
        if number not in there
    )


class _Writer:
    """Writes arrays into the file, in threads, and says how far it is."""

    def __init__(
        self, descriptor: int, threads: ThreadPoolExecutor, progress: Progress | None, whole: int
    ) -> None:
        self.descriptor = descriptor
        self._threads = threads
        self._progress = progress
        self._whole = whole
        self._done = 0
        self._under_way: deque[Future[None]] = deque()

    def write(self, offset: int, values: npt.NDArray[Any]) -> None:
        """Have ``values`` put at ``offset``; they must stay as they are until `settle`."""
        data = memoryview(np.ascontiguousarray(values).reshape(-1).view("|u1").data)
        for begin in range(0, len(data), _PIECE):
            # Copying into the page cache lets go of the interpreter's lock.
            piece = data[begin : begin + _PIECE]
            written = self._threads.submit(_write_all, self.descriptor, offset + begin, piece)
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
            self._progress(self._done, self._whole)


def _write_all(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count


def _write_rows(
    chunks: Iterator[Chunk], index: Index, there: Collection[int], writer: _Writer
) -> None:
    columns = {
        number: _ColumnWriter(entry, writer)
        for number, entry in enumerate(index.columns)
        if number not in there
    }
    rows = 0
    for chunk in chunks:
        rows += chunk.rows
        if rows > index.rows or chunk.structure != index.structure:
            break
        for number, column in columns.items():
            column.write(chunk.columns[number])
        writer.advance(sum(column.taken() for column in columns.values()))
        del chunk
    if rows != index.rows or any(not column.complete(rows) for column in columns.values()):
        raise CacheError("the chunks were others when they were read for the second time")


class _ColumnWriter:
    def __init__(self, entry: ColumnEntry, writer: _Writer) -> None:
        self.entry = entry
        self.writer = writer
        self.rows = 0
        self.values = 0
        self.bytes = 0
        self.width = np.dtype(entry.dtype).itemsize

    def write(self, column: Column) -> None:
        """Put these rows behind those before."""
        entry, rows = self.entry, len(column.codes)
        if entry.codes is not None:
            numbers = [entry.variants.index(variant) for variant in column.variants]
            self._put(entry.codes, self.rows, np.array(numbers, "|u1")[column.codes])
        if entry.shape is not None:
            self._put(entry.values, self.values, self._filled(column, math.prod(entry.shape)))
            self.values += rows * math.prod(entry.shape)
        else:
            self._put(entry.values, self.values, column.values)
            ends = self.values + np.concatenate([[0], np.cumsum(sizes(column))])
            self.values += len(column.values)
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

    def _put(self, extent: Extent, before: int, values: npt.NDArray[Any]) -> None:
        if before + values.size > extent.size:
            raise CacheError("the chunks were others when they were read for the second time")
        if values.size:
            self.writer.write(extent.offset + before * values.itemsize, values)
            self.bytes += values.nbytes

    def taken(self) -> int:
        """Bytes written since this was last asked."""
        taken, self.bytes = self.bytes, 0
        return taken

    def complete(self, rows: int) -> bool:
        """Whether as much was written as was announced."""
        return self.rows == rows and self.values == self.entry.values.size


def _write_checksums(index: Index, writer: _Writer) -> str:
    """The digest of the table of checksums, which is written."""
    start, end, place = index.user_block, index.file_bytes, index.checksums
    table = np.empty(place.size, "<u4")
    hole = (place.offset, place.offset + table.nbytes)
    for number, checksum in enumerate(checksums(writer.descriptor, start, end, hole)):
        if checksum is None:
            raise CacheError("the cache cannot be read while it is written; look at the disk")
        table[number] = checksum
        if number % _REPORTED == _REPORTED - 1:
            writer.advance(BLOCK * _REPORTED)
    writer.advance((end - start) % (BLOCK * _REPORTED))
    _write_all(writer.descriptor, place.offset, table.tobytes())
    return blake2b(table.tobytes(), digest_size=DIGEST).hexdigest()
