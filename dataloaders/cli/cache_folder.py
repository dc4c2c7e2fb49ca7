"""Caches that ``backend="h5"`` built without being given a path: listed, and deleted."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dataloaders.cache.build.locks import Busy, locked
from dataloaders.cache.format.disk import size_of
from dataloaders.cache.format.index import Index
from dataloaders.cache.printable import printable
from dataloaders.cli.table import table
from dataloaders.errors import CacheError
from dataloaders.tuning.learned import cache_folder

__all__ = ["prune", "show"]

_DAY_S = 86_400.0


class _Kept(NamedTuple):
    path: Path
    size: int
    unused_days: float
    what: str
    shards: tuple[Path, ...] = ()


def show() -> int:
    """Print the caches in the user's folder, those that were never finished included."""
    folder, found = _folder(), _found()
    if not found:
        print(f"no caches in {folder}")
        return 0
    rows = [
        [
            printable(kept.path.name, 200),
            size_of(kept.size),
            f"{kept.unused_days:.0f} days ago",
            kept.what,
        ]
        for kept in found
    ]
    print(table(["cache", "size", "last used", "what"], rows))
    print(f"in {folder}")
    return 0


def prune(unused_days: float, *, delete: bool) -> int:
    """Delete what was not used for so long, or say what would be deleted."""
    old = [kept for kept in _found() if kept.unused_days >= unused_days]
    for kept in old:
        did = _deleted(kept) if delete else "would delete"
        print(f"{did} {kept.path} ({size_of(kept.size)})")
    if not old:
        print(f"nothing in {_folder()} was unused for {unused_days:g} days")
    elif not delete:
        print("give --yes to delete them")
    return 0


def _deleted(kept: _Kept) -> str:
    """Delete it, unless somebody builds it, and say so."""
    try:
        if not kept.path.is_dir() or kept.path.is_symlink():
            for path in (kept.path, *kept.shards):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # there is none, or something else is in it
                kept.path.with_suffix(".parts").rmdir()
            return "deleted"
        with locked(kept.path.with_suffix(".h5")):
            shutil.rmtree(kept.path)
    except Busy:
        return "kept, since somebody builds it:"
    except OSError as error:
        return f"kept, since it cannot be deleted ({error.strerror}):"
    return "deleted"


def _folder() -> Path:
    return cache_folder() / "h5"


def _found() -> list[_Kept]:
    try:
        paths = sorted(_folder().iterdir())
    except OSError:
        return []
    now = time.time()
    found = []
    indexes = {path: _index_of(path) for path in paths if path.suffix == ".h5"}
    joined = {path: _shards_of(path, index) for path, index in indexes.items()}
    of_others = {shard for shards in joined.values() for shard in shards}
    of_others |= {path.with_suffix(".parts") for path, shards in joined.items() if shards}
    for path in paths:
        if path in of_others:  # counted, used and deleted with the file that joins them
            continue
        if path.suffix == ".parts":
            files = _stats(path.glob("*"))
            times = [each.st_mtime for each in files or _stats([path])]
            what = "a build that is under way, or was interrupted"
        elif path.suffix == ".h5" and not path.is_dir():  # a folder of that name is not ours
            files = _stats((path, *joined.get(path, ())))
            times = [max(each.st_atime, each.st_mtime) for each in files]
            what = _described(indexes[path])
        else:
            continue
        size = sum(each.st_size for each in files)
        unused = (now - max(times, default=now)) / _DAY_S
        found.append(_Kept(path, size, unused, what, joined.get(path, ())))
    return found


def _stats(paths: Iterable[Path]) -> list[os.stat_result]:
    """Of those that are still there: builders rename and remove their files meanwhile."""
    found = []
    for path in paths:
        with suppress(OSError):
            found.append(path.stat() if path.exists() else path.lstat())
    return found


def _shards_of(path: Path, index: Index | str) -> tuple[Path, ...]:
    """The parts that go with this file; only those that have its own name."""
    if isinstance(index, str):
        return ()
    found = [path.parent / shard.name for shard in index.shards]
    own = (path.with_suffix(".parts").name, path.parent.name)
    stem = f"{path.stem}."
    return tuple(
        each
        for each in found
        if each.parent.name == own[0] or (each.parent == path.parent and each.name.startswith(stem))
        if each.exists()
    )


def _index_of(path: Path) -> Index | str:
    """What the file says of itself; or why it cannot be read."""
    try:
        # Looking at it is not using it; only its owner, or root, may look like that.
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NOATIME", 0))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    try:
        return Index.parse(file)
    except CacheError as error:
        return f"damaged: {error}"
    finally:
        os.close(file)


def _described(index: Index | str) -> str:
    if isinstance(index, str):
        return index
    shards = f" in {len(index.shards)} shards" if index.shards else ""
    dataset = printable(str(index.fingerprint.get("dataset", "a dataset")), 200)
    return f"{index.rows:,} samples{shards} of {dataset}"
