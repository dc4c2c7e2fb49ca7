"""End a user's program from inside: in the thread that asks for a batch, and the main thread.

StopScript          raised where the program's loop asks for its next batch
stop()              raises it in the main thread, even while that waits for a lock
end_soon()          ends the process even if threads of the program go on
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

# Few programs handle this signal; by default it is ignored, so one that comes late does nothing.
SIGNAL = signal.SIGURG
"""The signal that ends a program inside `stoppable`."""

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_REPEAT_S = 2.0
_TEARDOWN_S = 10.0


class StopScript(BaseException):
    """Ends the program's own loop; its ``except Exception`` does not catch this."""


_running = threading.Event()
_stopping = threading.Event()
_ignored_until = 0.0


@contextmanager
def stoppable() -> Iterator[None]:
    """Let `stop` end the block, if this is the main thread; its timers end with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _ignored_until, _running, _stopping
    before = signal.signal(SIGNAL, _raise)
    timers = [(kind, *signal.getitimer(kind)) for kind in _TIMERS]
    _ignored_until = 0.0
    # New ones: a thread that wakes an earlier program must not end this one.
    running, _stopping = threading.Event(), threading.Event()
    _running = running
    running.set()
    try:
        yield
    finally:
        running.clear()
        signal.signal(SIGNAL, before)
        for timer in timers:
            signal.setitimer(*timer)


def stop(stuck: Callable[[], object] = lambda: os._exit(1)) -> NoReturn:
    """Raise `StopScript` here and in the main thread of a program that runs inside `stoppable`.

    Only a signal wakes a thread from ``queue.get()``. A signal that comes just before such a wait
    is lost, so it is repeated until the program has ended; one whose teardown waits for ever is
    woken, too. ``stuck`` is called, in a thread, if it still goes on: it catches `StopScript`.
    """
    global _ignored_until
    if threading.current_thread() is threading.main_thread():
        _ignored_until = time.monotonic() + _TEARDOWN_S
    if not _stopping.is_set():
        _stopping.set()
        threading.Thread(target=_wake_main, args=(_running, stuck), daemon=True).start()
    raise StopScript


def _wake_main(running: threading.Event, stuck: Callable[[], object]) -> None:
    main = threading.main_thread().ident
    for _ in range(10):
        if not running.is_set() or main is None:
            return
        if time.monotonic() > _ignored_until:
            signal.pthread_kill(main, SIGNAL)
        time.sleep(_REPEAT_S)
    if running.is_set():
        stuck()


def end_soon(status: int) -> None:
    """End this process in some seconds if it does not end by itself.

    At its end, Python waits for threads of the program, which may wait for ever.
    """

    def end() -> None:
        time.sleep(_TEARDOWN_S)
        os._exit(status)

    threading.Thread(target=end, daemon=True).start()


def _raise(*_: object) -> None:
    global _ignored_until
    now = time.monotonic()
    if _running.is_set() and now > _ignored_until:
        _ignored_until = now + _TEARDOWN_S  # time for the program's teardown
        raise StopScript
