"""Open the parts (shards) that a cache names, each by the digest of its contents.

They are in a folder beside the cache, or in version 3 of the format beside it. A part that is
missing, cut short or another file is an error here; HDF5 would read zeros.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from dataloaders.cache.format.block import digest_at
from dataloaders.cache.format.entries import Shard
from dataloaders.cache.format.fields import LARGEST
from dataloaders.cache.format.index import Index
from dataloaders.errors import CacheError


def first_of(index: Index) -> int:
    """Return the number in the dataset of the first sample of a part; 0 in any other cache."""
    built = index.fingerprint
    first, length = built.get("first"), built.get("length")
    if type(first) is int and 0 <= first <= LARGEST:
        return first
    # Of version 3: "3 of 8".
    found = re.fullmatch(r"(\d{1,5}) of (\d{1,5})", str(built.get("shard")), re.ASCII)
    if found is None or type(length) is not int or not 0 <= length <= LARGEST:
        return 0
    rank, of = map(int, found.groups())
    return rank * length // of if rank < of else 0


def check_shards(path: Path, index: Index, *, by_digest: bool = False) -> None:
    """Raise a CacheError unless each part of the cache at ``path`` is there, with all its bytes.

    Only the first part is opened, and any that looks wrong. Another file of the same size is
    noticed by `open_shard`, when it is read; ``by_digest``, which opens all, here.
    """
    if not index.shards:
        return
    folder = folder_of(path)
    for number, shard in enumerate(index.shards):
        with suppress(OSError, ValueError):
            status = os.lstat(f"{folder}/{shard.name}")  # making a Path takes longer than this
            is_like = stat.S_ISREG(status.st_mode) and status.st_size == shard.file_bytes
            if number and is_like and not by_digest:
                continue
        os.close(open_shard(folder, shard, path))


def folder_of(path: Path) -> Path:
    """Return the folder in which ``path`` names its parts: that of the file, if it is a link."""
    return Path(os.path.realpath(path)).parent


def open_shard(folder: Path, shard: Shard, joined: Path) -> int:
    """Return a descriptor of ``shard``, with the size and digest that the cache has for it."""
    path, where = folder / shard.name, f"shard {shard.name} of the cache {joined}"
    try:
        target = Path(os.path.realpath(path))
        if target.parent != path.parent:
            raise CacheError(
                f"{where} is a symbolic link to another folder ({target}), which is not followed: "
                "a cache from somebody else could point anywhere; put the file itself there"
            )
        # Not blocking, so that a named pipe is an error and not a wait for its writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(target, flags)
    except FileNotFoundError as error:
        raise CacheError(
            f"{where} is missing: {path} does not exist; copy it there, or run the build again: "
            "only what is missing is built"
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CacheError(f"{where} cannot be opened: {reason}") from error
    try:
        size, digest = os.fstat(descriptor).st_size, digest_at(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise CacheError(f"{where} cannot be read: {error.strerror}") from error
    if size == shard.file_bytes and digest == shard.identity:
        return descriptor
    os.close(descriptor)
    if not digest:
        what = "is no finished cache"
    elif digest == shard.identity:
        what = f"has {size} bytes, and had {shard.file_bytes} when it was joined"
    else:
        what = "is not the one that was joined: it was swapped, replaced or rebuilt"
    raise CacheError(
        f"{where} {what}; copy the right file there again, or delete it and run the build again: "
        "only it is built"
    )
