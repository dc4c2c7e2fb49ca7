"""torch's worker iterator, shared by the consumer's thread and the prefetch thread.

    consumer's thread                           prefetch thread
    iter()    sampler ── first tasks ──> workers ──> next()  results, in torch's order
    supply()  sampler ── one task ─────> workers ──> next()
              sampler exhausted: first tasks of the guessed next epoch
    iter()    the real sampler agrees? then they are this epoch's; else everything as torch does

The rest is torch's: which worker gets which task and so its random numbers, the number and order of
draws from generators, errors, pinning, the death of workers and shutdown.

A wrong guess leaves no trace in the order of samples, nor in the workers' process-wide generators,
which are put back. What a dataset keeps of its own in a worker (a cache, a counter, a generator)
has moved on by the dropped tasks, as it does under torch after an early ``break``. A dataset that
reads shared memory which the loop writes between epochs sees it earlier than under torch.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch.utils.data
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from dataloaders.backend import Ahead, Cancelled, Specification
from dataloaders.batches.tree import Batch
from dataloaders.errors import add_note
from dataloaders.measuring.queues import counts_of

from .messages import WorkerMessage
from .next_epoch import EarlyTasks, NextEpochGuess

__all__ = ["AheadWorkers", "WorkersEpoch"]

_POLL_S = 0.1
"""The longest wait between two looks at whether the epoch was cancelled."""

_MOST_NAMED = 64
"""The most samples of a batch that an error names."""


class AheadWorkers(_MultiProcessingDataLoaderIter):
    """torch's multi-process iterator; `WorkersEpoch` takes its batches on the prefetch thread.

    ``loader.set_epoch`` reaches the copies of the dataset in persistent workers.

    Args:
        loader: what is iterated: the loader or a view of it.
        dataset_epoch: the dataset's epoch; see `next_epoch.epoch_of_dataset`.
        guess: of the next epoch's first tasks; None: they are not guessed.
    """

    def __init__(
        self,
        loader: Specification,
        *,
        dataset_epoch: int | None = None,
        guess: NextEpochGuess | None = None,
    ) -> None:
        # Held by whoever reads or changes what torch keeps about tasks.
        self._state = threading.Condition()
        self._taking: int | None = None  # the thread that is in take()
        self._cancelled = threading.Event()  # the current epoch's
        self._end: int | None = None  # the number of this epoch's tasks, once it is known
        self._drawn: Iterator[Any] | None = None  # the sampler's iterator, if not torch's own
        self._guess = guess
        self._early: EarlyTasks | None = None
        self._asked: dict[int, Any] = {}  # the indices of each task in flight
        self._worker_failed = False
        self._dataset_epoch = self._workers_epoch = dataset_epoch
        super().__init__(loader)  # runs _reset() at its end
        # Profiles show the name that they show for torch's iterator.
        self._profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

    def begin(self, loader: Specification, *, dataset_epoch: int | None = None) -> None:
        """Begin a new epoch with the same workers; on the consumer's thread."""
        self._stop_taking()
        with self._state:
            self._cancelled = threading.Event()
            self._dataset_epoch = dataset_epoch
            self._reset(loader)

    def epoch(self) -> WorkersEpoch:
        """Return the epoch that has just begun."""
        return WorkersEpoch(self, self._cancelled)

    def take(self, cancelled: threading.Event) -> Batch:
        """Return the next batch of the epoch that ``cancelled`` belongs to."""
        with self._state:
            if cancelled.is_set():
                raise Cancelled
            self._taking = threading.get_ident()
            try:
                return next(self)
            except (StopIteration, Cancelled):
                raise
            except Exception as error:
                _clear_torch_frames(error)
                raise
            finally:
                self._taking = None
                self._state.notify_all()

    def supply(self, batches: int) -> None:
        """Draw the indices of ``batches`` tasks and send them; on the consumer's thread.

        Raises:
            Exception: the sampler's own.
        """
        if not self._has_sampler or (self._end is not None and self._early is None):
            return  # nothing to send, and the thread may hold the lock while workers end
        with self._state:
            try:
                for _ in range(batches):
                    if self._tasks_outstanding < self._most_tasks:
                        super()._try_put_index()
            finally:
                self._state.notify_all()

    # What torch calls, on either thread

    def _reset(self, loader: Specification, first_iter: bool = False) -> None:
        early, self._early = self._early, None
        # A worker whose set-up failed keeps failing until it is resumed, so nothing it made counts.
        whole = self._end is not None and self._rcvd_idx >= self._end and not self._worker_failed
        self._end, self._drawn, self._worker_failed = None, None, False
        if early is not None and whole and self._continue_with(early, loader):
            return
        self._asked.clear()
        restore = early.number if early is not None and early.sent else None
        # Some workers heard of the guessed epoch and some did not, so all of them are told.
        changed = restore is not None or self._dataset_epoch != self._workers_epoch
        self._workers_epoch = self._dataset_epoch
        if not changed or self._shared_seed is not None:
            super()._reset(loader, first_iter)
            return
        # torch sends the shared seed to each worker when it resumes it.
        self._shared_seed = WorkerMessage(None, set_epoch=self._dataset_epoch, restore=restore)
        try:
            super()._reset(loader, first_iter)
        finally:
            self._shared_seed = None

    def _continue_with(self, early: EarlyTasks, loader: Specification) -> bool:
        """Make ``early`` the first tasks of the new epoch, if its sampler agrees."""
        assert self._guess is not None
        state = torch.default_generator.get_state()
        source = iter(self._index_sampler)
        first = list(itertools.islice(source, self._most_tasks))
        if not self._guess.agrees(early, first, self._dataset_epoch):
            self._guess.missed(state)
            self._drawn = itertools.chain(first, source)
            return False
        _BaseDataLoaderIter._reset(self, loader)
        # Each worker hears of the epoch with its first task, unless it gets none.
        told = len(first) >= self._num_workers
        self._workers_epoch = self._dataset_epoch if told else None
        self._drawn = itertools.chain(early, source)  # early tasks that were not sent yet
        while self._end is None and self._send_idx - self._rcvd_idx < self._most_tasks:
            super()._try_put_index()
        return True

    def _next_index(self) -> Any:
        if self._end is None:
            try:
                index = next(self._sampler_iter if self._drawn is None else self._drawn)
            except StopIteration:
                self._end = self._send_idx
                if self._guess is not None:
                    self._early = self._guess.first_tasks()
                    self._worker_queue_idx_cycle = itertools.cycle(range(self._num_workers))
        if self._end is not None:
            if self._early is None:
                raise StopIteration
            index = next(self._early)
        if self._in_order:
            self._asked[self._send_idx] = index
        return index

    def _try_put_index(self) -> None:
        # torch sends a task for each result that it receives. The consumer does that in supply(),
        # except for iterable datasets, whose tasks need no sampler.
        if self._taking != threading.get_ident() or not self._has_sampler:
            super()._try_put_index()

    def _next_data(self) -> Batch:
        while self._has_sampler and self._end is None and not self._task_info:
            if self._cancelled.is_set():
                raise Cancelled
            self._state.wait(_POLL_S)  # for supply()
        if self._early is not None and self._end is not None and self._rcvd_idx >= self._end:
            raise StopIteration
        return super()._next_data()  # type: ignore[no-untyped-call]

    def _get_data(self) -> Any:
        # As torch's, in waits short enough to notice a cancelled epoch. PrefetchedEpoch counts
        # ``timeout``, from when the consumer waits.
        while not (self._cancelled.is_set() or self._shutdown):
            self._state.release()  # the consumer may send tasks meanwhile
            try:
                success, data = self._try_get_data(_POLL_S)  # type: ignore[no-untyped-call]
            finally:
                self._state.acquire()
            if success:
                return data
            if self._pin_memory and not self._pin_memory_thread.is_alive():
                raise RuntimeError("Pin memory thread exited unexpectedly")
        raise Cancelled

    def _process_data(self, data: Any, *args: Any) -> Batch:
        asked = self._asked.pop(self._rcvd_idx - 1, None)
        failed = isinstance(data, ExceptionWrapper)
        self._worker_failed = self._worker_failed or failed
        try:
            return super()._process_data(data, *args)  # type: ignore[no-untyped-call]
        except Exception as error:
            if failed and self._in_order and self._has_sampler:
                add_note(error, f"dataloaders: raised in a worker by {_names(asked)}")
            raise

    def _shutdown_workers(self) -> None:
        # Called at the interpreter's end too, after it has set the names of this module to None.
        running = _utils is not None and _utils.python_exit_status is False
        if running and self._taking != threading.get_ident():
            # Frameworks call this without knowing that a thread is in take().
            self._stop_taking(timeout=10 * _POLL_S)
        super()._shutdown_workers()

    def _stop_taking(self, timeout: float | None = None) -> None:
        """Cancel the epoch, and wait until no thread is in `take`."""
        self._cancelled.set()
        with self._state:
            self._state.wait_for(lambda: self._taking is None, timeout)

    @property
    def _most_tasks(self) -> int:
        return int(self._prefetch_factor * self._num_workers)

    @property
    def _has_sampler(self) -> bool:
        return self._dataset_kind == torch.utils.data._DatasetKind.Map


def _names(asked: Any) -> str:
    if isinstance(asked, WorkerMessage):
        asked = asked.value
    if not isinstance(asked, (list, tuple)):
        return f"sample {asked!r}"
    first = ", ".join(repr(index) for index in asked[:_MOST_NAMED])
    return f"one of {len(asked)} samples: {first}{', ...' if len(asked) > _MOST_NAMED else ''}"


def _clear_torch_frames(error: Exception) -> None:
    """Clear the variables of torch's frames in the traceback of ``error``.

    Raising a worker's error ties it and these frames into a cycle that holds the iterator. If the
    collector found the cycle, it would end the queues before the iterator can tell the workers to
    end, and torch would wait five seconds for each of them.
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
    """One epoch of `AheadWorkers`. It holds the workers, and ends when the next epoch begins.

    Attributes:
        base_seed: as torch drew it at ``iter()``; of persistent workers, when they were started.
    """

    def __init__(self, workers: AheadWorkers, cancelled: threading.Event) -> None:
        self._workers = workers
        self._cancelled = cancelled
        self._counter: _BatchCounter | None = None
        if workers._IterableDataset_len_called is not None:
            self._counter = _BatchCounter(workers)
            workers._IterableDataset_len_called = None  # so that the thread does not warn
        self.base_seed = int(workers._base_seed)

    def __next__(self) -> Batch:
        return self._workers.take(self._cancelled)

    def __len__(self) -> int:
        return len(self._workers)

    def supply(self, batches: int) -> None:
        """Send tasks; after the last one, tasks of the guessed next epoch. See `Ahead`."""
        if not self._cancelled.is_set():
            self._workers.supply(batches)

    @property
    def iterator(self) -> AheadWorkers:
        """Return torch's iterator with its workers; see `Ahead`."""
        return self._workers

    @property
    def in_flight(self) -> int:
        """Return the number of tasks that torch sends at ``iter()``; see `Ahead`."""
        return self._workers._most_tasks

    def counts(self) -> tuple[int, int] | None:
        """Count batches in the workers' queues; see `dataloaders.measuring.queues.counts_of`."""
        return counts_of(self._workers)

    def handed_over(self) -> None:
        """Warn of more batches than an iterable dataset announced, as torch does; see `Ahead`."""
        if self._counter is not None:
            next(self._counter)

    def cancel(self) -> None:
        """End the epoch; the workers stay."""
        self._cancelled.set()


class _BatchCounter(_BaseDataLoaderIter):
    """torch's count of batches and its warning, without the batches."""

    def __init__(self, workers: AheadWorkers) -> None:
        self.__dict__.update(vars(workers))

    def _next_data(self) -> None:  # type: ignore[override]
        return None
