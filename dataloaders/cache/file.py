"""Chunks put together into the one file of a cache.

    chunks ──> Layouts ──> skeleton (HDF5: names, types, places)
    chunks again ────────────> values written at their places ──┬──> checksums ──> index, fsync
                 └──Packer──> compressed pieces, behind them  ──┘

The index comes last: a file without it is no cache, so an unfinished one never opens.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.cache.block import DIGEST, VERSION, block_for
from dataloaders.cache.checksums import BLOCK, checksums
from dataloaders.cache.chunk import Chunk, Column, sizes
from dataloaders.cache.codecs import codec_of
from dataloaders.cache.compress import Compressed
from dataloaders.cache.disk import write_all
from dataloaders.cache.entries import ColumnEntry, Extent, Packing
from dataloaders.cache.hdf5 import Chunked, Virtual, add_dataset, skeleton, writing_pieces
from dataloaders.cache.index import Index
from dataloaders.cache.layout import Layout, Layouts, first_columns, occupied
from dataloaders.cache.pack import Packed, Packer
from dataloaders.cache.pieces import chunk_of
from dataloaders.errors import CacheError
from dataloaders.workers import usable_cores

__all__ = [
    "About",
    "Progress",
    "Writer",
    "assemble",
    "become",
    "failures_of",
    "fill",
    "filled",
    "laid_out",
    "lay_out",
    "layouts_of",
]

Progress = Callable[[int, int], None]

Known: TypeAlias = "Iterable[tuple[int, npt.NDArray[np.uint32]]]"
"""Checksums that need not be computed: the number of a block, and those from it on."""

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
        compress: how columns are compressed that are worth it; None: not at all.
    """

    samples: int
    failed: Sequence[tuple[int, str]] = ()
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    head: Sequence[str] = ()
    tail: Sequence[str] = ()
    compress: Compressed | None = None


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
        MissingDependency: h5py, or what compressing takes, is not installed.
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
        MissingDependency: h5py, or what compressing takes, is not installed.
    """
    name, compress = str(Path(path)), about.compress
    columns = layouts.done(rows, compress=compress is not None)
    rows = layouts.rows if rows is None else rows
    _check_failed(about.failed, about.samples, rows)
    numbers, messages = failures_of(about)
    index = Index(
        user_block=0,
        file_bytes=_WIDEST.size,
        rows=rows,
        samples=about.samples,
        structure=layouts.structure,
        columns=tuple(_entry(column, rows, {}, compress) for column in columns),
        checksums=_WIDEST,
        checksums_digest="0" * 2 * DIGEST,
        failed=(_WIDEST, _WIDEST) if about.failed else None,
        fingerprint=dict(about.fingerprint),
        head=tuple(about.head),
        tail=tuple(about.tail),
    )
    user_block = block_for(len(index.text()))
    first = [columns[number] for number in first_columns(columns, rows)]
    datasets = {
        f"{_path(column.name)}{part}": found
        for column in [*first, *(column for column in columns if column not in first)]
        for part, found in _named(column, rows).items()
    }
    packed = [column for column in columns if column.piece]
    for column in packed:
        datasets[_table_path(column.name)] = ("<u8", (-(-column.size // column.piece), 2))
    if about.failed:
        datasets["/failed/rows"] = ("<u8", numbers.shape)
        datasets["/failed/messages"] = ("|u1", messages.shape)
    attributes: dict[str, dict[str, str | int]] = {
        "/": {"format": "dataloaders cache", "version": VERSION, "rows": rows}
    }
    for column in columns:
        attributes[_path(column.name)] = {"kinds": " ".join(kind for kind, _ in column.variants)}
    if compress is not None and packed:
        chunked = {
            _path(column.name) + next(iter(_named(column, rows))): _chunked(column, compress)
            for column in packed
        }
        places = skeleton(name, datasets, user_block, attributes, chunked)
    else:
        places = laid_out(name, datasets, user_block, attributes)
    return replace(
        index,
        user_block=user_block,
        file_bytes=os.path.getsize(name),
        columns=tuple(_entry(column, rows, places, compress) for column in columns),
        checksums=places.get("/checksums", _WIDEST),  # they come last, behind compressed pieces
        failed=(places["/failed/rows"], places["/failed/messages"]) if about.failed else None,
    )


def fill(
    chunks: Iterator[Chunk],
    path: str | os.PathLike[str],
    index: Index,
    about: About,
    *,
    placed: int = 0,
    known: Known = (),
    progress: Progress | None = None,
) -> Index:
    """The index, whole, of the file at ``path`` that was laid out, and is now written and synced.

    Args:
        chunks: all rows, in order. What they have no values of stands in the file already.
        path: of the file.
        index: as `lay_out` gave it.
        about: the same as there.
        placed: how many bytes stand in it.
        known: the checksums of some of its blocks.
        progress: called with the bytes written and checked so far, and those in all.

    Raises:
        CacheError: it cannot be written.
    """

    name, size = str(Path(path)), max(0, _bytes(index) - placed)

    def write(writer: Writer) -> Index:
        if about.compress is None or all(one.packing is None for one in index.columns):
            _write_rows(chunks, index, writer)
            return index
        _write_compressed(name, chunks, index, writer, about.compress)
        longer = _with_checksums(name, index)
        writer.whole = longer.file_bytes - longer.user_block + size
        return longer

    return filled(path, index, about, write, size=size, known=known, progress=progress)


def become(path: Path, skeleton: Path, index: Index) -> None:
    """Have the file at ``path``, where some values stand, be as the one that was laid out.

    All but values is copied from there: names, types and places.

    Args:
        path: of the file.
        skeleton: what `lay_out` made.
        index: what it gave.
    """
    parts = [
        (extent.offset, extent.offset + extent.size * np.dtype(dtype).itemsize)
        for column in index.columns
        for _, dtype, extent in index.parts(column)
        if extent.size
    ]
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with open(skeleton, "rb") as file:
            begin = 0
            for low, high in [*sorted(parts), (index.file_bytes, index.file_bytes)]:
                file.seek(begin)
                write_all(descriptor, begin, file.read(low - begin))
                begin = high
        os.ftruncate(descriptor, index.file_bytes)
    finally:
        os.close(descriptor)


def filled(
    path: str | os.PathLike[str],
    index: Index,
    about: About,
    write: Callable[[Writer], Index],
    *,
    size: int,
    known: Known = (),
    progress: Progress | None = None,
) -> Index:
    """The same, where ``write`` writes the rows, and ``size`` is how many bytes these take.

    It gives the index again, with what shows only when they are written.
    """
    name = str(Path(path))
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            with ThreadPoolExecutor(usable_cores(), "dataloaders-write") as threads:
                whole = index.file_bytes - index.user_block + size
                writer = Writer(descriptor, threads, progress, whole)
                index = write(writer)
                if index.failed is not None:
                    for extent, values in zip(index.failed, failures_of(about), strict=True):
                        writer.write(extent.offset, values)
                writer.settle()
            index = replace(index, checksums_digest=_write_checksums(index, known, writer))
            write_all(descriptor, 0, index.encode())
            os.fsync(descriptor)
            return Index.parse(descriptor, name)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CacheError(
            f"the cache {name} of {index.file_bytes} bytes cannot be written: {error.strerror}; "
            "make room, or give a path elsewhere"
        ) from error


def failures_of(about: About) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
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


def _table_path(column: str) -> str:
    return f"/pieces/{column}"


def _values_path(entry: ColumnEntry) -> str:
    """Of the dataset of the values: as `_named` has it."""
    alone = entry.offsets is None and entry.codes is None
    return _path(entry.name) + ("" if alone else "/values")


def _chunked(layout: Layout, compress: Compressed) -> Chunked:
    width = np.dtype(layout.dtype).itemsize
    codec = codec_of(compress.codec, width)
    filters = codec.filters(compress.chosen_level, layout.piece * width)
    return Chunked(chunk_of(layout.shape, layout.piece), filters)


def _entry(
    layout: Layout, rows: int, places: Mapping[str, Extent], compress: Compressed | None
) -> ColumnEntry:
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
        Packing(compress.codec, layout.piece, places.get(_table_path(layout.name), _WIDEST))
        if compress is not None and layout.piece
        else None,
    )


def laid_out(
    name: str,
    datasets: Mapping[str, tuple[str, tuple[int, ...]]],
    user_block: int,
    attributes: Mapping[str, Mapping[str, str | int]],
    virtual: Mapping[str, Virtual] | None = None,
) -> dict[str, Extent]:
    """The places of all datasets, among them one with a checksum for each block of the file.

    How long the file is depends on the number of checksums, and that on how long the file is.
    """
    blocks = 1
    for _ in range(_TRIES):
        table = {"/checksums": ("<u4", (blocks,))}
        places = skeleton(name, {**datasets, **table}, user_block, attributes, virtual=virtual)
        needed = -(-(os.path.getsize(name) - user_block) // BLOCK)
        if needed == blocks:
            return places
        blocks = needed
    raise CacheError(f"the cache {name} cannot be laid out: its checksums do not fit its length")


def _with_checksums(name: str, index: Index) -> Index:
    """``index`` with the place of the checksums, made last in a file that has all else."""
    blocks = 1
    for _ in range(_TRIES):
        place = add_dataset(name, "/checksums", "<u4", (blocks,))
        file_bytes = os.path.getsize(name)
        needed = -(-(file_bytes - index.user_block) // BLOCK)
        if needed == blocks:
            return replace(index, file_bytes=file_bytes, checksums=place)
        blocks = needed
    raise CacheError(f"the cache {name} cannot be laid out: its checksums do not fit its length")


def _bytes(index: Index) -> int:
    """Of all columns, before any are compressed."""
    total = 0
    for column in index.columns:
        places = [(dtype, extent) for part, dtype, extent in column.parts() if part != "pieces"]
        if column.packing is not None:
            places.append((column.dtype, column.values))
        total += sum(extent.size * np.dtype(dtype).itemsize for dtype, extent in places)
    return total


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


def _write_compressed(
    name: str, chunks: Iterator[Chunk], index: Index, writer: Writer, compress: Compressed
) -> None:
    """As `_write_rows`, with the compressed pieces put behind what is in the file."""
    packed = [
        Packed(_values_path(entry), entry.packing, np.dtype(entry.dtype).itemsize)
        for entry in index.columns
        if entry.packing is not None
    ]
    with writing_pieces(name, [column.path for column in packed]) as pieces:
        with Packer(pieces, packed, compress.chosen_level) as packer:
            _write_rows(chunks, index, writer, packer)
        tables = [pieces.table(column.path) for column in packed]
    for column, table in zip(packed, tables, strict=True):
        writer.write(column.packing.pieces.offset, table)


def _write_rows(
    chunks: Iterator[Chunk],
    index: Index,
    writer: Writer,
    packer: Packer | None = None,
) -> None:
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


def _write_checksums(index: Index, known: Known, writer: Writer) -> str:
    """The digest of the table of checksums, which is written."""
    start, end, place = index.user_block, index.file_bytes, index.checksums
    table = np.empty(place.size, "<u4")
    hole = (place.offset, place.offset + table.nbytes)
    there = np.full(place.size, -1, np.int64)
    for first, sums in known:
        there[first : first + len(sums)] = sums
    for number, checksum in enumerate(checksums(writer.descriptor, start, end, hole, there)):
        if checksum is None:
            raise CacheError("the cache cannot be read while it is written; look at the disk")
        table[number] = checksum
        if number % _REPORTED == _REPORTED - 1:
            writer.advance(BLOCK * _REPORTED)
    writer.advance((end - start) % (BLOCK * _REPORTED))
    write_all(writer.descriptor, place.offset, table.tobytes())
    return blake2b(table.tobytes(), digest_size=DIGEST).hexdigest()
