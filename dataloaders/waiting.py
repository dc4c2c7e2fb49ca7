"""Waits of the main thread that a signal ends: Ctrl-C while a queue is empty or a thread runs.

A wait for a lock ends for a signal that the kernel delivers to the waiting thread while it waits.
One that another thread is given, or that comes a moment before the wait begins, is only noted by
Python, which acts on it in the main thread, which waits. So these waits end and begin again.
"""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import TypeVar

__all__ = ["get", "join"]

T = TypeVar("T")

_HEARS_S = 0.2


def get(queue: SimpleQueue[T]) -> T:
    """The queue's next item, however long it takes."""
    while True:
        try:
            return queue.get(timeout=_HEARS_S)
        except Empty:
            pass


def join(thread: threading.Thread, seconds: float | None = None) -> bool:
    """Whether ``thread`` has ended, waited for ``seconds``, or however long it takes."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while thread.is_alive():
        left = _HEARS_S if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return False
        thread.join(min(left, _HEARS_S))
    return True
