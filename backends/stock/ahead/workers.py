"""torch's worker iterator, shared by the consumer's thread and the prefetch thread.

    consumer's thread                           prefetch thread
    iter()    sampler ── first tasks ──> workers ──> next()  results, in torch's order
    supply()  sampler ── one task ─────> workers ──> next()

The rest is torch's: which worker gets which task and so its random numbers, the number and order of
draws from generators, errors, pinning, the death of workers and shutdown.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.utils.data
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from dataloaders.backend import Ahead, Cancelled, Specification
from dataloaders.batches.tree import Batch
from dataloaders.errors import add_note
from dataloaders.measuring.queues import counts_of

_POLL_S = 0.1
"""The longest wait between two looks at whether the epoch was cancelled."""

_MOST_NAMED = 64
"""The most samples of a batch that an error names."""


class AheadWorkers(_MultiProcessingDataLoaderIter):
    """torch's multi-process iterator; `WorkersEpoch` takes its batches on the prefetch thread."""

    def __init__(self, loader: Specification) -> None:
        # Held by whoever reads or changes what torch keeps about tasks.
        self._state = threading.Condition()
        self._taking: int | None = None  # the thread that is in take()
        self._cancelled = threading.Event()  # the current epoch's
        self._all_drawn = False  # whether the sampler has ended
        self._asked: dict[int, Any] = {}  # the indices of each task in flight
        super().__init__(loader)  # runs _reset() at its end
        # Profiles show the name that they show for torch's iterator.
        self._profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

    def begin(self, loader: Specification) -> None:
        """Begin a new epoch with the same workers; on the consumer's thread."""
        self._stop_taking()
        with self._state:
            self._cancelled = threading.Event()
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
        if not self._has_sampler or self._all_drawn:
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
        self._all_drawn = False
        self._asked.clear()
        super()._reset(loader, first_iter)

    def _next_index(self) -> Any:
        try:
            index = super()._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            self._all_drawn = True
            raise
        if self._in_order:
            self._asked[self._send_idx] = index
        return index

    def _try_put_index(self) -> None:
        # torch sends a task for each result that it receives. The consumer does that in supply(),
        # except for iterable datasets, whose tasks need no sampler.
        if self._taking != threading.get_ident() or not self._has_sampler:
            super()._try_put_index()

    def _next_data(self) -> Batch:
        while self._has_sampler and not self._all_drawn and not self._task_info:
            if self._cancelled.is_set():
                raise Cancelled
            self._state.wait(_POLL_S)  # for supply()
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
        try:
            return super()._process_data(data, *args)  # type: ignore[no-untyped-call]
        except Exception as error:
            failed = isinstance(data, ExceptionWrapper)
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
        """Send tasks; see `Ahead`."""
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
