"""The values of a cache that was laid out, its checksums, and last its index; all of it synced.

    chunks ──putting.py──> values ──> checksums ──> index, fsync

The index comes last: a file without it is no cache, so an unfinished one never opens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.cache.about import About, failures_of
from dataloaders.cache.attributes import encoded
from dataloaders.cache.block import DIGEST
from dataloaders.cache.checksums import BLOCK, checksums
from dataloaders.cache.chunk import Chunk
from dataloaders.cache.disk import write_all
from dataloaders.cache.index import Index
from dataloaders.cache.laying import with_checksums
from dataloaders.cache.putting import Progress, Writer, write_compressed, write_rows
from dataloaders.errors import CacheError
from dataloaders.machine.resources import usable_cores

__all__ = ["Known", "fill", "filled"]

Known: TypeAlias = "Iterable[tuple[int, npt.NDArray[np.uint32]]]"
"""Checksums that need not be computed: the number of a block, and those from it on."""

_REPORTED = 256  # blocks between two reports of progress


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
            write_rows(chunks, index, writer)
            return index
        write_compressed(name, chunks, index, writer, about.compress)
        longer = with_checksums(name, index)
        writer.whole = longer.file_bytes - longer.user_block + size
        return longer

    return filled(path, index, about, write, size=size, known=known, progress=progress)


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
                if index.attributes is not None:
                    text = np.frombuffer(encoded(about.attributes), "|u1")
                    writer.write(index.attributes.offset, text)
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


def _bytes(index: Index) -> int:
    """Of all columns, before any are compressed."""
    total = 0
    for column in index.columns:
        places = [(dtype, extent) for part, dtype, extent in column.parts() if part != "pieces"]
        if column.packing is not None:
            places.append((column.dtype, column.values))
        total += sum(extent.size * np.dtype(dtype).itemsize for dtype, extent in places)
    return total


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
