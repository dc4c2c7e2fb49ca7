"""A process that may take no lock and write nothing: one attempt ends it.

The kernel's own filter (seccomp) sees every call of every thread, whoever makes it, and of
processes that are started later.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Any

__all__ = ["KNOWN", "forbid"]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LOCKS = (6, 7, 37, 38, 1024)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE
_NUMBERS: dict[str, dict[str, Any]] = {
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


def forbid() -> None:
    """End this process where it would lock or write a file; what is open can be written to.

    Raises:
        OSError: the kernel has no such filter.
    """
    numbers = _NUMBERS[platform.machine()]
    program = [(_LOAD, 0, 0, 0)]  # first, which call it is
    for number in (numbers["flock"], *numbers["rest"]):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _KILL)]
    program += _looked_at(numbers["fcntl"], 1, [(_EQUAL, lock) for lock in _LOCKS])
    program += _looked_at(numbers["openat"], 2, [(_ANY_BIT, _WRITES)])
    if numbers["open"] is not None:
        program += _looked_at(numbers["open"], 1, [(_ANY_BIT, _WRITES)])
    program.append((_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("<HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    # SECCOMP_SET_MODE_FILTER, for all threads that there are.
    _check(libc.syscall(numbers["seccomp"], 1, 1, ctypes.create_string_buffer(head, len(head))))


def _looked_at(
    number: int, argument: int, tests: list[tuple[int, int]]
) -> list[tuple[int, int, int, int]]:
    """Killed where a test of this argument is true."""
    body = [(_LOAD, 0, 0, 16 + 8 * argument)]
    for code, value in tests:
        body += [(code, 0, 1, value), (_RETURN, 0, 0, _KILL)]
    body.append((_RETURN, 0, 0, _ALLOW))
    return [(_EQUAL, 0, len(body), number), *body]


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"no seccomp filter: {os.strerror(number)}")
