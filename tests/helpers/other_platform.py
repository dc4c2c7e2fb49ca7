"""Take from this process what Windows or macOS lack, as far as Linux can simulate that.

A program imports this first, and so do its spawned workers. torch, psutil and parts of Python are
imported before, because they choose their code by platform: they stay as on Linux, and so do files
and torch's ways to start workers and to share memory.
"""

from __future__ import annotations

import builtins
import importlib
import io
import mmap
import multiprocessing.popen_fork
import multiprocessing.popen_spawn_posix
import multiprocessing.resource_sharer
import multiprocessing.synchronize
import os
import signal
import sys
import types
from typing import Any

import psutil

__all__ = ["become"]

_AS_THEY_ARE = ("concurrent.futures", "logging.handlers", "rich.console", "torch.utils.data")
_MODULES = {"win32": ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp"), "darwin": ()}
_MISSING = {
    "win32": (
        "sysconf getloadavg sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate "
        "register_at_fork fork pread preadv pwrite pwritev statvfs fstatvfs getuid geteuid uname "
        "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK"
    ),
    "darwin": "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate",
}
_NO_FILES = ("/proc", "/sys", "/dev/shm")


class _WindowsMap(mmap.mmap):
    """A map as Windows has it: without flags and advice."""

    def __new__(cls, fileno: int, length: int, access: int = 0, offset: int = 0) -> Any:
        return super().__new__(cls, fileno, length, access=access, offset=offset)

    @property
    def madvise(self) -> Any:
        raise AttributeError("madvise")


def become(platform: str) -> None:
    """Make this process lack what ``platform`` ("win32" or "darwin") lacks."""
    for module in _AS_THEY_ARE:
        importlib.import_module(module)
    # Its way to send a semaphore to a spawned worker is this system's.
    multiprocessing.synchronize.sys = types.SimpleNamespace(**vars(sys))  # type: ignore[attr-defined]
    sys.platform = platform
    for module in _MODULES[platform]:
        sys.modules[module] = None  # type: ignore[assignment]  # importing it is an ImportError
    for name in _MISSING[platform].split():
        delattr(os, name)
    advice = [name for name in vars(mmap) if name.startswith(("MAP_", "MADV_", "PROT_"))]
    for name in advice:
        if platform == "win32" or name in ("MADV_HUGEPAGE", "MADV_POPULATE_READ", "MAP_POPULATE"):
            delattr(mmap, name)
    if platform == "win32":
        mmap.mmap = _WindowsMap  # type: ignore[misc]
        for name in ("SIGKILL", "SIGBUS", "SIGALRM", "SIGUSR1"):
            delattr(signal, name)
    opened = io.open
    for module in (psutil, psutil._common, psutil._psplatform):
        module.open = opened  # type: ignore[attr-defined]  # it has ways of its own elsewhere

    def without(file: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(file, int) and os.fspath(file).startswith(_NO_FILES):
            raise FileNotFoundError(2, "No such file or directory", file)
        return opened(file, *arguments, **options)

    io.open = without
    builtins.open = without
    if hasattr(os, "statvfs"):
        looked = os.statvfs

        def statvfs(path: Any) -> Any:
            if os.fspath(path).startswith(_NO_FILES):
                raise FileNotFoundError(2, "No such file or directory", path)
            return looked(path)

        os.statvfs = statvfs
