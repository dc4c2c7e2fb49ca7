"""Reopen the files that a forked process inherits.

A fork shares the offset of every open file with its parent. What it reads moves the parent's
offset, and the parent's next buffered read continues at the wrong place.
"""

from __future__ import annotations

import os
import stat

_KEPT = os.O_RDWR | os.O_WRONLY | os.O_APPEND | getattr(os, "O_DIRECT", 0)
_STANDARD = 2  # stdin, stdout, stderr share an offset on purpose


def open_files_anew() -> None:
    """Give this process its own offsets in all regular files that it may read.

    Call it in a fork, before anything reads. Descriptors and offsets keep their numbers. Does
    nothing on a system without ``/proc/self/fd``.

    Raises:
        OSError: a file cannot be opened again, for instance because permissions were dropped.
    """
    try:
        import fcntl

        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except (ImportError, OSError):
        return
    for descriptor in descriptors:
        if descriptor > _STANDARD:
            try:
                is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            except OSError:  # closed meanwhile, as that of the listing itself is
                continue
            if is_regular:
                _open_anew(descriptor, flags)


def _open_anew(descriptor: int, flags: int) -> None:
    if flags & os.O_WRONLY or flags & getattr(os, "O_PATH", 0):
        return  # nothing is read from it
    offset = os.lseek(descriptor, 0, os.SEEK_CUR)
    # Through /proc, which also finds files that were renamed or deleted meanwhile.
    own = os.open(f"/proc/self/fd/{descriptor}", flags & _KEPT)
    try:
        os.lseek(own, offset, os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
    finally:
        os.close(own)
