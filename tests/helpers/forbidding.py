"""A process that may take no lock and write nothing: one attempt ends it.

The kernel's own filter (seccomp) sees every call of every thread, whoever makes it, and of
processes that are started later. It knows no paths: those are left to an audit hook of Python's.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from pathlib import Path
from typing import Any

__all__ = ["KNOWN", "forbid", "forbid_writing_in"]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LOCKS = (6, 7, 37, 38, 1024)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE
_NUMBERS = {
    "x86_64": {
        "seccomp": 317, "flock": 73, "fcntl": 72, "open": 2, "openat": 257,
        "rest": (85, 437, 76, 77, 82, 264, 316, 87, 263, 83, 258, 84, 86, 265, 88, 266, 90, 91, 268,
                 280, 18, 285, 296, 328),
    },
    "aarch64": {
        "seccomp": 277, "flock": 32, "fcntl": 25, "open": None, "openat": 56,
        "rest": (437, 45, 46, 38, 276, 35, 34, 37, 36, 52, 53, 88, 68, 47, 70, 287),
    },
}  # fmt: skip
"""Of system calls; the rest: creat, openat2, truncate, rename, unlink, mkdir, link, chmod, utimes,
pwrite, pwritev, fallocate, and what these are called today."""

KNOWN = sys.platform == "linux" and platform.machine() in _NUMBERS

_KILL, _ALLOW = 0x80000000, 0x7FFF0000  # the whole process, with SIGSYS
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06


def forbid(*, writing: bool) -> None:
    """End this process at its next lock of a file; with ``writing`` also where it would write one.

    What is open already, such as stdout, can be written to.

    Raises:
        OSError: the kernel has no such filter.
    """
    numbers: dict[str, Any] = _NUMBERS[platform.machine()]
    program = [(_LOAD, 0, 0, 0), *_killed(numbers["flock"])]  # first, which call it is
    program += _looked_at(numbers["fcntl"], 1, _LOCKS, ())
    if writing:
        program += _looked_at(numbers["openat"], 2, (), (_WRITES,))
        if numbers["open"] is not None:
            program += _looked_at(numbers["open"], 1, (), (_WRITES,))
        for number in numbers["rest"]:
            program += _killed(number)
    program.append((_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("<HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    # SECCOMP_SET_MODE_FILTER, for all threads that there are.
    _check(libc.syscall(numbers["seccomp"], 1, 1, ctypes.create_string_buffer(head, len(head))))


def _killed(number: int) -> list[tuple[int, int, int, int]]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _KILL)]


def _looked_at(
    number: int, argument: int, values: tuple[int, ...], bits: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """Killed where this argument has one of the values, or any of the bits."""
    body = [(_LOAD, 0, 0, 16 + 8 * argument)]
    for code, each in (*((_EQUAL, value) for value in values), *((_ANY_BIT, b) for b in bits)):
        body += [(code, 0, 1, each), (_RETURN, 0, 0, _KILL)]
    body.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(body), number), *body]


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"no seccomp filter: {os.strerror(number)}")


def forbid_writing_in(folder: Path) -> None:
    """End this process, or one that it forks, where Python code would write in ``folder``."""
    root = os.path.abspath(folder)

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = values
            paths = [path] if flags & _WRITES else []
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate",
                       "os.chmod", "os.utime", "os.rmdir"):  # fmt: skip
            paths = list(values[:2])
        else:
            return
        for path in paths:
            if isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(root):
                os.write(2, f"{event} {values}\n".encode())
                os._exit(99)

    sys.addaudithook(hook)
