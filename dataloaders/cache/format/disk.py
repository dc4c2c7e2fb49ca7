"""Room on the disk, and what is said when there is none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dataloaders.errors import CacheError

__all__ = ["free_bytes", "size_of", "sync", "write_all", "writing"]

_MOST_PIECES = 1024  # that the system takes at once
# For more the system takes larger pages, which in a virtual machine may be new to the host: up to
# four times as slow. Less is slower, too.
_MOST_BYTES = 1 << 20


def free_bytes(folder: str | Path) -> int:
    """Bytes that this user can still write on the file system of ``folder``."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


class writing:
    """Turn the system's errors into a `CacheError` with the room that there is; again and again.

    Only around writes: a sample's own OSError is the sample's.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        try:
            room = f"{size_of(free_bytes(self._folder))} are free there"
        except OSError:
            room = "the folder is gone"
        raise CacheError(
            f"writing in {self._folder} failed: {error.strerror or error}; {room}. What was "
            "finished is kept: make room, then start it again with the same arguments to go "
            "on"
        ) from error


def sync(path: Path) -> None:
    """Have the contents of a file, or the names in a folder, survive a power loss."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_all(descriptor: int, offset: int, *pieces: bytes | memoryview) -> None:
    """Put all of these, one behind the other, at this byte of an open file.

    The system may take it in parts.
    """
    left = list(pieces)
    while left:
        now = _first_of(left)
        count = os.pwritev(descriptor, now, offset)
        offset += count
        done = 0
        while done < len(now) and count >= len(left[done]):
            count -= len(left[done])
            done += 1
        del left[:done]
        if count:
            left[0] = memoryview(left[0])[count:]


def _first_of(pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """What is written first."""
    found, room = list[bytes | memoryview](), _MOST_BYTES
    for piece in pieces[:_MOST_PIECES]:
        if len(piece) >= room:
            return [*found, memoryview(piece)[:room]]
        found.append(piece)
        room -= len(piece)
    return found


def size_of(count: float) -> str:
    """``3.2 GiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"
