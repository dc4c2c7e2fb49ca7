"""Share a batch among a few threads, each of which makes its own images from start to end.

    begin ────────── end      images of the batch
    │ thread │ thread │       torch's operations in a thread run on one core

Torch's own threads share each operation and wait for each other, spinning, after it: an image is
too small for that.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from dataloaders.machine.resources import usable_cores

__all__ = ["Threads"]

_LEAST_BYTES = 4 << 20  # of a batch, for each thread: less is done before another one has begun


class Threads:
    """Threads, started for the first batch that is large enough.

    Args:
        threads: how many at most; None: as many as torch uses in an operation, and no more than
            this rank's cores.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._most = threads
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._starting = threading.Lock()

    def split(self, count: int, nbytes: int, part: Callable[[int, int], None]) -> None:
        """Call ``part(begin, end)``, in several threads at once, for all of ``count`` items.

        The items have ``nbytes`` bytes together. What ``part`` raises is raised when all threads
        have ended.
        """
        most = self._most or min(torch.get_num_threads(), _cores(os.getpid()))
        if most == 1 or nbytes < _LEAST_BYTES:
            part(0, count)
            return
        number = max(1, min(most, count, nbytes // _LEAST_BYTES))
        with self._starting:
            pool = self._started(most)
        ends = [count * n // number for n in range(number + 1)]
        futures = [pool.submit(part, *ends[n : n + 2]) for n in range(number)]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool = None

    def _started(self, number: int) -> ThreadPoolExecutor:
        """Return a pool of this many threads; a forked child makes its own."""
        if self._pool is None or self._process != os.getpid():
            before, begun = torch.get_num_threads(), threading.Barrier(number)
            self._pool = ThreadPoolExecutor(number, "dataloaders-h5", _use_one_core)
            self._process = os.getpid()
            wait([self._pool.submit(begun.wait) for _ in range(number)])
            # OpenMP's number is per thread: each keeps its own, and later threads take the last.
            torch.set_num_threads(before)
        return self._pool

    def __reduce__(self) -> tuple[type[Threads], tuple[int | None]]:
        return Threads, (self._most,)


@functools.cache
def _cores(process: int) -> int:
    """Return this rank's cores; looking them up reads a dozen files, so once in each process."""
    return usable_cores()


def _use_one_core() -> None:
    """Have torch's operations use only this thread."""
    torch.get_num_threads()  # else the first operation would set the common number
    torch.set_num_threads(1)
