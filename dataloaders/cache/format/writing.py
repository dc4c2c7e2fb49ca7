"""Write a whole file of the format: HDF5, then its values, its checksums, and last its index.

    entries, blocks ──hdf5.py──> names, types, places ──> values at their places
                    ──> checksums after them ──> the sealed index in front

The index comes last: a file without it is no cache, so an unfinished one never opens.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.cache.format.attributes import encoded
from dataloaders.cache.format.block import DIGEST, VERSION, block_for
from dataloaders.cache.format.checksums import BLOCK, checksums
from dataloaders.cache.format.codecs import Codec
from dataloaders.cache.format.compress import Compressed
from dataloaders.cache.format.entries import Checksums, ColumnEntry, Extent, Failed, Shard
from dataloaders.cache.format.hdf5 import Source, dataset, hdf5_file
from dataloaders.cache.format.index import Index
from dataloaders.cache.sample.sample import Structure

Block: TypeAlias = npt.NDArray[Any]

_DIGITS = 2 * len(str(1 << 48))  # that a place in the index may take
_WORTH = 16  # a chunk that does not lose a part in so many is kept as it is
_STEP = 1 << 20  # bytes that are written at once: a call of the system for each small row is slow


class Table(NamedTuple):
    """Rows, column by column."""

    structure: Structure | None  # of each sample; None without rows
    rows: int
    entries: Sequence[ColumnEntry]  # with sizes, without places
    # By the number of a column, and the name of a dataset of it: the buffers that make it up.
    blocks: Callable[[int, str], Iterable[Block]]
    shards: Sequence[Shard] = ()  # the files that have the values; none: `blocks` gives them
    sources: Callable[[int], Sequence[Source]] = lambda number: ()  # where in the shards they are


@dataclass(frozen=True)
class About:
    """What a file says besides its rows."""

    samples: int  # that it was made of, those left out included
    failed: Sequence[tuple[int, str]] = ()  # number and message of each sample that was left out
    fingerprint: Mapping[str, Any] = field(default_factory=dict)  # as JSON has it
    head: Sequence[str] = ()  # the transforms whose result the rows are
    tail: Sequence[str] = ()  # those that are still to be applied
    compress: Compressed | None = None  # how columns are compressed that are worth it
    attributes: Mapping[str, Any] = field(default_factory=dict)  # of the dataset


def write_cache(
    path: Path, about: About, table: Table, progress: Callable[[int], None] = lambda count: None
) -> Index:
    """Write the file and return its index. The same rows give the same file to the bit.

    ``progress`` is called with the bytes, before compression, written since its last call.

    Raises:
        CacheError: HDF5 cannot write it.
        OSError: the system cannot.
    """
    compress = None if table.shards else about.compress
    columns = [
        entry if compress is None else compress.applied(entry, table.rows)
        for entry in table.entries
    ]
    others = _others(about)
    index = Index(
        rows=table.rows,
        samples=about.samples,
        structure=table.structure,
        columns=tuple(columns),
        fingerprint=dict(about.fingerprint),
        head=tuple(about.head),
        tail=tuple(about.tail),
        failed=Failed(Extent(0, 0), Extent(0, 0)) if about.failed else None,
        attributes=Extent(0, 0) if about.attributes else None,
        shards=tuple(table.shards),
        checksums=Checksums(BLOCK, Extent(0, 0), "0" * 2 * DIGEST),
    )
    # Its length has to be known before the places that stand in it are.
    user_block = block_for(len(index.text()) + _DIGITS * (2 + sum(1 for _ in index.places())))
    placed, contents = [], list[tuple[int, Iterable[Block]]]()

    def place(name: str, dtype: str, shape: tuple[int, ...], data: Iterable[Block]) -> Extent:
        made, size = dataset(file, name, dtype, shape), math.prod(shape)
        offset = int(made.get_offset()) if size else 0
        contents.append((offset, data if size else ()))
        return Extent(offset, size)

    with hdf5_file(path, user_block, has_chunks=any(entry.packing for entry in columns)) as file:
        for number, entry in enumerate(columns):
            places, pieces = dict[str, Extent](), np.zeros(0, "<u8")
            for part, dtype, extent in entry.sized():
                name, shape = path_of(entry, part), entry.shape_of(part, table.rows)
                is_values = part == "values" and extent.size
                if is_values and table.shards:
                    dataset(file, name, dtype, shape, table.sources(number))
                elif is_values and entry.packing is not None and compress is not None:
                    chunks = _pieces(entry, compress, table.blocks(number, part))
                    pieces = _write_pieces(file, name, shape, entry, compress, chunks, progress)
                else:
                    data = [pieces] if part == "pieces" else table.blocks(number, part)
                    places[part] = place(name, dtype, shape, data)
            placed.append(entry.placed(places))
        found = {
            name: place(name, values.dtype.str, values.shape, [values])
            for name, values in others.items()
        }
        _write_attributes(file, index)
    with path.open("r+b", _STEP) as written:
        for offset, data in contents:
            written.seek(offset)
            for step in _steps(data):
                progress(written.write(step))
        failed = Failed(found["/failed/rows"], found["/failed/messages"]) if about.failed else None
        index = replace(
            index,
            user_block=user_block,
            columns=tuple(placed),
            failed=failed,
            attributes=found.get("/attributes"),
        )
        index = _checksummed(written, index)
        written.seek(0)
        written.write(index.encode())
        written.flush()
        return Index.parse(written.fileno(), str(path))


def path_of(entry: ColumnEntry, part: str) -> str:
    """Return the path of one dataset: a column is itself one, or has several below it."""
    if part == "pieces":
        return f"/pieces/{entry.name}"
    alone = entry.shape is not None and len(entry.variants) == 1
    return f"/columns/{entry.name}" + ("" if alone else f"/{part}")


def _write_pieces(
    file: Any,
    name: str,
    shape: tuple[int, ...],
    entry: ColumnEntry,
    compress: Compressed,
    pieces: Iterable[tuple[bytes, bool]],
    progress: Callable[[int], None],
) -> npt.NDArray[np.uint64]:
    """Write the compressed values of a column; return the table of its pieces."""
    assert entry.packing is not None
    width, others = np.dtype(entry.dtype).itemsize, shape[1:]
    filters = Codec(entry.packing.codec, width).filters(compress.chosen_level)
    rows = entry.packing.piece // math.prod(others)
    made = dataset(file, name, entry.dtype, shape, chunks=(rows, *others), **filters)
    skips_all = (1 << made.get_create_plist().get_nfilters()) - 1  # a bit for each filter
    for number, (data, is_packed) in enumerate(pieces):
        place = (number * rows, *[0] * len(others))
        made.write_direct_chunk(place, data, 0 if is_packed else skips_all)
        progress(entry.packing.piece * width)
    table = np.zeros((made.get_num_chunks(), 2), "<u8")

    def note(chunk: Any) -> None:
        table[chunk.chunk_offset[0] // rows] = chunk.byte_offset, chunk.size

    made.chunk_iter(note)
    return table


def _pieces(
    entry: ColumnEntry, compress: Compressed, blocks: Iterable[Block]
) -> Iterator[tuple[bytes, bool]]:
    """Yield the pieces of a column as they stand in the file, and whether each is compressed."""
    assert entry.packing is not None
    width = np.dtype(entry.dtype).itemsize
    size, codec = entry.packing.piece * width, Codec(entry.packing.codec, width)
    for piece in _cut(blocks, size):
        data = codec.encode(np.frombuffer(piece, np.uint8), compress.chosen_level)
        is_packed = len(data) < size - size // _WORTH
        yield (data if is_packed else piece), is_packed


def bytes_in_file(table: Table, compress: Compressed | None, of: int) -> int:
    """Return what the columns of these rows take in a file of ``of`` rows like them, about."""
    total = sum(entry.bytes for entry in table.entries)
    if compress is None:
        return total
    for number, entry in enumerate(table.entries):
        many = replace(entry, values=Extent(0, entry.values.size * of // table.rows))
        packed = replace(entry, packing=compress.applied(many, of).packing)
        if packed.packing is not None:
            values = entry.values.size * np.dtype(entry.dtype).itemsize
            pieces = _pieces(packed, compress, table.blocks(number, "values"))
            total += min(0, sum(len(data) for data, _ in pieces) - values)
    return total


def _cut(blocks: Iterable[Block], size: int) -> Iterator[bytes]:
    """Yield all bytes of ``blocks`` in pieces of ``size``; zeros follow the last ones."""
    left = bytearray()
    for step in _steps(blocks):
        left += step
        while len(left) >= size:
            yield bytes(left[:size])
            del left[:size]
    if left:
        yield bytes(left).ljust(size, b"\0")


def _steps(blocks: Iterable[Block]) -> Iterator[memoryview]:
    """Yield all bytes of ``blocks``, not too many at once."""
    for block in blocks:
        data = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        for first in range(0, len(data), _STEP):
            yield data[first : first + _STEP]


def _others(about: About) -> dict[str, npt.NDArray[Any]]:
    """Return what stands in the file besides columns."""
    found: dict[str, npt.NDArray[Any]] = {}
    if about.failed:
        found["/failed/rows"] = np.array([row for row, _ in about.failed], "<u8")
        text = json.dumps([text for _, text in about.failed]).encode("ascii")
        found["/failed/messages"] = np.frombuffer(text, "|u1")
    if about.attributes:
        found["/attributes"] = np.frombuffer(encoded(about.attributes), "|u1")
    return found


def _write_attributes(file: Any, index: Index) -> None:
    """Write the HDF5 attributes."""
    file.attrs["format"] = np.bytes_(index.format.encode())
    file.attrs["version"], file.attrs["rows"] = np.uint64(VERSION), np.uint64(index.rows)
    if index.shards:
        file.attrs["shards"] = np.uint64(len(index.shards))
    for entry in index.columns:
        kinds = " ".join(kind for kind, _ in entry.variants)
        file[f"/columns/{entry.name}"].attrs["kinds"] = np.bytes_(kinds.encode())


def _checksummed(file: IO[bytes], index: Index) -> Index:
    """Write the table of checksums after the HDF5 file; return ``index`` with it."""
    file.flush()
    end = os.fstat(file.fileno()).st_size
    place = -(-end // 8) * 8
    blocks = 1
    while blocks != (needed := -(-(place + 4 * blocks - index.user_block) // BLOCK)):
        blocks = needed
    file_bytes = file.truncate(place + 4 * blocks)
    found = checksums(file.fileno(), index.user_block, file_bytes, (place, file_bytes))
    table = np.fromiter(found, np.int64, blocks)
    if (table < 0).any():
        raise OSError("the file cannot be read while it is written")
    data = table.astype("<u4").tobytes()
    file.seek(place)
    file.write(data)
    digest = blake2b(data, digest_size=DIGEST).hexdigest()
    made = Checksums(BLOCK, Extent(place, blocks), digest)
    return replace(index, file_bytes=file_bytes, checksums=made)
