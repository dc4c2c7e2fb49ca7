"""Waits of the main thread that a signal ends: Ctrl-C while a queue is empty or a thread runs.

A wait for a lock ends for a signal that the kernel delivers to the waiting thread while it waits.
One that another thread is given, or that comes a moment before the wait begins, is only noted by
Python, which acts on it in the main thread, which waits. So these waits end and begin again.
"""

from __future__ import annotations

import threading
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


def join(thread: threading.Thread) -> None:
    """Wait until ``thread`` has ended, however long it takes."""
    while thread.is_alive():
        thread.join(_HEARS_S)
