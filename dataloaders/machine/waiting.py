"""Wait on the main thread so that Ctrl-C interrupts: for a queue's item or a thread's end.

A wait for a lock ends only for a signal that the kernel delivers to the waiting thread while it
waits. If the signal goes to another thread, or comes a moment before the wait begins, Python only
notes it and acts on it in the main thread, which is waiting. So these waits time out and start
again.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.2


def get(queue: SimpleQueue[T]) -> T:
    """Return the queue's next item, however long it takes."""
    while True:
        try:
            return queue.get(timeout=_POLL_S)
        except Empty:
            pass


def join(thread: threading.Thread) -> None:
    """Wait until ``thread`` has ended, however long it takes."""
    while thread.is_alive():
        thread.join(_POLL_S)
