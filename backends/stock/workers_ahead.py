"""Share torch's worker iterator between the consumer's thread and the prefetch thread.

    consumer's thread                           prefetch thread
    iter()    sampler ── first tasks ──> workers ──> next()  results, in torch's order
    supply()  sampler ── one task ─────> workers ──> next()

All else is torch's: which worker gets which task, and so its random numbers; the number and order
of draws from generators; errors, pinning, dead workers and shutdown.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch.utils.data
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dataloaders.backend import Ahead, Cancelled, Specification
from dataloaders.batches.tree import Batch
from dataloaders.errors import add_note

_POLL_S = 0.1
"""Seconds between two checks of whether the epoch was cancelled."""

_MOST_NAMED = 64
"""The most samples of a batch that an error names."""


class AheadWorkers(_MultiProcessingDataLoaderIter):
    """torch's multi-process iterator, whose results the prefetch thread takes.

    Attributes:
        tasks: the lock for torch's records of tasks, by which the consumer notifies the thread.
        cancelled: set if the current epoch was ended before its last batch.
    """

    def __init__(self, loader: Specification) -> None:
        self.tasks = threading.Condition()
        self.cancelled = threading.Event()
        self._taking = threading.RLock()  # held for as long as a thread waits for results
        self._drawn: dict[int, Any] = {}  # indices of tasks in flight, if results keep their order
        super().__init__(loader)  # runs _reset() at its end
        self._timeout = 0  # PrefetchedEpoch applies it, from when the consumer waits

    def begin(self, loader: Specification) -> None:
        """Begin a new epoch with the same workers; on the consumer's thread."""
        self.cancelled.set()
        with self._taking, self.tasks:
            self.cancelled = threading.Event()
            self._drawn.clear()
            self._reset(loader)

    def take(self, epoch: WorkersEpoch) -> Batch:
        """Return the next batch of ``epoch``; on the prefetch thread."""
        with self._taking, self.tasks:
            while self._rcvd_idx == self._send_idx and not (epoch.all_drawn or epoch.is_over):
                self.tasks.wait(_POLL_S)  # for the consumer's supply()
            if epoch.is_over:
                raise Cancelled
            received = self._rcvd_idx
            try:
                return super()._next_data()  # type: ignore[no-untyped-call]
            except (StopIteration, Cancelled):
                raise
            except Exception as error:
                answered = self._rcvd_idx > received
                if answered and received in self._drawn:
                    names = _names(self._drawn[received])
                    add_note(error, f"dataloaders: raised in a worker by {names}")
                # Torch's frames would make a cycle of the error and the workers. The worker's own
                # traceback is part of the error's text.
                raise error.with_traceback(None) from None
            finally:
                self._drawn.pop(received, None)

    def send(self, index: Any) -> None:
        """Send the task of one batch to a worker; on the consumer's thread, which holds `tasks`."""
        self._sampler_iter = iter((index,))
        self._try_put_index()

    @property
    def most_tasks(self) -> int:
        """Return how many tasks torch keeps in flight."""
        return int(self._prefetch_factor * self._num_workers)

    # What torch calls

    def _next_data(self) -> None:  # type: ignore[override]
        """Return nothing: the consumer's ``next()`` counts the batches that `take` returned."""

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        if self._in_order and self._dataset_kind == torch.utils.data._DatasetKind.Map:
            self._drawn[self._send_idx] = index
        return index

    def _try_get_data(self, timeout: float = _POLL_S) -> Any:
        # Short waits, to notice that the epoch was cancelled.
        self.tasks.release()  # the consumer may send tasks meanwhile
        try:
            found = super()._try_get_data(_POLL_S)  # type: ignore[no-untyped-call]
        finally:
            self.tasks.acquire()
        if self.cancelled.is_set():
            raise Cancelled
        return found

    def _shutdown_workers(self) -> None:
        # Frameworks call this without knowing of the thread that takes results. When the
        # interpreter exits, that thread may be frozen.
        self.cancelled.set()
        stopped = self._taking.acquire(timeout=1.0)
        try:
            super()._shutdown_workers()
        finally:
            if stopped:
                self._taking.release()


def _names(asked: Any) -> str:
    if not isinstance(asked, (list, tuple)):
        return f"sample {asked!r}"
    first = ", ".join(repr(index) for index in asked[:_MOST_NAMED])
    return f"one of {len(asked)} samples: {first}{', ...' if len(asked) > _MOST_NAMED else ''}"


class WorkersEpoch(Ahead):
    """One epoch of `AheadWorkers`. It holds the workers, and ends when the next epoch begins.

    Attributes:
        iterator: torch's iterator with its workers.
        all_drawn: whether the consumer has no more tasks to send.
    """

    def __init__(self, workers: AheadWorkers) -> None:
        self.iterator = workers
        self._cancelled = workers.cancelled
        self._sampler: Iterator[Any] | None = None
        self.all_drawn = True
        self._received = 0
        if workers._dataset_kind == torch.utils.data._DatasetKind.Map:
            # Torch sends a task for each result that it receives. Here the consumer sends them, so
            # torch gets an empty sampler. Tasks for iterable datasets need no sampler: torch sends
            # these.
            self._sampler, workers._sampler_iter = workers._sampler_iter, iter(())
            self.all_drawn = workers._send_idx < workers.most_tasks

    def __next__(self) -> Batch:
        return self.iterator.take(self)

    @property
    def is_over(self) -> bool:
        """Whether the epoch was cancelled, or a newer one has begun."""
        return self._cancelled.is_set()

    def supply(self, batches: int) -> None:
        """Draw the indices of ``batches`` tasks and send them; see `Ahead`."""
        workers = self.iterator
        self._received += batches
        for _ in range(batches):
            # A dead worker's tasks stay in flight: no more are drawn for its errors.
            full = workers._tasks_outstanding >= workers.most_tasks
            if self._sampler is None or self.all_drawn or self.is_over or full:
                return
            try:
                index = next(self._sampler)
            except StopIteration:
                self.all_drawn = True
            except Exception:
                # As in torch, the epoch ends when a sampler's errors have left no task in flight.
                self.all_drawn = self._received >= workers._send_idx
                raise
            with workers.tasks:
                if not self.all_drawn:
                    workers.send(index)
                workers.tasks.notify_all()

    @property
    def in_flight(self) -> int:
        """Return the number of tasks that torch sends at ``iter()``; see `Ahead`."""
        return int(self.iterator.most_tasks)

    def handed_over(self) -> None:
        """Warn of more batches than an iterable dataset announced, as torch does; see `Ahead`."""
        if self._cancelled is self.iterator.cancelled:  # no newer epoch; workers may have ended
            next(self.iterator)

    def cancel(self) -> None:
        """End the epoch; the workers stay."""
        self._cancelled.set()
