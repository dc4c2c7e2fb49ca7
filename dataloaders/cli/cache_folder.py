"""Caches that ``backend="h5"`` built without being given a path: listed, and deleted."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dataloaders.cache.build.locks import Busy, locked
from dataloaders.cache.format.block import parts_folder
from dataloaders.cache.format.disk import size_of
from dataloaders.cache.format.index import Index
from dataloaders.cache.printable import printable
from dataloaders.cli.table import table
from dataloaders.errors import CacheError
from dataloaders.tuning.learned import cache_folder

__all__ = ["prune", "show"]

_DAY_S = 86_400.0


class _Kept(NamedTuple):
    """A cache, or a build that was not finished: a file, its folder of parts, or both."""

    path: Path
    size: int
    unused_days: float
    what: str


def show() -> int:
    """Print the caches in the user's folder, those that were never finished included."""
    caches = _caches()
    if not caches:
        print(f"no caches in {_folder()}")
        return 0
    rows = [
        [printable(c.path.name, 200), size_of(c.size), f"{c.unused_days:.0f} days ago", c.what]
        for c in caches
    ]
    print(table(["cache", "size", "last used", "what"], rows))
    print(f"in {_folder()}")
    return 0


def prune(unused_days: float, *, delete: bool) -> int:
    """Delete what was not used for so long, or say what would be deleted."""
    old = [cache for cache in _caches() if cache.unused_days >= unused_days]
    for cache in old:
        did = _delete(cache.path) if delete else "would delete"
        print(f"{did} {cache.path} ({size_of(cache.size)})")
    if not old:
        print(f"nothing in {_folder()} was unused for {unused_days:g} days")
    elif not delete:
        print("give --yes to delete them")
    return 0


def _delete(path: Path) -> str:
    """Delete it, unless somebody builds it, and say so."""
    try:
        with locked(path):
            path.unlink(missing_ok=True)
            parts = parts_folder(path)
            if parts.is_symlink():
                parts.unlink()
            elif parts.exists():
                shutil.rmtree(parts)
    except Busy:
        return "kept, since somebody builds it:"
    except OSError as error:
        return f"kept, since it cannot be deleted ({error.strerror}):"
    return "deleted"


def _folder() -> Path:
    return cache_folder() / "h5"


def _caches() -> list[_Kept]:
    try:
        paths = list(_folder().iterdir())
    except OSError:
        return []
    names = {p.with_suffix(".h5") for p in paths if p.suffix in (".h5", ".parts")}
    now = time.time()
    caches = []
    for path in sorted(names):
        if path.is_dir():  # a folder of that name is not ours
            continue
        files = [path, *parts_folder(path).glob("*")]
        stats = []
        for file in [*files, parts_folder(path)] if len(files) == 1 else files:
            with suppress(OSError):  # builders rename and remove their files meanwhile
                stats.append(file.stat() if file.exists() else file.lstat())
        used = max((max(each.st_atime, each.st_mtime) for each in stats), default=now)
        size = sum(each.st_size for each in stats)
        caches.append(_Kept(path, size, (now - used) / _DAY_S, _described(path)))
    return caches


def _described(path: Path) -> str:
    """Return what the file says of itself; or why it cannot be read."""
    if not os.path.lexists(path):
        return "a build that is under way, or was interrupted"
    try:
        # Looking at it is not using it; only its owner, or root, may look like that.
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NOATIME", 0))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    try:
        index = Index.parse(file)
    except CacheError as error:
        return f"damaged: {error}"
    finally:
        os.close(file)
    parts = f" in {len(index.shards)} parts" if index.shards else ""
    dataset = printable(str(index.fingerprint.get("dataset", "a dataset")), 200)
    return f"{index.rows:,} samples{parts} of {dataset}"
