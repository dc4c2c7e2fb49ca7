"""The real loader under measurement: its epochs, how many batches are ready, and when it idles.

iterate() ──> iterator ──take()──> batch        epochs go round for as long as the check needs
                 │
                 └── in flight: batches that workers make ahead; ready: those already made
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dataloaders.batches.tree import Batch
from dataloaders.errors import CheckError
from dataloaders.loader import CopiedBatches
from dataloaders.machine import waiting
from dataloaders.measuring.queues import counts_of
from dataloaders.specification import batches_in

__all__ = ["Feed", "Takers"]

_POLL_S = 0.0005
_UNKNOWN_SETTLE_S = 0.2


class Feed:
    """Batches of the real loader, epoch after epoch.

    Attributes:
        epoch: number of the epoch that is running, from 0.
        taken: batches taken from the running epoch.
        length: batches in one epoch, once known from ``len()`` or from a finished epoch.
        epoch_starts: seconds from asking for an epoch to having its first batch, one for each
            epoch after the first.
        epoch_ends: seconds that ``next()`` took to say that an epoch was over (workers end).
        workers: worker processes (0 if the loader works in this process).
        in_flight: batches that can be made ahead of use.
        tells: whether its iterator tells how many batches are ready (torch's with workers does).
        copies_to: the device to which the loader copies each batch as it is taken, or None.
            Batches from here are still where they were before that copy.
    """

    def __init__(self, loader: Any, iterate: Callable[[], Iterator[Batch]] | None = None) -> None:
        self._iterate: Callable[[], Iterator[Batch]] = iterate or (lambda: iter(loader))
        self._iterator: Iterator[Batch] | None = None
        self.epoch = -1
        self.taken = 0
        self.length = batches_in(loader)
        self.epoch_starts: list[float] = []
        self.epoch_ends: list[float] = []
        self.tells = True
        self.copies_to: torch.device | None = None
        self.workers = int(getattr(loader, "num_workers", 0) or 0)
        self._queued = self.workers * int(getattr(loader, "prefetch_factor", None) or 2)
        self.in_flight = max(1, self._queued)

    def take(self) -> Batch:
        """The next batch; raises StopIteration at the end of the epoch."""
        if self._iterator is None:
            return self.start()
        begin = time.perf_counter()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.ended()
            self.epoch_ends.append(time.perf_counter() - begin)
            raise
        self.taken += 1
        return batch

    def start(self) -> Batch:
        """The first batch of a new epoch; its start-up time is kept.

        Raises:
            CheckError: the loader yields no batch at all.
        """
        abandoned = self._iterator is not None
        self.close()
        begin = time.perf_counter()
        iterator = self._iterate()
        if isinstance(iterator, CopiedBatches):
            self.copies_to, iterator = iterator.device, iterator.batches
        self._iterator = iterator
        self.tells = counts_of(iterator) is not None
        # A prefetcher of ours holds more, on their way to the device.
        self.in_flight = max(1, self._queued + int(getattr(iterator, "ahead", 0)))
        self.epoch += 1
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise CheckError(
                "the loader yields no batch: there is nothing to measure; "
                "check its dataset's length, and drop_last with a batch_size larger than that"
            ) from None
        self.taken = 1
        # Persistent workers first finish what an abandoned epoch had ordered: that is no start.
        if self.epoch > 0 and not abandoned:
            self.epoch_starts.append(time.perf_counter() - begin)
        return batch

    def iterator(self) -> Iterator[Batch]:
        """The running epoch's own iterator, for the innermost loop of a block."""
        if self._iterator is None:
            raise CheckError("no epoch is running; start() one before asking for its iterator")
        return self._iterator

    def count(self, taken: int) -> None:
        """Count batches that were taken from `iterator` directly."""
        self.taken += taken

    def ended(self) -> None:
        """The running epoch's iterator is exhausted."""
        self.length = self.taken
        self._iterator = None

    @property
    def running(self) -> bool:
        """Whether an epoch is under way."""
        return self._iterator is not None

    @property
    def left(self) -> float:
        """Batches that the running epoch still has; infinity if its length is not known."""
        return float("inf") if self.length is None else max(0, self.length - self.taken)

    def ready(self) -> int | None:
        """Batches that are made and wait to be taken; None if this iterator does not tell."""
        counts = counts_of(self._iterator)
        return None if counts is None else counts[0]

    def wait_until_idle(self, most_s: float, make_s: float) -> None:
        """Return when the workers have filled their queues and are idle, or after ``most_s``.

        An iterator that does not tell gets the time that it needs for all it can have in flight,
        at ``make_s`` seconds a batch.
        """
        if not self.workers or self._iterator is None:
            return
        deadline = time.perf_counter() + most_s
        while time.perf_counter() < deadline:
            counts = counts_of(self._iterator)
            if counts is None:
                time.sleep(min(most_s, max(_UNKNOWN_SETTLE_S, self.in_flight * make_s)))
                return
            ready, outstanding = counts
            if ready >= outstanding:
                return
            time.sleep(_POLL_S)

    def bring_to(self, level: int, most_s: float) -> None:
        """Take and drop ready batches, or wait for some, until ``level`` batches are ready.

        A block goes on from the level at which the last one of its arm stopped: neither the
        batches queued while another arm ran nor an emptied queue is the steady state.
        """
        deadline = time.perf_counter() + most_s
        while self.workers and self._iterator is not None and time.perf_counter() < deadline:
            ready = self.ready()
            if ready is None or ready == level or self.left <= 1:
                return
            if ready < level:
                counts = counts_of(self._iterator)
                if counts is not None and counts[0] >= counts[1]:
                    return  # as full as it gets
                time.sleep(_POLL_S)
            else:
                try:
                    self.take()
                except StopIteration:
                    return

    def close(self) -> None:
        """Drop the running epoch; torch ends its workers when the iterator goes."""
        self._iterator = None
        self.taken = 0


class Takers:
    """Takes and drops at most one ready batch a step, in a thread, so that workers keep working.

    Runs only the worker queues' ``next()`` (no code of the user's: that runs in the workers).

    Attributes:
        exhausted: whether the epoch ended while batches were taken.
    """

    def __init__(self, feed: Feed) -> None:
        self.exhausted = False
        self._feed = feed
        self._iterator = feed.iterator()
        self._allowed = threading.Event()
        self._stopping = False
        self._taken = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dataloaders-check", daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Allow one batch to be taken; a step that none was ready for is not made up for."""
        self._allowed.set()

    def stop(self) -> None:
        """Wait for the batch under way, then hand the iterator back to the feed.

        Raises:
            Exception: what the loader raised while its batches were taken.
        """
        self._stopping = True
        self._allowed.set()
        waiting.join(self._thread)
        self._feed.count(self._taken)
        if self.exhausted:
            self._feed.ended()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            self._allowed.wait()
            self._allowed.clear()
            if self._stopping:
                return
            try:
                next(self._iterator)
            except StopIteration:
                self.exhausted = True
                return
            except BaseException as error:
                # Handed to the consumer by stop(): a thread must not die in silence.
                self._error = error
                return
            self._taken += 1
