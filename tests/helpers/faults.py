"""Interrupt a piece of work at one of its steps.

A step is a change of files below a folder: one is opened, synced, renamed, linked, cut or removed.
Work that is interrupted at each of them, one after the other, has met every state that a kill, a
Ctrl-C or a full disk can leave on the disk.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["FAULTS", "interrupted_at"]

_STEPS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_STATUS = {"done": 0, "raised": 3, "missed": 4}


def _full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _ctrl_c() -> None:
    raise KeyboardInterrupt


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], None]] = {"kill": _kill, "Ctrl-C": _ctrl_c, "disk full": _full}


def interrupted_at(
    step: int, fault: Callable[[], None], work: Callable[[], object], folder: Path
) -> str:
    """Run ``work`` in a fork, with ``fault`` at its step of this number; return how it ended.

    Returns:
        "killed"; "raised": the fault's error left ``work``; "swallowed": it did not, and ``work``
        came to its end; or "done": ``work`` has fewer steps.

    Raises:
        AssertionError: ``work`` raised something else.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(_ran(step, fault, work, str(folder)))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    known = {-signal.SIGKILL: "killed", 0: "done", 3: "raised", 4: "swallowed"}
    assert status in known, f"status {status} after a fault at step {step}"
    return known[status]


def _ran(step: int, fault: Callable[[], None], work: Callable[[], object], folder: str) -> int:
    steps, struck = 0, False

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal steps, struck
        if event not in _STEPS or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        if struck or not os.fsdecode(args[0]).startswith(folder):
            return
        steps += 1
        if steps == step:
            struck = True
            fault()

    sync = os.fsync

    def counted_sync(file: int) -> None:
        count("open", (folder,))
        sync(file)

    try:
        signal.alarm(60)
        warnings.simplefilter("ignore")
        os.fsync = counted_sync
        sys.addaudithook(count)
        work()
    except (KeyboardInterrupt, OSError):
        return 3 if struck else 1
    except BaseException as error:
        struck_error = error.__cause__ or error.__context__
        if struck and isinstance(struck_error, (KeyboardInterrupt, OSError)):
            return 3
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 4 if struck else 0
