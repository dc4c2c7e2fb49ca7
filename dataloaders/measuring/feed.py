"""Yield a loader's batches without end, epoch after epoch; count those that are ready.

iterate() ──> iterator ──take()──> batch        when an epoch ends, the next one begins
                 │
                 └── in flight: batches that workers make ahead; ready: those of them that are made
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import _DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaders.batches.tree import Batch
from dataloaders.errors import CheckError
from dataloaders.measuring.clocks import HostTime, cpu_seconds
from dataloaders.measuring.queues import counts_of
from dataloaders.specification import batches_in

_POLL_S = 0.0005
_UNKNOWN_SETTLE_S = 0.2


class Feed:
    """Yields the batches of a loader (anything that can be iterated again), epoch after epoch.

    ``iterate`` makes the loader's iterator; None: ``iter(loader)``.
    """

    def __init__(
        self,
        loader: Any,
        iterate: Callable[[], Iterator[Batch]] | None = None,
        host: HostTime | None = None,
    ) -> None:
        self._time = host or HostTime()
        self._iterate: Callable[[], Iterator[Batch]] = iterate or (lambda: iter(loader))
        self._iterator: Iterator[Batch] | None = None
        self.epoch = -1  # number of the running one
        self.taken = 0  # batches of that epoch
        self.length = batches_in(loader)  # of an epoch; None until one has ended, if it has no len
        self.most: int | None = None  # batches after which the loop leaves each epoch, if it does
        # Seconds until an epoch's first batch, except of the first epoch; and seconds of the next()
        # that ends an epoch and its workers.
        self.epoch_starts: list[float] = []
        self.epoch_ends: list[float] = []
        self.countable: bool = True  # whether the iterator reports how many batches are ready
        # What the sampler drew for the last batch. None if not known: it was drawn before the
        # iterator was returned, or the iterator is not torch's or does not keep the order.
        self.keys: Any = None
        self._drawn: dict[int, Any] = {}
        self.workers: int = int(getattr(loader, "num_workers", 0) or 0)
        self._queued = self.workers * int(getattr(loader, "prefetch_factor", None) or 2)
        self.in_flight = max(1, self._queued)  # batches that can be made ahead of use
        self.ahead = 0  # of these, the batches that a thread of the loader makes or copies

    def next(self) -> Batch:
        """Return the next batch; if the epoch is over, the first one of the next."""
        if self.running:
            try:
                return self.take()
            except StopIteration:
                pass  # the next epoch begins below
        return self.start()

    def take(self) -> Batch:
        """Return the next batch; raise StopIteration at the end of the epoch."""
        if self._iterator is None:
            return self.start()
        begin = self._time.now()
        try:
            if self.most is not None and self.taken >= self.most:
                raise StopIteration
            batch = next(self._iterator)
        except StopIteration:
            self.length, self._iterator = self.taken, None
            self.epoch_ends.append(self._time.now() - begin)
            raise
        self.keys = self._drawn.pop(self.taken, None)
        self.taken += 1
        return batch

    def start(self) -> Batch:
        """Return the first batch of a new epoch, and note how long that took.

        Raises:
            CheckError: the loader yields no batch at all.
        """
        abandoned = self._iterator is not None
        self.close()
        begin = self._time.now()
        iterator = self._iterate()
        self._iterator = iterator
        self.countable = counts_of(iterator) is not None
        self._drawn = _drawn_by(iterator)
        # The thread of our own iterator may hold more.
        self.ahead = int(getattr(iterator, "ahead", 0))
        self.in_flight = max(1, self._queued + self.ahead)
        self.epoch += 1
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise CheckError(
                "the loader yields no further batch; give one that can be iterated again and "
                "again, and not an iterator or a generator"
                if self.epoch
                else "the loader yields no batch: there is nothing to measure; "
                "check its dataset's length, and drop_last with a batch_size larger than that"
            ) from None
        self.keys = self._drawn.pop(0, None)
        self.taken = 1
        # After an abandoned epoch, persistent workers first finish its tasks: that is no start.
        if self.epoch > 0 and not abandoned:
            self.epoch_starts.append(self._time.now() - begin)
        return batch

    def end_after(self, batches: int) -> None:
        """End this epoch, and later ones after so many batches: the loop leaves them there."""
        if self.length is None or batches <= self.length:
            self.length = self.most = batches
            if self.running:
                begin = self._time.now()
                self.close()
                self.epoch_ends.append(self._time.now() - begin)

    @property
    def running(self) -> bool:
        """Whether an epoch has begun and not ended."""
        return self._iterator is not None

    @property
    def left(self) -> float:
        """Return how many batches are left in the running epoch; infinity if not known."""
        return float("inf") if self.length is None else max(0, self.length - self.taken)

    @property
    def parallel(self) -> bool:
        """Whether workers, or a thread of the loader's own, make batches while the loop steps."""
        return self.workers > 0 or self.ahead > 0

    def ready(self) -> int | None:
        """Return how many batches are ready to be taken; None if they cannot be counted."""
        counts = counts_of(self._iterator)
        return None if counts is None else counts[0]

    def cpu_s(self) -> float:
        """Return the CPU seconds that the epoch's workers have used; 0 if not known."""
        return cpu_seconds(worker.pid for worker in getattr(self._iterator, "_workers", ()))

    def busy(self) -> float:
        """Return the share of workers that are busy; 1 if that cannot be counted."""
        counts, makers = counts_of(self._iterator), max(1, self.workers)
        if counts is None or not self.parallel:
            return 1.0
        return min(makers, counts[1] - counts[0]) / makers

    def drop_ready(self) -> None:
        """Drop the next batch if it is ready; at the end of an epoch, the first one of the next."""
        counts = counts_of(self._iterator)
        if counts is None or counts[0] > 0 or counts[1] == 0:
            self.next()

    def wait_until_idle(self, most_s: float, make_s: float) -> None:
        """Wait until the loader's queues are full, at most ``most_s``.

        If batches cannot be counted, wait for as long as those in flight take, at ``make_s``
        seconds each.
        """
        if not self.parallel:
            return
        deadline = self._time.now() + most_s
        while (counts := counts_of(self._iterator)) is not None and counts[0] < counts[1]:
            if self._time.now() >= deadline:
                return
            self._time.sleep(_POLL_S)
        if counts is None and self._iterator is not None:
            self._time.sleep(min(most_s, max(_UNKNOWN_SETTLE_S, self.in_flight * make_s)))

    def bring_to(self, level: int, most_s: float) -> None:
        """Drop ready batches, or wait for some, until ``level`` are ready, at most ``most_s``.

        A block continues at the level at which the last block of its arm stopped: a queue that was
        filled while another arm ran, or an empty one, is not in its steady state.
        """
        deadline = self._time.now() + most_s
        while self.parallel and (counts := counts_of(self._iterator)) is not None:
            ready, outstanding = counts
            full = ready < level and ready >= outstanding  # as full as it gets
            if ready == level or full or self.left <= 1 or self._time.now() >= deadline:
                return
            if ready < level:
                self._time.sleep(_POLL_S)
                continue
            try:
                self.take()
            except StopIteration:
                return

    def close(self) -> None:
        """Drop the running epoch; torch ends its workers when the iterator is freed."""
        self._iterator = None
        self.taken = 0


def _drawn_by(iterator: Any) -> dict[int, Any]:
    """Return a dict that gets what torch's ``iterator`` draws from now on, by its batch's number.

    With workers, the indices of an epoch's first batches are not in it: they were drawn earlier.
    Nothing gets into it if ``iterator`` is not torch's, or does not keep the order.
    """
    kept: dict[int, Any] = {}
    torchs = type(iterator).__module__ == _BaseDataLoaderIter.__module__
    if (
        torchs
        and iterator._dataset_kind == _DatasetKind.Map
        and getattr(iterator, "_in_order", True)
    ):
        numbers = itertools.count(getattr(iterator, "_send_idx", 0))

        def keep(keys: Any) -> Any:
            kept[next(numbers)] = keys
            return keys

        iterator._sampler_iter = map(keep, iterator._sampler_iter)
    return kept
