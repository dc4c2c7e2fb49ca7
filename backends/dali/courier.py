"""Run the thread that works on a line, one epoch after the other.

    loop's thread ──Task──> Trip.inbox ──> thread: line ──Item──> Trip.ready ──> loop's thread

A `Trip` is one epoch. The thread runs nothing with global state, and holds nothing between trips.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import wait
from queue import Empty, SimpleQueue
from typing import TypeAlias

from dataloaders.machine.threads import limit_torch_threads

from .job import Job
from .line import RUNS, Line
from .task import Ended, Failed, Item, Task

__all__ = ["Courier", "Trip"]

_PATIENCE_S = 5.0
_POLL_S = 0.1

Wanted: TypeAlias = "Task | Failed | None"
"""What the loop requests: a batch; the sampler's error in its place; None at the end."""


class Trip:
    """One epoch, as both threads see it.

    Attributes:
        job: what is made.
        inbox: requested batches, in order.
        ready: their results, in order.
        parked: set when the thread is done with this trip, and holds nothing of it.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.inbox: SimpleQueue[Wanted] = SimpleQueue()
        self.ready: SimpleQueue[Item] = SimpleQueue()
        self.parked = threading.Event()
        self._stopping = False
        self._lined_up = 0
        self._pid = os.getpid()

    def stop(self) -> None:
        """End the trip wherever it is. May be called twice, from any thread, at exit."""
        if os.getpid() != self._pid:
            return  # the thread is the parent's
        self._stopping = True
        self.inbox.put(None)
        if not isinstance(threading.current_thread(), _Thread):
            self.parked.wait(_PATIENCE_S)  # so that nothing is left when this returns

    def counts(self) -> tuple[int, int]:
        """Return the number of batches that are ready, and of those ready or in progress."""
        ready = self.ready.qsize()
        return ready, ready + self.inbox.qsize() + self._lined_up

    def run(self, line: Line) -> None:
        """Make batches until there are no more, or until stopped; on the courier's thread."""
        lined_up: deque[Task | Failed] = deque()
        try:
            line.begin(self.job)
            self._run(line, lined_up)
        except BaseException as error:  # a bug of this package must not leave the loop waiting
            self.ready.put(Failed(error))
            self.ready.put(Ended())
        finally:
            line.drop(_tasks(lined_up))
            lined_up.clear()
            self.parked.set()

    def _run(self, line: Line, lined_up: deque[Task | Failed]) -> None:
        held: Task | Failed | None = None
        ended = False
        while not self._stopping:
            if held is None and not ended:
                try:
                    held = self.inbox.get(block=not lined_up)
                    ended = held is None
                except Empty:
                    pass
            if held is not None and len(lined_up) < RUNS and self._is_read(held, lined_up):
                if isinstance(held, Task):
                    line.start(held)
                lined_up.append(held)
                held = None
                self._lined_up = len(lined_up)
            elif lined_up:
                done = lined_up.popleft()
                if isinstance(done, Task):
                    line.finish(done)
                self.ready.put(done if isinstance(done, Failed) else _item(done))
                self._lined_up = len(lined_up)
                del done
            elif ended and held is None:
                self.ready.put(Ended())
                return

    def _is_read(self, held: Task | Failed, lined_up: deque[Task | Failed]) -> bool:
        """Whether the files of ``held`` are read; waits for them if there is nothing else to do."""
        if isinstance(held, Failed) or held.reading is None or held.reading.done():
            return True
        if not lined_up:
            wait((held.reading,), timeout=_POLL_S)
        return False


def _tasks(lined_up: Iterable[Task | Failed]) -> list[Task]:
    return [each for each in lined_up if isinstance(each, Task)]


def _item(task: Task) -> Item:
    item, task.item = task.item, None  # it holds the task: leave no cycle
    assert item is not None
    return item


class _Thread(threading.Thread):
    pass


class Courier:
    """A thread that runs trips on one line, started with the first one."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._inbox: SimpleQueue[Trip | None] = SimpleQueue()
        self._thread: _Thread | None = None
        self._pid = os.getpid()

    def send(self, trip: Trip) -> None:
        """Queue ``trip`` after those before it."""
        if self._thread is None:
            # A daemon: an interpreter that exits must not wait for a batch that nobody wants.
            self._thread = _Thread(
                target=_work, args=(self._inbox, self._line), name="dataloaders-dali", daemon=True
            )
            self._thread.start()
        self._inbox.put(trip)

    def end(self) -> None:
        """End the thread after its trips, and close the line."""
        if os.getpid() != self._pid:
            return
        self._inbox.put(None)
        thread = self._thread
        if thread is None:
            self._line.end()
        elif thread is not threading.current_thread():
            thread.join(_PATIENCE_S)  # DALI's own threads must end before the interpreter does


def _work(inbox: SimpleQueue[Trip | None], line: Line) -> None:
    limit_torch_threads(1)
    while (trip := inbox.get()) is not None:
        trip.run(line)
        del trip  # before waiting for the next one
    line.end()
