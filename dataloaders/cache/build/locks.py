"""One builder a cache: among processes, and among the threads of one, by `filelock`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dataloaders.errors import CacheError

_POLL_S = 0.1


class Busy(CacheError):
    """Somebody else builds."""


@contextmanager
def locked(
    target: Path, rank: str = "", *, waiting: Callable[[float], None] | None = None
) -> Iterator[None]:
    """Hold the lock of the cache at ``target`` inside the block.

    The lock file stays when the block is left: to delete it would let two others lock two files.

    Args:
        target: of the cache.
        rank: which of several locks, each of one rank.
        waiting: called now and then, with the seconds so far, while somebody else has it; None: it
            is not waited for.

    Raises:
        Busy: somebody has it, and it is not to be waited for.
        CacheError: the file system has no locks.
    """
    path = lock_path(target, rank)
    lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    started = time.monotonic()
    while True:
        try:
            lock.acquire()
            break
        except Timeout:
            if waiting is None:
                raise Busy(
                    f"{target} is being built by {builder_of(path)} (wait=False, "
                    "--no-wait); wait for it, or give another path"
                ) from None
            waiting(time.monotonic() - started)
            time.sleep(_POLL_S)
        except OSError as error:
            raise CacheError(
                f"{path} cannot be made or locked ({error.strerror}): a cache is built where files "
                "can be written and locked; give a path on such a disk, and move the finished files"
            ) from error
    try:
        with suppress(OSError):  # a full disk; it only tells others who builds
            path.write_text(f"{os.getpid()} {socket.gethostname()}\n")
        yield
    finally:
        lock.release()


def lock_path(target: Path, rank: str = "") -> Path:
    """Return the lock file of the cache at ``target``."""
    return target.with_name(f".{target.name}{rank and '.' + rank}.lock")


def builder_of(path: Path) -> str:
    """Say who has locked this file."""
    try:
        pid, host = path.read_text().split()
    except (OSError, ValueError):
        return "another process"
    if host == socket.gethostname():
        return "another thread" if int(pid) == os.getpid() else f"process {pid}"
    return f"process {pid} on {host}"
