"""One batch made by a few threads, each of them its own part, one operation after the other.

    begin ────────── end      images of the batch
    │ thread │ thread │       torch's operations in them run on one core each
    │t│u│u│t│u│t│t│u│t│       where they take long, and differ: each takes the next one

torch's own threads share each operation and wait for each other after it, spinning: an image is too
small for that. So it is also used where torch may use several threads and one is enough.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from dataloaders.workers import usable_cores

__all__ = ["Team", "idle_cores"]

_LEAST_BYTES = 4 << 20
"""Of a batch, for each thread: less is done before another thread has begun."""

_ROUNDING = 0.3  # of a core that does something now and then
_LOAD_S = 60.0  # over which a system's load is an average


class Team:
    """Threads, started when a batch is large enough.

    Never more than torch may use, and than there are idle cores: on busy ones nothing is done
    sooner, and handing over costs.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._count = 0
        self._process = 0
        self._starting = threading.Lock()
        self._load = _Load()

    def split(self, count: int, nbytes: int, part: Callable[[int, int], None]) -> None:
        """Have ``part(begin, end)`` called for parts that are together 0 to ``count``.

        Args:
            count: of what is made.
            nbytes: of all of it.
            part: makes some of it; it is called in several threads at once.

        Raises:
            Exception: what ``part`` raises, when none of them is running any more.
        """
        most = torch.get_num_threads()
        if most == 1 or nbytes < _LEAST_BYTES:
            part(0, count)
            return
        number = max(1, min(most, idle_cores(self._load.own()), count, nbytes // _LEAST_BYTES))
        with self._starting:
            threads = self._started(number, most)
        ends = [count * n // number for n in range(number + 1)]
        futures = [threads.submit(self._timed, part, *ends[n : n + 2]) for n in range(number)]
        wait(futures)
        for future in futures:
            future.result()

    def each(self, count: int, nbytes: int, one: Callable[[int], None]) -> None:
        """Have ``one(number)`` called for each number below ``count``, by whoever is free.

        Args:
            count: of what is made.
            nbytes: that copying would move in the time that all of it takes.
            one: makes one of them; it is called in several threads at once.

        Raises:
            Exception: what ``one`` raises, when none of them is running any more.
        """
        waiting = deque(range(count))

        def some(_begin: int, _end: int) -> None:
            while waiting:
                try:
                    number = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                try:
                    one(number)
                except BaseException:
                    waiting.clear()
                    raise

        self.split(count, nbytes, some)

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None and self._process == os.getpid():
            self._threads.shutdown()
        self._threads = None

    def _timed(self, part: Callable[[int, int], None], begin: int, end: int) -> None:
        started = time.thread_time()
        try:
            part(begin, end)
        finally:
            self._load.add(time.thread_time() - started)

    def _started(self, number: int, most: int) -> ThreadPoolExecutor:
        """The threads, at least so many; a child has none of its parent's."""
        if self._threads is not None and self._process == os.getpid() and self._count < number:
            self._threads.shutdown()  # cores have become idle since
            self._threads = None
        if self._threads is None or self._process != os.getpid():
            self._threads = ThreadPoolExecutor(number, "dataloaders-h5")
            self._count, self._process = number, os.getpid()
            together = threading.Barrier(number)
            for future in [self._threads.submit(_alone, together) for _ in range(number)]:
                future.result()
            # Each thread keeps the number that it was told itself (OpenMP's is a thread's own);
            # those that begin later take the one that anybody was told last.
            torch.set_num_threads(most)
        return self._threads

    def __reduce__(self) -> tuple[type[Team], tuple[()]]:
        return Team, ()


class _Load:
    """What a team's own threads are of the system's load: an average that fades as that does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cores = 0.0
        self._seconds = 0.0  # of cores, since the last look
        self._looked = time.monotonic()

    def add(self, seconds: float) -> None:
        """A thread has used a core for so long."""
        with self._lock:
            self._seconds += seconds

    def own(self) -> float:
        """The cores that the threads kept busy."""
        with self._lock:
            now = time.monotonic()
            passed = max(now - self._looked, 1e-6)
            fades = math.exp(-passed / _LOAD_S)
            self._cores = self._cores * fades + self._seconds / passed * (1 - fades)
            self._seconds, self._looked = 0.0, now
            return self._cores


def idle_cores(own: float = 0.0) -> int:
    """Cores that nobody else used of late, this thread's own one included; at least 1.

    Args:
        own: how many the caller has itself kept busy by threads that are idle now.
    """
    cores = usable_cores()
    try:
        busy, _, _ = os.getloadavg()
    except OSError:  # a system that does not say
        return cores
    return max(1, min(cores, cores + 1 - math.ceil(busy - own - _ROUNDING)))


def _alone(together: threading.Barrier) -> None:
    """Have torch use this thread alone in it; called in each of them, since none is done before."""
    torch.get_num_threads()  # else the first operation would have it take the common number
    torch.set_num_threads(1)
    together.wait()
