"""Shards put together into one cache: a small file that names them, and HDF5 that reads them.

    shards ──indexes──> compared: one dataset, one build, all parts of it
           ──merge────> offsets, shapes and codes of all rows; values virtual, where they are
           ──────────> train.h5.building/joined ──rename──> train.h5

Only indexes, offsets, shapes and codes are read, and written once more. The same shards give the
same file to the bit.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dataloaders.cache.about import About
from dataloaders.cache.attributes import attributes_in, differences
from dataloaders.cache.columns import mapped
from dataloaders.cache.disk import sync, writing
from dataloaders.cache.entries import ColumnEntry, Extent, Shard
from dataloaders.cache.fields import Malformed
from dataloaders.cache.filling import filled
from dataloaders.cache.folder import building_folder
from dataloaders.cache.hdf5 import Virtual
from dataloaders.cache.index import Index
from dataloaders.cache.laying import Planned, laid_out
from dataloaders.cache.lock import BuildLock, builder_of
from dataloaders.cache.merge import Part, merged_columns, piece_of, rows_of, values_in
from dataloaders.cache.putting import Progress, Writer
from dataloaders.cache.reader import CachedDataset
from dataloaders.cache.shards import open_beside, range_of, shard_text, shards_beside
from dataloaders.errors import CacheError

__all__ = ["join", "joined_into"]

_AT_ONCE = 1 << 20  # rows whose offsets are in memory together


def join(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Index:
    """Join the shards next to ``path`` into one cache at ``path``, and return its index.

    Shards are named ``train.00003-of-00008.h5``, as ``precompute(..., shard=(3, 8))`` names them.
    An existing joined file is replaced.

    Args:
        path: the path of the joined file.
        progress: called with the bytes written and checked so far, and those in all.

    Raises:
        CacheError: shards are missing, are of different builds, or do not fit into one cache; or
            the file at ``path`` is not a joined one.
        MissingDependency: h5py is not installed.
    """
    target = Path(os.path.realpath(path))
    paths = shards_beside(target)
    if target.exists() and not _is_joined(target):
        raise CacheError(
            f"{target} exists and is not a joined cache; delete it, or give another path"
        )
    folder = building_folder(target)
    lock = BuildLock(folder)
    if not lock.try_acquire():
        raise CacheError(f"{target} is being built by {builder_of(folder)}; wait for it")
    try:
        return joined_into(target, paths, progress=progress)
    finally:
        lock.release(remove=True)


def _is_joined(path: Path) -> bool:
    try:
        return bool(Index.parse(str(path)).shards)
    except CacheError:
        return False


def joined_into(target: Path, paths: Sequence[Path], *, progress: Progress | None = None) -> Index:
    """The same, of these shards, in their order; the lock is held.

    Raises:
        CacheError: as `join`.
    """
    unfinished = building_folder(target) / "joined"
    try:
        with _opened(paths) as parts:
            _refuse_strangers(parts)
            with writing(target.parent):
                index = _write(parts, unfinished, _failed(paths, parts), progress)
                unfinished.rename(target)
                sync(target.parent)
    finally:
        unfinished.unlink(missing_ok=True)
    return index


@contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[list[Part]]:
    """The shards, mapped; each is let go of at the end."""
    with ExitStack() as stack:
        parts = []
        for path in paths:
            descriptor = open_beside(path, f"shard {path.name}")
            try:
                index = Index.parse(descriptor, str(path))
                found = mmap.mmap(descriptor, index.file_bytes, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CacheError(f"the shard {path} cannot be mapped: {error}") from error
            finally:
                os.close(descriptor)
            parts.append(Part(path.name, index, np.frombuffer(found, np.uint8)))
        stack.callback(parts.clear)
        yield parts


def _refuse_strangers(parts: Sequence[Part]) -> None:
    """Raise if they are not all the shards of one build, each in its place."""
    first, of = parts[0], len(parts)
    length = first.index.fingerprint.get("length")
    for rank, part in enumerate(parts):
        index = part.index
        says = index.fingerprint.get("shard")
        if index.shards or says is None:
            raise CacheError(
                f"{part.name} is not a shard: it was not built with shard=({rank}, {of}); put the "
                "right file there"
            )
        if says != shard_text(rank, of):
            raise CacheError(
                f"{part.name} is shard {str(says)[:40]} (counted from 0): it was renamed or "
                "swapped with another one; give each shard the name that it was built with"
            )
        differs = _difference(first.index, index)
        if differs:
            raise CacheError(
                f"the shards {first.name} and {part.name} are from different builds: {differs}; "
                "build all of them of one dataset, with the same packages"
            )
        if type(length) is not int or index.samples != len(range_of(rank, of, length)):
            raise CacheError(
                f"{part.name} is of {index.samples} samples, and should have another part of the "
                f"{length} samples of the dataset; build it again"
            )
    if not any(part.index.rows for part in parts) and any(part.index.failed for part in parts):
        raise CacheError(
            f"none of the {length} samples could be read; the shards' lists of failed samples say "
            f"why: dataloaders cache info {first.name}"
        )


def _difference(one: Index, other: Index) -> str:
    """What two shards were not built alike from; "" if nothing."""
    ours = {**one.fingerprint, "shard": "", "head": list(one.head), "tail": list(one.tail)}
    theirs = {**other.fingerprint, "shard": "", "head": list(other.head), "tail": list(other.tail)}
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            values = [str(each.get(name, "nothing"))[:200] for each in (ours, theirs)]
            return f"{name} is {values[0]} in one and {values[1]} in the other"
    return ""


def _failed(paths: Sequence[Path], parts: Sequence[Part]) -> list[tuple[int, str]]:
    """The samples that were left out, of all shards."""
    failed: list[tuple[int, str]] = []
    for path, part in zip(paths, parts, strict=True):
        if part.index.failed is not None:
            failed.extend(CachedDataset(path).failed)
    if any(one[0] >= other[0] for one, other in pairwise(failed)):
        raise CacheError("the shards' lists of failed samples are not in order: build them again")
    return failed


def _attributes(parts: Sequence[Part]) -> dict[str, Any]:
    """What all shards say of the dataset's classes; those of an older version say nothing.

    Raises:
        CacheError: one of them says something else.
    """
    texts: dict[bytes, str] = {}
    for part in parts:
        place = part.index.attributes
        text = b"" if place is None else mapped(part.data, "|u1", place).tobytes()
        texts.setdefault(text, part.name)
    said = {}
    for each, name in texts.items():
        try:
            said[name] = attributes_in(each) if each else {}
        except Malformed as error:
            raise CacheError(
                f"the shard {name} is damaged: what it says of classes: {error}"
            ) from error
    (first, found), *others = said.items()
    for name, other in others:
        changed = differences(found, other)
        if changed:
            raise CacheError(
                f"the shards {first} and {name} are from different builds: {'; '.join(changed)}; "
                "build all of them of one dataset"
            )
        found = {key: value for key, value in found.items() if key in other}
    return found


def _virtual(column: Planned, number: int, parts: Sequence[Part]) -> Virtual | None:
    """The values of this column of all shards; None if there are none."""
    dtype, shape = column.layout.datasets(column.rows)["values"]
    pieces = []
    rows = values = 0
    for part in parts:
        if part.index.rows:
            entry = part.index.columns[number]
            if values_in(entry, part.index.rows):
                pieces.append(piece_of(entry, part, column.layout, rows, values))
                values += values_in(entry, part.index.rows)
        rows += part.index.rows
    return Virtual(dtype, shape, tuple(pieces)) if pieces else None


def _write(
    parts: Sequence[Part], path: Path, failed: Sequence[tuple[int, str]], progress: Progress | None
) -> Index:
    rows = sum(part.index.rows for part in parts)
    columns = [Planned(layout, rows, elsewhere=True) for layout in merged_columns(parts)]
    one = next((part for part in parts if part.index.rows), parts[0]).index
    about = About(
        samples=sum(part.index.samples for part in parts),
        failed=failed,
        fingerprint={name: each for name, each in one.fingerprint.items() if name != "shard"},
        head=one.head,
        tail=one.tail,
        attributes=_attributes(parts),
    )
    virtual = {
        column.path_of("values"): values
        for number, column in enumerate(columns)
        if (values := _virtual(column, number, parts)) is not None
    }
    shards = [_shard(part) for part in parts]
    index = laid_out(str(path), about, one.structure, rows, columns, virtual=virtual, shards=shards)

    def write(writer: Writer) -> Index:
        for number, column in enumerate(columns):
            _write_rows(column, number, index.columns[number], parts, writer)
        return index

    size = sum(
        extent.size * np.dtype(dtype).itemsize
        for entry in index.columns
        for _, dtype, extent in index.parts(entry)
    )
    return filled(path, index, about, write, size=size, progress=progress)


def _shard(part: Part) -> Shard:
    index = part.index
    return Shard(part.name, index.rows, index.samples, index.file_bytes, index.identity)


def _write_rows(
    column: Planned, number: int, entry: ColumnEntry, parts: Sequence[Part], writer: Writer
) -> None:
    """Write what the column's rows have besides values."""
    if entry.offsets is None and entry.codes is None:
        return

    def put(extent: Extent | None, before: int, values: Any) -> None:
        if extent is not None:
            writer.write(extent.offset + before * values.itemsize, values)
            writer.advance(values.nbytes)

    rows = values = 0
    put(entry.offsets, 0, np.zeros(1, "<u8"))
    for part in parts:
        if not part.index.rows:
            continue
        own = part.index.columns[number]
        for first in range(0, part.index.rows, _AT_ONCE):
            some = range(first, min(first + _AT_ONCE, part.index.rows))
            found = rows_of(own, part, column.layout, some, values)
            put(entry.offsets, rows + 1, found.ends.astype("<u8"))
            put(entry.shapes, rows * entry.dimensions, found.shapes.astype("<u8"))
            put(entry.codes, rows, found.codes)
            rows += len(some)
        values += values_in(own, part.index.rows)
