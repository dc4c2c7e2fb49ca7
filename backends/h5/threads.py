"""Share a batch among a few threads, each of which makes its own images from start to end.

    begin ────────── end      images of the batch
    │ thread │ thread │       torch's operations in a thread run on one core

Torch's own threads share each operation and wait for each other, spinning, after it: an image is
too small for that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from dataloaders.machine.resources import usable_cores
from dataloaders.machine.threads import limit_torch_threads

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
        self._process = 0  # a forked child has none of its parent's threads

    def split(self, count: int, nbytes: int, part: Callable[[int, int], None]) -> None:
        """Call ``part(begin, end)``, in several threads at once, for all of ``count`` items.

        The items have ``nbytes`` bytes together. What ``part`` raises is raised here.
        """
        if self._process != os.getpid():
            self._process = os.getpid()
            self._count = self._most or min(torch.get_num_threads(), usable_cores())
            self._pool = ThreadPoolExecutor(
                self._count, "dataloaders-h5", limit_torch_threads, (1,)
            )
        number = min(self._count, count, nbytes // _LEAST_BYTES)
        if number < 2:
            part(0, count)
            return
        ends = [count * n // number for n in range(number + 1)]
        list(self._pool.map(part, ends[:-1], ends[1:]))

    def close(self) -> None:
        """End the threads."""
        if self._process == os.getpid():
            self._pool.shutdown()
        self._process = 0
