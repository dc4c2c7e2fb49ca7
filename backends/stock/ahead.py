"""torch's worker iterator, driven by a thread of ours, with no gap between epochs.

    consumer's thread                              a thread of ours
    iter() ── _reset(): sampler, first tasks       next() ── _next_data(): results in order,
    supply() ── sampler ──> Indices ─────────────────────>   one new task for each batch taken
        └─ exhausted ──> Foresight ──> NextEpoch ────────>   the next epoch's first tasks
    iter() ── the real sampler agrees? they are this epoch's first tasks; else as torch does

Everything else is torch's: which worker gets which task and so its random stream, draws from
generators in number and order, errors, timeouts, pinning, worker death and shutdown.

A discarded guess leaves no trace in the order of samples, nor in the workers' process-wide
generators, which are put back. What a dataset keeps of its own in a worker (a cache, a counter, a
generator) has moved on by the tasks that were dropped, as it does under torch after an early
``break``; and a dataset that reads shared memory which the loop writes between epochs sees it
earlier than under torch.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, Final

import torch.utils.data
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from dataloaders.backend import Ahead, Cancelled, Specification
from dataloaders.batches.tree import Batch
from dataloaders.errors import add_note
from dataloaders.measuring.queues import counts_of

from .ahead_indices import Dry, Indices
from .ahead_next import Foresight, NextEpoch, indices_of
from .ahead_tell import Tell

__all__ = ["AheadWorkers", "WorkersEpoch"]

_POLL_S = 0.1
"""The longest wait without a look whether it was cancelled."""

_OWING_POLL_S = 0.01
"""The same while workers could have more tasks than they have."""

_NAMED = 64
"""Samples of a batch that an error names, at most."""

_NONE: Final = object()


class Ticket:
    """One epoch's right to take batches from its workers.

    Attributes:
        cancelled: it has none any more.
        taken: how many were begun to be taken, by whoever takes them ahead.
        awaited: for how many the consumer has waited.
        since: when it began to wait for the last of these, by `time.monotonic`.
    """

    __slots__ = ("awaited", "cancelled", "since", "taken")

    def __init__(self) -> None:
        self.cancelled = False
        self.taken = self.awaited = 0
        self.since = 0.0

    def waited(self, begun: float) -> float:
        """Seconds that the consumer has waited for the batch that is taken since ``begun``."""
        if self.awaited < self.taken:
            return 0.0
        return time.monotonic() - max(begun, self.since)


class AheadWorkers(_MultiProcessingDataLoaderIter):
    """torch's multi-process iterator; `WorkersEpoch` hands its batches to a thread.

    ``loader.set_epoch`` reaches the dataset's copies in persistent workers.

    Args:
        loader: what is iterated: the loader or a view of it.
        epoch: the dataset's; see `backends.stock.ahead_next.epoch_of_dataset`.
        foresight: guesses of the next epoch, used where an epoch is driven by a thread.
    """

    def __init__(
        self, loader: Specification, *, epoch: int | None = None, foresight: Foresight | None = None
    ) -> None:
        # torch's own constructor runs _reset() at its end.
        self._busy = threading.RLock()
        self._inside: int | None = None
        self._ticket = Ticket()
        self._indices: Indices | None = None
        self._driven = False
        self._owed = 0
        self._end: int | None = None
        self._failed = False
        self._early: NextEpoch | None = None
        self._early_index: Any = _NONE
        self._asked: dict[int, Any] = {}  # what each task in flight is to fetch
        self._foresight = foresight
        self._epoch = self._epoch_told = epoch  # new workers get the dataset as it is
        if foresight is not None:
            foresight.begin()
        super().__init__(loader)
        # Profiles show the name that they show for torch's iterator.
        self._profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

    def begin(self, loader: Specification, *, epoch: int | None = None) -> None:
        """A new epoch with the same workers; on the consumer's thread."""
        # A thread that still takes the last epoch's batches leaves within the polling time.
        self._ticket.cancelled = True
        with self._busy:
            self._ticket = Ticket()
            self._epoch = epoch
            if self._foresight is not None:
                self._foresight.begin()
            self._reset(loader)

    def drive(self) -> WorkersEpoch:
        """The epoch that has just begun, for a thread to take."""
        # An iterable dataset's tasks are all alike: torch's own sampler draws nothing for them.
        self._driven = self._dataset_kind == torch.utils.data._DatasetKind.Map
        return WorkersEpoch(self, self._ticket)

    def take(self, ticket: Ticket) -> Batch:
        """The next batch, for the epoch that ``ticket`` is of."""
        with self._busy:
            if ticket.cancelled:
                raise Cancelled
            self._inside = threading.get_ident()
            ticket.taken += 1
            try:
                return next(self)
            except (StopIteration, Cancelled):
                raise
            except Exception as error:
                _untie(error)
                raise
            finally:
                self._inside = None

    def supply(self, batches: int) -> None:
        """Draw the indices that the next ``batches`` tasks need; on the consumer's thread.

        Raises:
            Exception: the sampler's own, at the hand-over at which torch raises it.
        """
        indices = self._indices
        if not self._driven or indices is None:
            return
        indices.supply_now(batches)
        if indices.exhausted and self._early is None and self._foresight is not None:
            self._early = self._foresight.foresee()

    # What torch calls, on whichever thread it calls it

    def _reset(self, loader: Specification, first_iter: bool = False) -> None:
        if self._early is not None and self._indices is not None and not self._indices.waiting():
            self._put_owed()  # whoever counts batches may not have asked for the end
        early, self._early = self._early, None
        # A worker whose set-up failed makes what it fetches with only when it is resumed.
        taken = self._end is not None and self._rcvd_idx >= self._end and not self._failed
        self._driven = self._failed = False  # the sampler runs right here
        self._owed, self._end, self._indices = 0, None, None
        self._asked.clear()
        if early is not None and taken and self._foresight is not None:
            state = torch.default_generator.get_state()
            indices = Indices(indices_of(self._index_sampler))
            indices.supply(self._most_tasks)
            if self._foresight.agrees(early, indices.waiting(), self._epoch):
                self._go_on(loader, early, indices)
                return
            self._foresight.missed(state)
            self._indices = indices
        self._reset_as_torch(loader, first_iter, early)

    def _reset_as_torch(
        self, loader: Specification, first_iter: bool, early: NextEpoch | None
    ) -> None:
        put_back = None if early is None or early.sent == 0 else early.number
        # After early tasks, some workers were told their epoch, and some may not have been.
        known = put_back is None and self._epoch == self._epoch_told
        epoch = None if known else self._epoch
        self._epoch_told = self._epoch
        if self._shared_seed is not None or (put_back is None and epoch is None):
            super()._reset(loader, first_iter)
            return
        # torch sends it to each worker on resuming.
        self._shared_seed = Tell(None, epoch=epoch, put_back=put_back)
        try:
            super()._reset(loader, first_iter)
        finally:
            self._shared_seed = None

    def _go_on(self, loader: Specification, early: NextEpoch, indices: Indices) -> None:
        """This epoch began while the last one ended: its first tasks are sent, or are now."""
        _BaseDataLoaderIter._reset(self, loader)
        indices.clear()
        self._indices = indices
        self._put_early(early)
        # Each worker is told by its first task; with fewer tasks than workers, not all are.
        self._epoch_told = self._epoch if early.sent >= self._num_workers else None
        if indices.exhausted:
            self._end = self._send_idx

    def _next_index(self) -> Any:
        index = self._asked[self._send_idx] = self._next_task()
        return index

    def _next_task(self) -> Any:
        if self._early_index is not _NONE:
            return self._early_index
        if self._indices is None:
            self._indices = Indices(self._sampler_iter)
        try:
            return self._indices.take() if self._driven else self._indices.draw()
        except StopIteration:
            self._end = self._send_idx
            raise

    def _try_put_index(self) -> None:
        self._owed += 1
        self._put_owed()

    def _put_owed(self) -> None:
        """Send the tasks that are due, as far as their indices are drawn."""
        while self._owed and self._end is None:
            self._owed -= 1
            try:
                super()._try_put_index()
            except Dry:
                self._owed += 1
                return
        if self._end is not None:
            self._owed = 0
            if self._early is not None:
                self._put_early(self._early)

    def _put_early(self, early: NextEpoch) -> None:
        """Send tasks of the next epoch, no more in flight than torch has."""
        if early.sent == 0:
            self._worker_queue_idx_cycle = itertools.cycle(range(self._num_workers))
        while early.tasks and self._send_idx - self._rcvd_idx < self._most_tasks:
            self._early_index = early.tasks.popleft()
            early.sent += 1
            try:
                super()._try_put_index()
            finally:
                self._early_index = _NONE

    def _next_data(self) -> Batch:
        while self._owed:
            self._put_owed()
            if not self._owed or self._task_info:
                break
            # No task is left to wait for: the next one is the consumer's to supply.
            if self._ticket.cancelled:
                raise Cancelled
            assert self._indices is not None
            self._indices.wait(_POLL_S)
        early = self._early
        if early is not None and self._end is not None and self._rcvd_idx >= self._end:
            self._put_early(early)
            raise StopIteration
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _get_data(self) -> Any:
        # As torch's, which waits in one go for as long as it may.
        begun = time.monotonic()
        while True:
            if self._ticket.cancelled:
                raise Cancelled
            wait = _POLL_S
            if self._owed:
                self._put_owed()
                wait = _OWING_POLL_S if self._owed else _POLL_S
            if self._timeout > 0:
                wait = min(wait, max(0.0, self._timeout - self._ticket.waited(begun)))
            success, data = self._try_get_data(wait)  # type: ignore[no-untyped-call]
            if success:
                return data
            if self._shutdown:
                raise Cancelled
            if self._timeout > 0:
                if self._ticket.waited(begun) >= self._timeout:
                    raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
            elif self._pin_memory and not self._pin_memory_thread.is_alive():
                raise RuntimeError("Pin memory thread exited unexpectedly")

    def _shutdown_workers(self) -> None:
        # Called at the interpreter's end too, after it has set the names of this module to None.
        if _utils is None or _utils.python_exit_status is not False:
            super()._shutdown_workers()
            return
        if self._inside == threading.get_ident():  # the epoch's end, on the thread that takes it
            super()._shutdown_workers()
            return
        # Whoever shuts down the workers (Lightning does) knows nothing of a thread in next().
        self._ticket.cancelled = True
        entered = self._busy.acquire(timeout=10 * _POLL_S)
        try:
            super()._shutdown_workers()
        finally:
            if entered:
                self._busy.release()

    def _process_data(self, data: Any, *args: Any) -> Batch:
        number = self._rcvd_idx - 1  # in order; else any of those in flight
        asked = self._asked.pop(number, None)
        self._failed = self._failed or isinstance(data, ExceptionWrapper)
        if not isinstance(data, ExceptionWrapper) or not (self._driven and self._in_order):
            return super()._process_data(data, *args)  # type: ignore[no-untyped-call]
        try:
            return super()._process_data(data, *args)  # type: ignore[no-untyped-call]
        except Exception as error:
            add_note(error, f"dataloaders: raised in a worker by {_names(asked)}")
            raise

    @property
    def _most_tasks(self) -> int:
        return int(self._prefetch_factor * self._num_workers)


def _names(asked: Any) -> str:
    if not isinstance(asked, (list, tuple)):
        return f"sample {asked!r}"
    first = ", ".join(repr(index) for index in asked[:_NAMED])
    return f"one of {len(asked)} samples: {first}{', ...' if len(asked) > _NAMED else ''}"


def _untie(error: Exception) -> None:
    """Have torch's frames in the traceback of ``error`` forget their variables.

    Raising a worker's error ties it and these frames into a cycle that holds the iterator. Found by
    the collector, its queues would end before it can tell the workers to: torch then waits five
    seconds for each.
    """
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith("torch."):
            try:
                trace.tb_frame.clear()
            except RuntimeError:  # it is still running
                pass
        trace = trace.tb_next


class WorkersEpoch(Ahead):
    """One epoch of `AheadWorkers`; it holds the workers, and ends when the next epoch begins.

    Attributes:
        base_seed: as torch drew it at ``iter()``; of persistent workers, when they were started.
    """

    def __init__(self, workers: AheadWorkers, ticket: Ticket) -> None:
        self._workers = workers
        self._ticket = ticket
        self._counted: _Counted | None = None
        if workers._IterableDataset_len_called is not None:
            self._counted = _Counted(workers)
            workers._IterableDataset_len_called = None  # so that the thread does not warn
        self.base_seed = int(workers._base_seed)

    def __next__(self) -> Batch:
        return self._workers.take(self._ticket)

    def __len__(self) -> int:
        return len(self._workers)

    def supply(self, batches: int) -> None:
        """Draw indices, and foresee the next epoch once there are no more; see `Ahead`."""
        if not self._ticket.cancelled:
            self._workers.supply(batches)

    def awaited(self) -> None:
        """From now on ``timeout`` counts, as torch's; see `Ahead`."""
        self._ticket.since = time.monotonic()
        self._ticket.awaited += 1

    @property
    def iterator(self) -> AheadWorkers:
        """torch's, with its workers; see `Ahead`."""
        return self._workers

    @property
    def in_flight(self) -> int:
        """As many as torch orders from its workers at ``iter()``; see `Ahead`."""
        return self._workers._most_tasks

    def counts(self) -> tuple[int, int] | None:
        """How full the workers' queues are; see `dataloaders.measuring.queues.counts_of`."""
        return counts_of(self._workers)

    def handed_over(self) -> None:
        """Warn of more batches than an iterable dataset said, as torch does; see `Ahead`."""
        if self._counted is not None:
            next(self._counted)

    def cancel(self) -> None:
        """No batch is taken any more; the workers stay."""
        self._ticket.cancelled = True


class _Counted(_BaseDataLoaderIter):
    """torch's count of the batches that are handed over, and its warning; not the batches."""

    def __init__(self, workers: AheadWorkers) -> None:
        self.__dict__.update(vars(workers))

    def _next_data(self) -> None:  # type: ignore[override]
        return None
