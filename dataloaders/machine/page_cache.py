"""What the kernel keeps of a file in memory: asked for ahead, looked at, and dropped.

    will_read(values)      the pages under a mapped array: reading them begins, nobody waits
    expect_exactly(map)    a page that is missing is read alone
    DiskWatch              did this process go to a disk lately? then it pays to ask ahead
    resident_pages(path)   which pages of a file are in memory now (mincore)
    evict(path)            out of memory with them: unmapped here, then dropped

The pages of a file are shared by all processes that read it: what one asks for, all have.
"""

from __future__ import annotations

import ctypes
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

__all__ = ["DiskWatch", "evict", "expect_exactly", "resident_pages", "tells_truth", "will_read"]

# Linux cuts a request for more than its readahead short, in silence; 128 KiB is the default, and
# few devices have less.
_REQUEST = 128 << 10
_LOOKS = 8  # pages of a stretch
_STAYS = 64  # looks for which it is remembered that a disk was read
_MOST = 1 << 30  # bytes a call: offsets in a file may say anything
_WILLNEED = getattr(mmap, "MADV_WILLNEED", None)


def will_read(values: npt.NDArray[Any], *, look: bool = False) -> None:
    """Has the kernel begin to read the pages under ``values``, one stretch of a mapped file.

    It is advice: without support nothing happens, pages for which there is no room are not read,
    nor more than 1 GiB. ``look`` spares the work where some pages of the stretch, evenly spread,
    are all in memory already: for files of which `tells_truth`.
    """
    if _WILLNEED is None or not values.nbytes:
        return
    address = int(values.__array_interface__["data"][0])
    begin, end = address // mmap.PAGESIZE * mmap.PAGESIZE, address + min(values.nbytes, _MOST)
    if look and end - begin > _LOOKS * _REQUEST and _seems_resident(begin, end):
        return
    madvise = _libc().madvise
    for at in range(begin, end, _REQUEST):
        # ctypes lets other threads run meanwhile; mmap.madvise does not.
        madvise(at, min(_REQUEST, end - at), _WILLNEED)


def expect_exactly(memory: mmap.mmap, exactly: bool) -> None:
    """Whether a missing page of this map is read by itself, or with others around it, as is usual.

    By itself where what is needed is asked for by `will_read`: the few pages that are missed would
    otherwise bring so much that a small page cache loses what was asked for.
    """
    advice = getattr(mmap, "MADV_RANDOM" if exactly else "MADV_NORMAL", None)
    if advice is not None:
        memory.madvise(advice)


def tells_truth(path: str | os.PathLike[str]) -> bool:
    """Whether the kernel says which pages of this file are in memory.

    Of files that one neither owns nor may write it says that all are, since Linux 5.2.
    """
    if sys.platform != "linux":
        return False
    return os.stat(path).st_uid == os.geteuid() or os.access(path, os.W_OK)


def _seems_resident(begin: int, end: int) -> bool:
    flag = ctypes.c_ubyte()
    mincore, where = _libc().mincore, ctypes.byref(flag)
    for number in range(_LOOKS):
        at = begin + (end - 1 - begin) * number // (_LOOKS - 1)
        if mincore(at // mmap.PAGESIZE * mmap.PAGESIZE, 1, where) or not flag.value & 1:
            return False
    return True


class DiskWatch:
    """Knows whether this process went to a disk lately: by its page faults, and what was read.

    Asking for pages that are in memory costs up to a quarter of copying them; asking for those
    that are not saves most of the wait. One look costs a microsecond.
    """

    def __init__(self) -> None:
        self._seen = (-1, -1)  # as if it had: the first read may well have to
        self._left = 0

    def reads(self) -> bool:
        """Whether anything came from a disk since the last look, or before one of the last 64."""
        if sys.platform == "win32":
            return False
        usage = resource.getrusage(resource.RUSAGE_SELF)
        # What is asked for in time causes no fault; but it is read, and so this stays on.
        seen = usage.ru_majflt, usage.ru_inblock
        if seen != self._seen:
            self._seen, self._left = seen, _STAYS
        elif self._left:
            self._left -= 1
        return self._left > 0


def resident_pages(path: str | os.PathLike[str]) -> npt.NDArray[np.bool_]:
    """For each page of the file, whether it is in memory. On Linux, if it `tells_truth`.

    Raises:
        OSError: there is no such file, or this is not Linux.
    """
    _refuse_other_systems()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return np.zeros(0, np.bool_)
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as memory:
            data = np.frombuffer(memory, np.uint8)  # looking at its address touches no page
            flags = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
            failed = _libc().mincore(data.ctypes.data, size, flags.ctypes.data)
            del data  # it would keep the map from being closed
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(path))
    return (flags & 1).astype(np.bool_)


def evict(path: str | os.PathLike[str], parts: Iterable[tuple[int, int]] | None = None) -> None:
    """Drops the file from the page cache, or parts of it: (first byte, last byte + 1). On Linux.

    Pages that are not yet on disk stay, and those that other processes have mapped: whether it
    succeeded, `resident_pages` says. Shared maps of it in this process stay valid and are read
    from disk again when they are next used.

    Raises:
        OSError: there is no such file, or this is not Linux.
    """
    _refuse_other_systems()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        maps = list(_maps_here(status.st_ino, os.path.realpath(path)))
        for first, last in [(0, status.st_size)] if parts is None else parts:
            first = first // mmap.PAGESIZE * mmap.PAGESIZE
            for address, offset, length in maps:
                low, high = max(first, offset), min(last, offset + length)
                if low < high:
                    _libc().madvise(address + low - offset, high - low, mmap.MADV_DONTNEED)
            os.posix_fadvise(descriptor, first, last - first, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _maps_here(inode: int, path: str) -> Iterator[tuple[int, int, int]]:
    """Where this process has the file mapped: address, the file's byte there, how many."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        # 7f2c4c000000-7f2c4c021000 r--s 00000000 fe:00 1234    /path of the file
        words = line.split(maxsplit=5)
        if len(words) < 6 or words[4] != str(inode) or words[5] != path or words[1][3] != "s":
            continue  # a private map may hold what was written to it and is nowhere else
        begin, end = (int(word, 16) for word in words[0].split("-"))
        yield begin, int(words[2], 16), end - begin


def _refuse_other_systems() -> None:
    if sys.platform != "linux":
        raise OSError(
            f"which pages of a file are in memory is known on Linux only; this is {sys.platform}, "
            "which has no /proc/self/maps and no posix_fadvise"
        )


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return libc
