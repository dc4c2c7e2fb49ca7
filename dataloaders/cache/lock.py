"""One builder a folder: among processes, and among the threads of one.

The lock among processes is POSIX's, which the kernel gives back when its owner dies, however it
dies, and which forked workers do not inherit. It belongs to a process, so threads have one more;
and it is lost when its process closes the file anywhere, so nothing else here opens it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from dataloaders.errors import CacheError

__all__ = ["BuildLock", "builder_of"]

_guard = threading.Lock()
_of_threads: dict[str, threading.Lock] = {}


def _forget() -> None:
    """A forked child holds no lock, whatever threads its parent has."""
    global _guard
    _guard = threading.Lock()
    _of_threads.clear()


os.register_at_fork(after_in_child=_forget)


class BuildLock:
    """The right to write in ``folder``, which it makes if need be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        with _guard:
            self._threads = _of_threads.setdefault(os.path.realpath(folder), threading.Lock())

    def try_acquire(self) -> bool:
        """Whether it is now ours; does not wait.

        Raises:
            CacheError: the file system has no locks.
        """
        if not self._threads.acquire(blocking=False):
            return False
        try:
            self._file = self._opened()
        finally:
            if self._file < 0:
                self._threads.release()
        if self._file < 0:
            return False
        try:
            (self._folder / "builder").write_text(f"{os.getpid()} {socket.gethostname()}\n")
        except OSError:
            pass  # a full disk; it only tells others who builds
        return True

    def release(self, *, remove: bool = False) -> None:
        """Let others have it; ``remove`` the folder first, which must hold nothing else by now."""
        if remove:
            for name in ("builder", "lock"):
                (self._folder / name).unlink(missing_ok=True)
            try:
                self._folder.rmdir()
            except OSError:
                pass  # somebody who waits has just made the files anew
        os.close(self._file)
        self._file = -1
        self._threads.release()

    def _opened(self) -> int:
        """The locked file, or -1 if another process has it."""
        path = self._folder / "lock"
        while True:
            made = False
            try:
                # Not exist_ok=True: it looks again, and may miss it.
                with suppress(FileExistsError):
                    self._folder.mkdir()
                made = True
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                linked = os.path.islink(self._folder) or os.path.islink(path)
                if made and isinstance(error, FileNotFoundError) and not linked:
                    continue  # its last owner removed the folder in between
                raise CacheError(
                    f"{self._folder} cannot be made or written to ({error.strerror}), and a build "
                    "keeps there what it has so far; give a path in a folder that can be written to"
                ) from error
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file, path):
                    return file
                os.close(file)  # locked what its last owner had removed
            except OSError as error:
                os.close(file)
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    return -1
                raise CacheError(
                    f"{path} cannot be locked ({error.strerror}): a cache is built where files "
                    "can be locked; build it on a local disk and move the finished file"
                ) from error


def builder_of(folder: Path) -> str:
    """Who builds in ``folder``, in words."""
    try:
        pid, host = (folder / "builder").read_text().split()
    except (OSError, ValueError):
        return "another process"
    if host == socket.gethostname():
        return "another thread" if int(pid) == os.getpid() else f"process {pid}"
    return f"process {pid} on {host}"


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
