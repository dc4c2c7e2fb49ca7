"""Chunks put together into the one file of a cache.

    chunks ──> Layouts ──> skeleton (HDF5: names, types, places)          laying.py
    chunks again ────────────> values written at their places ──┬──> checksums ──> index, fsync
                 └──Packer──> compressed pieces, behind them  ──┘         putting.py, filling.py

The index comes last: a file without it is no cache, so an unfinished one never opens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dataloaders.cache.about import About
from dataloaders.cache.chunk import Chunk
from dataloaders.cache.disk import write_all
from dataloaders.cache.filling import fill
from dataloaders.cache.index import Index
from dataloaders.cache.laying import Planned, laid_out
from dataloaders.cache.layout import Layouts, first_columns
from dataloaders.cache.putting import Progress

__all__ = ["assemble", "become", "lay_out", "layouts_of"]


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
    found = layouts.done(rows, compress=about.compress is not None)
    rows = layouts.rows if rows is None else rows
    columns = [Planned(layout, rows, about.compress) for layout in found]
    first = first_columns(found, rows)
    return laid_out(str(Path(path)), about, layouts.structure, rows, columns, first=first)


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
