"""Read files ahead into the page cache, ask what is in it, and drop files from it.

    will_read(values)      start reading the pages under a mapped array, without waiting
    map_file(file, size)   a file as an array, without keeping a descriptor
    is_cut_short(values)   whether the file of such an array ends before its last page
    expect_exactly(values) have a missing page of such an array read alone
    DiskWatch              whether this process read from a disk lately, so that asking ahead pays
    resident_pages(path)   the pages of a file that are in memory now (mincore)
    evict(path)            unmap a file's pages in this process, and drop them

All processes that read a file share its pages: pages that one of them requests are there for all.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

if sys.platform != "win32":
    import resource

# Linux silently shortens a request for more than the device's readahead. 128 KiB is the default,
# and few devices have less.
_REQUEST = 128 << 10
_STAYS = 64  # looks for which a read from disk is remembered
_MOST = 1 << 30  # bytes a call: offsets in a file may be arbitrary
_POPULATE_READ = 22  # MADV_POPULATE_READ, which Python does not name
_WILLNEED = getattr(mmap, "MADV_WILLNEED", None)


def will_read(values: npt.NDArray[Any]) -> None:
    """Have the kernel start to read the pages under ``values``, one range of a mapped file.

    This is advice: without support nothing happens, and pages for which there is no room, or beyond
    1 GiB, are not read.
    """
    if _WILLNEED is None or not values.nbytes:
        return
    address = int(values.__array_interface__["data"][0])
    begin, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + min(values.nbytes, _MOST)
    madvise = _libc().madvise
    for at in range(begin, end, _REQUEST):
        # ctypes lets other threads run meanwhile; mmap.madvise does not.
        madvise(at, min(_REQUEST, end - at), _WILLNEED)


class _Map:
    """Pages of a file in memory; NumPy reads `__array_interface__`, and keeps it alive."""

    def __init__(self, descriptor: int, size: int) -> None:
        libc = _libc()
        self._address, self._size, self._unmap = 0, size, libc.munmap
        found = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._address = found
        interface = {"shape": (size,), "typestr": "|u1", "data": (found, True), "version": 3}
        self.__array_interface__ = interface

    def __del__(self) -> None:
        if self._address:
            self._unmap(self._address, self._size)


def map_file(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the first ``size`` bytes of an open file as a read-only view of its pages.

    mmap.mmap keeps a duplicate of the descriptor (before Python 3.13 always), and a process may
    have 1,024 by default: fewer than a large cache has files.

    Raises:
        OSError: the file cannot be mapped.
    """
    return np.asarray(_Map(descriptor, size))


def is_cut_short(values: npt.NDArray[np.uint8]) -> bool:
    """Return whether the last page of a mapped file lies behind its end: reading it is a SIGBUS.

    False if the kernel, before Linux 5.14, cannot say so.
    """
    address = int(values.__array_interface__["data"][0])
    last = (address + values.nbytes - 1) // mmap.PAGESIZE * mmap.PAGESIZE
    failed = _libc().madvise(last, mmap.PAGESIZE, _POPULATE_READ)
    return bool(failed) and ctypes.get_errno() == errno.EFAULT


def expect_exactly(values: npt.NDArray[np.uint8], exactly: bool) -> None:
    """Set whether a missing page of a mapped file is read alone, or with its neighbours as usual.

    Read pages alone where `will_read` requests what is needed: the few pages that are missed would
    otherwise bring in so much that a small page cache drops what was requested.
    """
    advice = getattr(mmap, "MADV_RANDOM" if exactly else "MADV_NORMAL", None)
    if advice is not None:
        _libc().madvise(values.__array_interface__["data"][0], values.nbytes, advice)


def tells_truth(path: str | os.PathLike[str]) -> bool:
    """Whether the kernel says which pages of this file are in memory.

    Since Linux 5.2 it reports all pages as present if the process neither owns nor may write the
    file.
    """
    if sys.platform != "linux":
        return False
    return os.stat(path).st_uid == os.geteuid() or os.access(path, os.W_OK)


class DiskWatch:
    """Watch whether this process read from a disk lately, by its page faults and blocks read.

    Requesting pages that are in memory costs up to a quarter of copying them; requesting those that
    are not saves most of the wait. One look costs a microsecond.
    """

    def __init__(self) -> None:
        self._seen = (-1, -1)  # the first read may well need the disk
        self._left = 0

    def reads(self) -> bool:
        """Whether anything came from a disk since the last look, or before one of the last 64."""
        if sys.platform == "win32":
            return False
        usage = resource.getrusage(resource.RUSAGE_SELF)
        # What is requested in time causes no fault, but it counts as blocks read, so this stays
        # True.
        seen = usage.ru_majflt, usage.ru_inblock
        if seen != self._seen:
            self._seen, self._left = seen, _STAYS
        elif self._left:
            self._left -= 1
        return self._left > 0


def resident_pages(path: str | os.PathLike[str]) -> npt.NDArray[np.bool_]:
    """Return for each page of the file whether it is in memory. Linux only, if it `tells_truth`.

    Raises:
        OSError: there is no such file, or this is not Linux.
    """
    _refuse_other_systems()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return np.zeros(0, np.bool_)
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as memory:
            data = np.frombuffer(memory, np.uint8)  # taking its address touches no page
            flags = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
            failed = _libc().mincore(data.ctypes.data, size, flags.ctypes.data)
            del data  # it would keep the map from being closed
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(path))
    return (flags & 1).astype(np.bool_)


def evict(path: str | os.PathLike[str], parts: Iterable[tuple[int, int]] = ((0, 0),)) -> None:
    """Drop the file, or parts of it (first byte, length), from the page cache. Linux only.

    Pages that are not yet on disk stay, and so do those that other processes have mapped;
    `resident_pages` shows whether it succeeded. Shared maps of the file in this process stay valid
    and are read from disk again on their next use.

    Raises:
        OSError: there is no such file, or this is not Linux.
    """
    _refuse_other_systems()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        maps = list(_maps_here(os.fstat(descriptor).st_ino, os.path.realpath(path)))
        for address, length in maps:
            _libc().madvise(address, length, mmap.MADV_DONTNEED)
        for first, length in parts:
            os.posix_fadvise(descriptor, first, length, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _maps_here(inode: int, path: str) -> Iterator[tuple[int, int]]:
    """Yield where this process has the file mapped: address and length."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        # 7f2c4c000000-7f2c4c021000 r--s 00000000 fe:00 1234    /path of the file
        words = line.split(maxsplit=5)
        if len(words) < 6 or words[4] != str(inode) or words[5] != path or words[1][3] != "s":
            continue  # a private map may hold changes that are nowhere else
        begin, end = (int(word, 16) for word in words[0].split("-"))
        yield begin, end - begin


def _refuse_other_systems() -> None:
    if sys.platform != "linux":
        raise OSError(
            f"only Linux reports which pages of a file are in memory; this is {sys.platform}, "
            "which has no /proc/self/maps and no posix_fadvise"
        )


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.mmap.restype = ctypes.c_void_p
    return libc
