"""End a user's program from inside: in the thread that asks for a batch, and the main thread.

StopScript          raised where the program's loop asks for its next batch
stop_main()         raised in the main thread, even while it waits for a lock
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Few programs handle this signal; by default it is ignored, so one that comes late does nothing.
SIGNAL = signal.SIGURG
"""The signal that ends a program inside `stoppable`."""

_REPEAT_S = 2.0
_TEARDOWN_S = 10.0


class StopScript(BaseException):
    """Ends the program's own loop; its ``except Exception`` does not catch this."""


_running = threading.Event()
_ignored_until = 0.0


@contextmanager
def stoppable() -> Iterator[None]:
    """Let `stop_main` end the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _ignored_until
    before = signal.signal(SIGNAL, _raise)
    _ignored_until = 0.0
    _running.set()
    try:
        yield
    finally:
        _running.clear()
        signal.signal(SIGNAL, before)


def stop_main() -> None:
    """Raise `StopScript` in the main thread of a program that runs inside `stoppable`.

    Only a signal wakes a thread from ``queue.get()``. A signal that comes just before such a wait
    is lost, so it is repeated until the program has ended.
    """
    if threading.current_thread() is threading.main_thread():
        raise StopScript
    threading.Thread(target=_wake_main, name="dataloaders-stop", daemon=True).start()


def _wake_main() -> None:
    main = threading.main_thread().ident
    for _ in range(10):
        if not _running.is_set() or main is None:
            return
        signal.pthread_kill(main, SIGNAL)
        time.sleep(_REPEAT_S)


def _raise(*_: object) -> None:
    global _ignored_until
    now = time.monotonic()
    if _running.is_set() and now > _ignored_until:
        _ignored_until = now + _TEARDOWN_S  # time for the program's teardown
        raise StopScript
