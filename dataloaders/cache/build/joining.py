"""Make one cache of its parts: a small file that names them, or one with all of their rows.

    parts ──compared: all samples, one after the other──> Combined ──┬─> train.h5, values virtual
                                                                  └─> one file, values copied

The same parts give the same file to the bit; a copy is the file that one process would write.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dataloaders.cache.build.combining import combined_table
from dataloaders.cache.build.locks import locked
from dataloaders.cache.build.parts import (
    Part,
    part_at,
    target_of,
    unfinished_at,
)
from dataloaders.cache.format.attributes import differences
from dataloaders.cache.format.compress import Compressed
from dataloaders.cache.format.disk import free_bytes, rename, size_of, writing
from dataloaders.cache.format.index import Index
from dataloaders.cache.format.writing import About, write_cache
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cache.read.shards import check_shards
from dataloaders.cache.read.verification import verify
from dataloaders.errors import CacheError

Progress = Callable[[int, int], None]


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
        CacheError: a part is missing, damaged or another one; the disk is too small or full; or
            there is a file at ``one_file``, or no folder for it.
        MissingDependency: h5py is not installed.
    """
    source, target = Path(os.path.realpath(path)), target_of(one_file)
    if target.exists():
        raise CacheError(f"{target} exists; delete it, or give another path")
    cached = CachedDataset(source)
    check_shards(source, cached.index, by_digest=True)
    parts = [part_at(path) for path in cached.shards or [source]]
    size, free = cached.index.all_bytes, free_bytes(target.parent)
    if size > free:
        raise CacheError(
            f"one file takes a copy of {size_of(size)}, and {size_of(free)} are free in "
            f"{target.parent}; make room, give a path on another disk, or keep the parts"
        )
    with locked(target):
        return combined(target, parts, one_file=True, progress=progress)


def combined(
    target: Path,
    parts: Sequence[Part],
    *,
    one_file: bool = False,
    progress: Progress | None = None,
) -> Index:
    """Write the cache of these parts, in the order of their samples; the lock is held.

    With ``one_file`` it has all rows itself; then the parts are verified first, because the copy of
    a flipped bit would have a checksum that fits.

    Raises:
        CacheError: the parts do not follow each other, are of different builds, or damaged.
    """
    for part in parts:
        if part.index.shards:
            raise CacheError(f"the part {part.path} is itself a joined cache; give its parts")
        for damage in verify(part.path) if one_file else ():
            raise CacheError(
                f"the part {part.path} is damaged: {damage.what}; delete it, and build again"
            )
    unfinished = f".{glob.escape(target.name)}.{'?' * 8}.tmp"
    for left in target.parent.glob(unfinished):  # by who was killed
        left.unlink(missing_ok=True)
    path = unfinished_at(target.with_name(f".{target.name}"))
    done = whole = 0

    def count_written(count: int) -> None:
        nonlocal done
        done = min(done + count, whole)  # zeros follow the last piece of a compressed column
        if progress and one_file:
            progress(done, whole)

    try:
        with writing(target.parent):
            opened = [CachedDataset(part.path) for part in parts]
            about = _about(parts, opened)
            table = combined_table(opened, target.parent, one_file=one_file)
            whole = sum(entry.bytes for entry in table.entries)
            write_cache(path, about, table, count_written)
            rename(path, target)
    finally:
        path.unlink(missing_ok=True)
    return Index.parse(str(target))


def _about(parts: Sequence[Part], opened: Sequence[CachedDataset]) -> About:
    first, samples, failed = parts[0], 0, list[tuple[int, str]]()
    own = ("first", "shard")  # of a part
    says = {n: each for n, each in first.index.fingerprint.items() if n not in own}
    attributes = opened[0].attributes
    for part, cached in zip(parts, opened, strict=True):
        if changed := differences(attributes, cached.attributes):
            raise CacheError(
                f"the parts {first.path.name} and {part.path.name} (now) are of other datasets: "
                f"{'; '.join(changed)}; build them again of one"
            )
        attributes = {n: each for n, each in attributes.items() if n in cached.attributes}
        if part.samples.start != first.samples.start + samples:
            raise CacheError(
                f"the part {part.path} begins with sample {part.samples.start}, and those before "
                f"it end with sample {first.samples.start + samples - 1}: they are of several "
                "builds; delete those of the old ones"
            )
        failed += [(number - first.samples.start, text) for number, text in cached.failed]
        samples += len(part.samples)
    if samples != says.get("length", samples):  # of one rank
        says["first"] = first.samples.start
    return About(
        samples=samples,
        failed=failed,
        fingerprint=says,
        head=first.index.head,
        tail=first.index.tail,
        compress=Compressed.like(says.get("compress")),
        attributes=attributes,
    )
