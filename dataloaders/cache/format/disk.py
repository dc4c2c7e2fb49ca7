"""Files on the disk: opened, synced, renamed; room, and what is said when there is none."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataloaders.errors import CacheError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_bytes(folder: str | Path) -> int:
    """Return the bytes that this user can still write on the file system of ``folder``."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


@contextmanager
def writing(folder: str | Path) -> Iterator[None]:
    """Turn the system's errors while writing into a `CacheError` with the room that there is."""
    try:
        yield
    except OSError as error:
        try:
            room = f"{size_of(free_bytes(folder))} are free there"
        except OSError:
            room = "the folder is gone"
        first = "make room, then " if error.errno in _FULL else ""
        raise CacheError(
            f"writing in {folder} failed: {error.strerror or error}; {room}. What was finished is "
            f"kept: {first}start it again with the same arguments to go on"
        ) from error


def open_plain(path: str | Path, instead: str) -> int:
    """Return a descriptor for reading a plain file: to open a named pipe may wait for its writer.

    Raises:
        CacheError: there is something else, which ``instead`` says how to avoid.
        OSError: as of ``os.open``.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no plain file"
        raise CacheError(f"{path} is {what}; {instead}")
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def sync(path: Path) -> None:
    """Have the contents of a file, or the names in a folder, survive a power loss."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def rename(written: Path, target: Path) -> None:
    """Give a finished file its name: whenever power is lost, ``target`` is old or new, and whole.

    Raises:
        CacheError: as in `writing`.
    """
    with writing(target.parent):
        sync(written)
        written.rename(target)
        sync(target.parent)


def size_of(count: float) -> str:
    """Return ``3.2 GiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"
