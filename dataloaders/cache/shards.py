"""The files of a cache that many machines build: their names, their ranges, and opening them.

    train.h5                    joins them: what each is, and where its rows come
    train.00000-of-00003.h5     samples 0 to 9 of 30, a cache by itself
    train.00001-of-00003.h5     samples 10 to 19
    train.00002-of-00003.h5     samples 20 to 29

A joined file names its shards, which stand beside it, by the digest of all that is in them. One
that is missing, cut short or another one is an error here; HDF5 would read zeros.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from dataloaders.cache.block import digest_at
from dataloaders.cache.entries import MOST_SHARDS, Shard, is_shard_name
from dataloaders.cache.index import Index
from dataloaders.errors import CacheError, OptionError

__all__ = [
    "check_shard",
    "check_shards",
    "first_of",
    "folder_of",
    "listed",
    "names_of",
    "open_beside",
    "open_shard",
    "range_of",
    "shard_path",
    "shard_text",
    "shards_beside",
]

_DIGITS = 5
_LONGEST = 1 << 48  # samples of a dataset


def check_shard(shard: object) -> None:
    """Nothing, if ``shard`` is a rank and how many there are.

    Raises:
        OptionError: it is something else.
    """
    if (
        not isinstance(shard, tuple)
        or len(shard) != 2
        or not all(isinstance(each, int) and not isinstance(each, bool) for each in shard)
        or not 0 <= shard[0] < shard[1] <= MOST_SHARDS
    ):
        raise OptionError(
            f"shard={shard!r}: it must be None or (rank, of), such as (3, 8): the shard of this "
            f"process, counted from 0, and how many there are, up to {MOST_SHARDS}"
        )


def range_of(rank: int, of: int, samples: int) -> range:
    """The samples of shard ``rank``: the dataset cut into ``of`` parts, equal but for one."""
    return range(rank * samples // of, (rank + 1) * samples // of)


def shard_text(rank: int, of: int) -> str:
    """What the fingerprint of a shard says it is."""
    return f"{rank} of {of}"


def first_of(index: Index) -> int:
    """The number in the dataset of the first sample of a shard; 0 in any other cache."""
    text, length = index.fingerprint.get("shard"), index.fingerprint.get("length")
    found = re.fullmatch(r"(\d{1,5}) of (\d{1,5})", text, re.ASCII) if type(text) is str else None
    if found is None or type(length) is not int or not 0 <= length <= _LONGEST:
        return 0
    rank, of = map(int, found.groups())
    return range_of(rank, of, length).start if rank < of else 0


def shard_path(path: Path, rank: int, of: int) -> Path:
    """Where shard ``rank`` of the joined cache at ``path`` stands.

    Raises:
        CacheError: no file beside ``path`` can have such a name.
    """
    numbers = f"{rank:0{_DIGITS}d}-of-{of:0{_DIGITS}d}"
    name = f"{path.stem}.{numbers}{path.suffix}"
    if not is_shard_name(name):
        raise CacheError(
            f"the shards of {str(path)!r} would be named like {name!r}, which has unprintable "
            "characters, a backslash, or more than 255 bytes; give another path"
        )
    return path.with_name(name)


def names_of(path: Path, of: int) -> list[str]:
    """The names of all shards of ``path``, in order."""
    return [shard_path(path, rank, of).name for rank in range(of)]


def shards_beside(path: Path) -> list[Path]:
    """The shards that stand beside ``path``, in order.

    Raises:
        CacheError: there are none, some are missing, or they are of several builds.
    """
    pattern = re.compile(
        rf"{re.escape(path.stem)}\.(\d{{{_DIGITS},}})-of-(\d{{{_DIGITS},}}){re.escape(path.suffix)}"
    )
    found: dict[int, int] = {}
    try:
        names = os.listdir(path.parent)
    except OSError as error:
        raise CacheError(f"{path.parent} cannot be read: {error.strerror}") from error
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            of = int(match[2])
            found[of] = found.get(of, 0) + 1
    if not found:
        raise CacheError(
            f"there is no shard of {path}; they are named like "
            f"{shard_path(path, 0, 8).name}, and built by precompute(..., shard=(0, 8))"
        )
    if len(found) > 1:
        told = " and ".join(f"{count} of {of}" for of, count in sorted(found.items()))
        raise CacheError(
            f"beside {path} are shards of several builds: {told}; delete those of the old one"
        )
    (of,) = found
    if of > MOST_SHARDS:
        raise CacheError(f"{path} has {of} shards, and {MOST_SHARDS} is the most; use fewer ranks")
    paths = [path.with_name(name) for name in names_of(path, of)]
    missing = [each.name for each in paths if not os.path.lexists(each)]
    if missing:
        raise CacheError(
            f"of the {of} shards of {path} are missing {listed(missing)}; copy them there, or "
            "build them"
        )
    return paths


def listed(names: list[str]) -> str:
    """``a, b, c and 5 more``."""
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def check_shards(path: Path, index: Index) -> None:
    """Look at each shard of the joined cache at ``path``: its size and the digest in its head.

    Raises:
        CacheError: one is missing, or not the one that was joined; the message names it.
    """
    folder = folder_of(path)
    for shard in index.shards:
        os.close(open_shard(folder, shard, path))


def folder_of(path: Path) -> Path:
    """Where the shards of ``path`` stand: beside the file itself, should it be a link to it."""
    return Path(os.path.realpath(path)).parent


def open_shard(folder: Path, shard: Shard, joined: Path) -> int:
    """A descriptor of ``shard``, whose size and digest are what the joined cache says.

    Raises:
        CacheError: there is none, or it is another one.
    """
    path = folder / shard.name
    where = f"shard {shard.name} of the cache {joined}"
    descriptor = open_beside(path, where)
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
        f"{where} {what}; copy the right file there again, delete it and run the build again (only "
        f"it is built), or join the shards that are there: dataloaders cache join {joined.name}"
    )


def open_beside(path: Path, where: str) -> int:
    """A descriptor of the shard at ``path``, which may not lead into another folder.

    Raises:
        CacheError: it cannot be opened; ``where`` says what it is.
    """
    # Not blocking, so that a named pipe is an error and not a wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        try:
            return os.open(path, flags)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        target = Path(os.path.realpath(path))
        if target.parent != path.parent:
            raise CacheError(
                f"{where} is a symbolic link to another folder ({target}), which is not followed: "
                "a cache from somebody else could point anywhere; put the file itself there"
            )
        return os.open(target, flags)
    except FileNotFoundError as error:
        raise CacheError(
            f"{where} is missing: {path} does not exist; copy it there, or run the build again: "
            "only what is missing is built"
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CacheError(f"{where} cannot be opened: {reason}") from error
