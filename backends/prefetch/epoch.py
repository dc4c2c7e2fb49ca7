"""Iterate an epoch for a loop: over batches taken ahead, or taken when they are asked for.

PrefetchedEpoch    the prefetch thread takes batches; ``next()`` hands out those that are ready
SynchronousEpoch   the user's own Python makes batches here, on the loop's thread
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from queue import Empty
from typing import Any

from torch.profiler import record_function

from dataloaders.backend import Ahead, Session
from dataloaders.batches.tree import Batch
from dataloaders.measuring.queues import counts_of

from .thread import Epoch, Failed, Item
from .transfer import Transfer

# The longest wait without a look at ``timeout`` and at signals: a signal does not end a wait for a
# lock if it comes a moment before, or if the kernel delivers it to another thread.
_POLL_S = 0.2


class _OverTorchs(Iterator[Batch]):
    """What every epoch has of the iterator it takes batches of, such as torch's ``_workers``."""

    _iterator: Any

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)


class PrefetchedEpoch(_OverTorchs):
    """One epoch of batches that the prefetch thread takes and sends ahead of use.

    Args:
        source: yields the batches.
        epoch: shared with the thread.
        transfer: moves batches to the device.
        inner: the session of ``source``, kept open until the epoch is over.
        timeout: seconds to wait for a batch; 0: for ever, as in torch's loader.
    """

    def __init__(
        self, source: Ahead, epoch: Epoch, transfer: Transfer, inner: Session, timeout: float
    ) -> None:
        self._source: Ahead | None = source
        self._iterator = source.iterator
        self._epoch = epoch
        self._transfer = transfer
        self._inner: Session | None = inner
        self._timeout = timeout
        # Without workers torch draws when a batch is asked for. So what the thread takes ahead is
        # drawn when the first batch is asked for.
        self._first = max(0, transfer.slots - source.in_flight)
        self._stop = weakref.finalize(self, epoch.stop)

    def __next__(self) -> Batch:
        source = self._source
        if source is None:
            raise StopIteration
        self._epoch.check_process()
        first, self._first = self._first, 0
        if first:
            source.supply(first)
        with record_function("dataloaders: wait"):
            item = self._next_item()
        if item is None:
            self._source = self._inner = None
            self._stop()
            raise StopIteration
        try:
            try:
                # As in torch: after each batch the sampler draws once. Its error is raised instead
                # of the batch, or of the batch's own error.
                source.supply(1)
            finally:
                batch = None if isinstance(item, Failed) else self._transfer.receive(item)
            if isinstance(item, Failed):
                raise item.error
            source.handed_over()
            return batch
        finally:
            self._epoch.free_slot()
            batch = None
            del item, source  # a traceback must keep none of them alive

    def _next_item(self) -> Item:
        asked = time.monotonic()
        poll = min(_POLL_S, self._timeout) if self._timeout > 0 else _POLL_S
        while True:
            try:
                return self._epoch.ready.get(timeout=poll)
            except Empty:
                since = self._epoch.taking_since
            if self._timeout <= 0 or since is None:
                continue  # a wait for the device does not count
            if time.monotonic() - max(asked, since) >= self._timeout:
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")

    @property
    def running(self) -> bool:
        """Whether further batches may come."""
        return self._source is not None

    @property
    def ahead(self) -> int:
        """Return how many batches may be taken beyond those that the inner loader queues."""
        return self._transfer.slots

    def counts(self) -> tuple[int, int] | None:
        """Count ready and outstanding batches; see `dataloaders.measuring.queues.counts_of`."""
        inner, ready = counts_of(self._iterator), self._epoch.ready.qsize()
        if inner is None:
            # No workers: the thread alone makes batches, until its slots are full.
            return ready, ready if self._epoch.done.is_set() else max(ready, self.ahead)
        # The inner loader counts the batch that the thread waits for.
        return ready + inner[0], ready + inner[1]


class SynchronousEpoch(_OverTorchs):
    """One epoch of batches that only the loop's own thread may take; each is copied at once."""

    def __init__(self, batches: Iterator[Batch], transfer: Transfer, inner: Session) -> None:
        self._iterator = batches
        self._transfer = transfer
        self._inner: Session | None = inner

    def __next__(self) -> Batch:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._inner = None
            raise
        return self._transfer.receive(self._transfer.send(batch))

    @property
    def running(self) -> bool:
        """Whether further batches may come."""
        return self._inner is not None
