"""Share a batch among a few threads, each of which makes its own part from start to end.

    begin ────────── end      images of the batch
    │ thread │ thread │       torch's operations in them run on one core each
    │t│u│u│t│u│t│t│u│t│       where the times are long and differ: each takes the next one

Torch's own threads share each operation and wait for each other after it, spinning: an image is too
small for that. So this is also used where torch may use several threads and one is enough.
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
"""The least bytes of a batch for each thread: less is done before another thread has begun."""


class Team:
    """Threads, started when a batch is large enough.

    Never more than torch may use in an operation, nor than this rank's cores.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._count = 0
        self._process = 0
        self._starting = threading.Lock()

    def split(self, count: int, nbytes: int, part: Callable[[int, int], None]) -> None:
        """Call ``part(begin, end)`` for parts that together cover 0 to ``count``.

        Args:
            count: the number of items.
            nbytes: the bytes of all of them.
            part: makes some of them; called in several threads at once.

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
        """Call ``one(number)`` for each number below ``count``, in whichever thread is free.

        Args:
            count: the number of items.
            nbytes: the bytes that could be copied in the time that all of them take.
            one: makes one of them; called in several threads at once.

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
        """Return at least this many threads. A forked child has none of its parent's."""
        if self._threads is not None and self._process == os.getpid() and self._count < number:
            self._threads.shutdown()  # a larger batch needs more of them
            self._threads = None
        if self._threads is None or self._process != os.getpid():
            self._threads = ThreadPoolExecutor(number, "dataloaders-h5")
            self._count, self._process = number, os.getpid()
            together = threading.Barrier(number)
            for future in [self._threads.submit(_alone, together) for _ in range(number)]:
                future.result()
            # A thread keeps the number that it set itself (OpenMP's is per thread); threads that
            # begin later take the number that was set last.
            torch.set_num_threads(most)
        return self._threads

    def __reduce__(self) -> tuple[type[Team], tuple[()]]:
        return Team, ()


def _alone(together: threading.Barrier) -> None:
    """Have torch use only this thread; called in each, since none ends before all have begun."""
    torch.get_num_threads()  # else the first operation would set the common number
    torch.set_num_threads(1)
    together.wait()
