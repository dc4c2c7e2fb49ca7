"""One batch made by a few threads, each of them its own part, one operation after the other.

    begin ────────── end      images of the batch
    │ thread │ thread │       torch's operations in them run on one core each
    │t│u│u│t│u│t│t│u│t│       where they take long, and differ: each takes the next one

torch's own threads share each operation and wait for each other after it, spinning: an image is too
small for that. So it is also used where torch may use several threads and one is enough.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from dataloaders.machine.resources import usable_cores

__all__ = ["Team"]

_LEAST_BYTES = 4 << 20
"""Of a batch, for each thread: less is done before another thread has begun."""


class Team:
    """Threads, started when a batch is large enough.

    Never more than torch may use in an operation, and than this rank's cores.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._count = 0
        self._process = 0
        self._starting = threading.Lock()

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
        number = max(1, min(most, usable_cores(), count, nbytes // _LEAST_BYTES))
        with self._starting:
            threads = self._started(number, most)
        ends = [count * n // number for n in range(number + 1)]
        futures = [threads.submit(part, *ends[n : n + 2]) for n in range(number)]
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

    def _started(self, number: int, most: int) -> ThreadPoolExecutor:
        """The threads, at least so many; a child has none of its parent's."""
        if self._threads is not None and self._process == os.getpid() and self._count < number:
            self._threads.shutdown()  # a larger batch takes more of them
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


def _alone(together: threading.Barrier) -> None:
    """Have torch use this thread alone in it; called in each of them, since none is done before."""
    torch.get_num_threads()  # else the first operation would have it take the common number
    torch.set_num_threads(1)
    together.wait()
