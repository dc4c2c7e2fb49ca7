"""One builder a cache: among processes, and among the threads of one, by `filelock`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from dataloaders.errors import CacheError
from dataloaders.options import option

_POLL_S = 0.1


@contextmanager
def locked(
    target: Path, rank: str = "", *, waiting: Callable[[float], None] | None = None
) -> Iterator[None]:
    """Hold the lock of the cache at ``target`` inside the block.

    The lock file stays when the block is left: to delete it would let two others lock two files.
    Each ``rank`` has a lock of its own. ``waiting`` is called now and then, with the seconds so
    far, while another holder has it.

    Raises:
        CacheError: another holder has it, and ``waiting`` is None; or the file system has no locks.
    """
    path = target.with_name(f".{target.name}{rank and '.' + rank}.lock")
    lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    started = time.monotonic()
    while True:
        try:
            lock.acquire()
            break
        except Timeout:
            if waiting is None:
                raise CacheError(
                    f"{target} is being built by another process or thread "
                    f"({option('wait', False)}); wait for it, or give another path"
                ) from None
            waiting(time.monotonic() - started)
            time.sleep(_POLL_S)
        except OSError as error:
            raise CacheError(
                f"{path} cannot be made or locked ({error.strerror}): a cache is built where files "
                "can be written and locked; give a path on such a disk, and move the finished files"
            ) from error
    try:
        yield
    finally:
        lock.release()
