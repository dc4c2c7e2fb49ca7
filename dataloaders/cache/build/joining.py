"""Make one cache of its parts: a small file that names them, or one with all of their rows.

    parts ──compared: one build, all of its samples──> Combined ──┬─> train.h5, values virtual
                                                                  └─> one file, values copied

The same parts give the same file to the bit; a copy is the file that one process would write.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataloaders.cache.build.combining import Combined, MappedPart
from dataloaders.cache.build.locks import locked
from dataloaders.cache.build.parts import (
    BuildFolder,
    Part,
    complete_builds,
    remove_unfinished,
    unfinished,
)
from dataloaders.cache.format.attributes import attributes_in, differences
from dataloaders.cache.format.compress import Compressed
from dataloaders.cache.format.disk import free_bytes, size_of, sync, writing
from dataloaders.cache.format.entries import Shard
from dataloaders.cache.format.fields import Malformed
from dataloaders.cache.format.index import Index
from dataloaders.cache.format.writing import About, write_cache
from dataloaders.cache.read.columns import mapped
from dataloaders.cache.read.mapping import MappedFile
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cache.read.shards import first_of, folder_of, open_shard
from dataloaders.cache.read.verification import verify
from dataloaders.errors import CacheError

__all__ = ["Progress", "combined", "is_joined", "join", "merge"]

Progress = Callable[[int, int], None]


def join(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Index:
    """Join the parts in ``train.parts`` into one cache at ``path``, and return its index.

    Args:
        path: the path of the joined file; one that is there is replaced.
        progress: called with the bytes written so far, and those in all.

    Raises:
        CacheError: parts are missing, are of different builds, or do not fit into one cache; or
            the file at ``path`` is not a joined one.
        MissingDependency: h5py is not installed.
    """
    target = Path(os.path.realpath(path))
    parts = complete_builds(target)
    if target.exists() and not is_joined(target):
        raise CacheError(
            f"{target} exists and is not a joined cache; delete it, or give another path"
        )
    with locked(target):
        index = combined(target, parts, progress=progress)
        BuildFolder(target).keep_only(part.path.name for part in parts)
    return index


def merge(
    path: str | os.PathLike[str],
    one_file: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> Index:
    """Copy the rows of the cache at ``path`` into a cache of one file, and return its index.

    The copy takes as much disk as the cache. The cache stays as it is.

    Args:
        path: the path of the cache, with its parts beside it.
        one_file: the path of the copy, where nothing may be yet.
        progress: called with the bytes written so far, and those in all.

    Raises:
        CacheError: a part is missing or another one; the disk is too small or full; or there is a
            file at ``one_file``.
        MissingDependency: h5py is not installed.
    """
    source, target = Path(os.path.realpath(path)), Path(os.path.realpath(one_file))
    if target.exists():
        raise CacheError(f"{target} exists; delete it, or give another path")
    index = CachedDataset(source).index
    files = index.shards or [Shard(source.name, index.rows, index.samples, index.file_bytes, "")]
    parts, first = [], 0
    for file in files:
        path_of_file = source.parent / file.name
        if index.shards:
            os.close(open_shard(folder_of(source), file, source))
        parts.append(
            Part(path_of_file, range(first, first + file.samples), Index.parse(str(path_of_file)))
        )
        first += file.samples
    refuse_small_disk_for_copy(index.all_bytes, target)
    with locked(target):
        return combined(target, parts, one_file=True, progress=progress)


def refuse_small_disk_for_copy(size: int, target: Path) -> None:
    """Do nothing if there is room for so many bytes.

    Raises:
        CacheError: there is not.
    """
    free = free_bytes(target.parent)
    if size > free:
        raise CacheError(
            f"one file takes a copy of {size_of(size)}, and {size_of(free)} are free in "
            f"{target.parent}; make room, give a path on another disk, or keep the parts"
        )


def is_joined(path: Path) -> bool:
    """Whether there is a cache of several parts at ``path``."""
    try:
        return bool(Index.parse(str(path)).shards)
    except CacheError:
        return False


def combined(
    target: Path,
    parts: Sequence[Part],
    *,
    one_file: bool = False,
    progress: Progress | None = None,
) -> Index:
    """Write the cache of these parts, in their order; the lock is held.

    Args:
        target: where it then is.
        parts: in the order of their samples.
        one_file: whether it has all rows itself.
        progress: as in `join`.

    Raises:
        CacheError: as `join`.
    """
    if one_file:
        _refuse_damage(parts)
    remove_unfinished(target)
    path = unfinished(target)
    done = whole = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None and one_file:
            progress(min(done, whole), whole)

    try:
        with writing(target.parent):
            maps = _mapped(parts, target)
            about = _about(parts, maps)
            columns = Combined(maps, copied=one_file)
            whole = sum(
                extent.size * np.dtype(dtype).itemsize
                for entry in columns.entries
                for _, dtype, extent in entry.sized()
            )
            structure = next((each.index.structure for each in maps if each.index.rows), None)
            numbers = range(0 if one_file else len(columns.entries))
            write_cache(
                path,
                about,
                structure,
                columns.rows,
                columns.entries,
                columns.blocks,
                sources=None if one_file else {n: columns.sources(n) for n in numbers},
                shards=() if one_file else [_shard(each) for each in maps],
                progress=told,
            )
            path.rename(target)
            sync(target.parent)
    finally:
        path.unlink(missing_ok=True)
    return Index.parse(str(target))


def _refuse_damage(parts: Sequence[Part]) -> None:
    """Raise CacheError if a bit of a part has flipped: its copy would have a checksum that fits."""
    for part in parts:
        if damages := verify(part.path):
            raise CacheError(
                f"the part {part.path} is damaged: {damages[0].what}; delete it, and build again"
            )


def _shard(part: MappedPart) -> Shard:
    index = part.index
    return Shard(part.name, index.rows, index.samples, index.file_bytes, index.identity)


def _mapped(parts: Sequence[Part], target: Path) -> list[MappedPart]:
    """Return the parts, mapped."""
    found = []
    for part in parts:
        descriptor = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = MappedFile(part.path, descriptor, part.index.file_bytes).data
        finally:
            os.close(descriptor)
        found.append(MappedPart(os.path.relpath(part.path, target.parent), part.index, data))
    return found


def _about(parts: Sequence[Part], maps: Sequence[MappedPart]) -> About:
    first = parts[0]
    for part in parts:
        differs = _difference(first.index, part.index)
        if differs:
            raise CacheError(
                f"the parts {first.path.name} and {part.path.name} are from different builds: "
                f"{differs}; build all of them of one dataset, with the same packages"
            )
    says = _common(first.index.fingerprint)
    failed: list[tuple[int, str]] = []
    for part in parts:
        if part.index.failed is not None:
            shift = part.samples.start - first_of(part.index)
            failed += [(shift + number, text) for number, text in CachedDataset(part.path).failed]
    start = parts[0].samples.start
    samples = sum(part.index.samples for part in parts)
    if samples != says.get("length", samples):  # of one rank
        says["first"] = start
    return About(
        samples=samples,
        failed=[(number - start, text) for number, text in failed],
        fingerprint=says,
        head=first.index.head,
        tail=first.index.tail,
        compress=Compressed.like(says.get("compress")),
        attributes=_attributes(maps),
    )


def _common(fingerprint: Any) -> dict[str, Any]:
    """Return the entries that the parts of one build share."""
    return {name: each for name, each in fingerprint.items() if name not in ("first", "shard")}


def _difference(one: Index, other: Index) -> str:
    """Say what two parts were not built alike from; "" if nothing."""
    ours = {**_common(one.fingerprint), "head": list(one.head), "tail": list(one.tail)}
    theirs = {**_common(other.fingerprint), "head": list(other.head), "tail": list(other.tail)}
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            values = [str(each.get(name, "nothing"))[:200] for each in (ours, theirs)]
            return f"{name} is {values[0]} in one and {values[1]} in the other"
    return ""


def _attributes(parts: Sequence[MappedPart]) -> dict[str, Any]:
    """Return what all parts say of the dataset's classes.

    Raises:
        CacheError: one of them says something else.
    """
    texts: dict[bytes, str] = {}
    for part in parts:
        place = part.index.attributes
        text = b"" if place is None else mapped(part.data, "|u1", place).tobytes()
        texts.setdefault(text, part.name)
    said = {}
    for text, name in texts.items():
        try:
            said[name] = attributes_in(text) if text else {}
        except Malformed as error:
            raise CacheError(
                f"the part {name} is damaged: what it says of classes: {error}"
            ) from error
    (first, found), *others = said.items()
    for name, other in others:
        changed = differences(found, other)
        if changed:
            raise CacheError(
                f"the parts {first} and {name} are from different builds: {'; '.join(changed)}; "
                "build all of them of one dataset"
            )
        found = {key: value for key, value in found.items() if key in other}
    return found
