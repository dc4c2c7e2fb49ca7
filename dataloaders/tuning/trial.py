"""One setting, measured: start-up, then the steady rate in short blocks.

Loading without workers is measured in a process of its own (`Loading`), so that nothing of the
dataset is opened here before workers are forked. All else is measured on the thread of a loop that
asks for batches: the functions here are generators, which yield each batch that is to be stepped on
and take the time until they are asked for the next one. `driven` is the loop where the step is a
function.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from dataloaders.batches.tree import Batch, map_tensors, nbytes, samples_in, to_device
from dataloaders.errors import CheckError
from dataloaders.machine import resources
from dataloaders.measuring.clocks import Clock, clock_of, cpu_seconds, host_time_of
from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import Interval, interval_of, ratio_draws
from dataloaders.observing import started_quietly

T = TypeVar("T")

Step: TypeAlias = Callable[[Batch], object]
Steps: TypeAlias = Generator[Batch, None, T]
"""Batches to be stepped on, one by one; what it returns is known when the last one was."""

_BLOCKS = 8  # in a trial, of at least a batch from each worker
_STEP_BLOCK_S = 0.1
# The first step is slow (lazy initialisation, allocators) and not part of the steady state; the
# second says how many make a block.
_SLOW_BLOCKS = 2
_HELD_BATCHES = 4
_HELD_BYTES = 256 * 2**20
_JOIN_S = 10.0


@dataclass
class Seen:
    """What a trial saw."""

    seconds_per_batch: Interval  # in the steady state; with a step, of loading and stepping
    samples_per_batch: float  # the mean
    startup_s: float  # from ``iter()`` to the first batch
    cpu_per_batch: float  # CPU seconds of this process and the workers
    variation: float  # standard deviation over mean of the time inside ``next()``
    epochs: int  # that were begun; the turns from one to the next are counted in
    batch_bytes: int  # the tensors of the largest batch looked at
    batches: int = 0  # taken in all
    held: list[Batch] = field(default_factory=list)  # some of them, copied, if wanted
    memory_per_worker: int | None = None  # see `Trial`

    @property
    def samples_per_second(self) -> Interval:
        """The steady rate."""
        return _rate(self.samples_per_batch, self.seconds_per_batch)

    def followed_by(self, step: StepCost) -> Seen:
        """Return the same with ``step`` after each batch, on the thread that made the batch.

        While a batch is made a device works on: only what the step takes of the thread adds up.
        """
        load, whole = self.seconds_per_batch, step.seconds
        ends = ((load.low, whole.low), (load.estimate, whole.estimate), (load.high, whole.high))
        return replace(
            self,
            seconds_per_batch=Interval(*(max(b, a + b * step.on_thread) for a, b in ends)),
            cpu_per_batch=self.cpu_per_batch + step.cores * whole.estimate,
        )


@dataclass(frozen=True)
class StepCost:
    """What a step takes for a batch."""

    seconds: Interval  # of the clock
    cores: float  # CPU seconds per second of all threads
    on_thread: float = 1.0  # the part of ``seconds`` until the step returns, before a device ends

    def samples_per_second(self, batch: float) -> Interval:
        """Return the rate of batches of so many samples."""
        return _rate(batch, self.seconds)


def driven(steps: Steps[T], step: Step) -> T:
    """Return what ``steps`` returns, with ``step`` called on each of its batches.

    ``steps`` has ended when this raises what the step raised.
    """
    with closing(steps):
        while True:
            try:
                batch = next(steps)
            except StopIteration as end:
                found: T = end.value
                return found
            step(batch)


@dataclass(frozen=True)
class Loading:
    """A look at a dataset (`dataloaders.observing`): what a loader without workers takes for it.

    torch computes with one thread there, as in a worker. ``loader`` is a variant of the user's;
    ``seconds`` and ``keep`` are as `observe` takes them.
    """

    loader: torch.utils.data.DataLoader[Any]
    seconds: float
    keep: bool

    def __call__(self, dataset: Any) -> Seen | CheckError:
        """Return what was seen, or why nothing was."""
        torch_worker._worker_info = None  # a loop without workers collates in memory of its own
        try:
            return driven(self.steps(), lambda batch: None)
        except CheckError as error:  # raised, it would have torch's text around its own
            return error

    def steps(self) -> Steps[Seen]:
        """Look in this process."""
        return observe(self.loader, stepping=False, seconds=self.seconds, keep=self.keep)


def observe(
    loader: torch.utils.data.DataLoader[Any],
    *,
    stepping: bool,
    seconds: float,
    keep: bool = False,
    clock: Clock | None = None,
) -> Steps[Seen]:
    """Measure the cost of ``loader``'s batches for about ``seconds``, in at least two blocks.

    Yields every batch if ``stepping``, none otherwise, and holds copies of some if ``keep``.
    Whatever the loader raises passes through. The loader's workers have ended when this returns or
    raises, or is closed. ``clock`` is the step's; None: that of the device in use.
    """
    now = host_time_of(clock).now
    with _opened(loader) as (feed, workers):

        def take() -> Batch:
            batch = feed.next()
            return batch if feed.copies_to is None else to_device(batch, feed.copies_to)

        count, warmed = loader.num_workers, 1
        began = now()
        batch = take()
        startup_s = now() - began
        batch_bytes = nbytes(batch)
        held = [_copy(batch)] if keep else []
        if stepping:
            yield batch
        # Not yet the steady state: what workers made while nobody took anything. Without a step the
        # queue is empty again after one batch of each; a step may find it full.
        while warmed <= (count * (loader.prefetch_factor or 0 if stepping else 1) or feed.ahead):
            if now() - began > startup_s + seconds / 3:
                break
            batch, warmed = take(), warmed + 1
            if stepping:
                yield batch
        clock, processes = clock or _clock(), [one.pid for one in workers()]
        marks: list[tuple[Any, Any, int]] = []
        # A batch that takes longer than a whole trial is not measured more often than needed.
        slow = [(startup_s, 1)] if count == 0 and not stepping and startup_s > seconds else []
        waits: list[float] = []
        samples, start = 0, now()
        cpu = time.process_time() + cpu_seconds(processes)
        while len(marks) + len(slow) < 2 or now() - start < seconds:
            taken, begin, began = 0, clock.mark(), now()
            # Workers that started together may go on delivering together: a block has turns of all.
            while taken % max(1, count) or now() - began < seconds / _BLOCKS:
                before = now()
                batch = take()
                waits.append(now() - before)
                taken += 1
                samples += samples_in(batch) or 1
                if stepping:
                    yield batch
            marks.append((begin, clock.mark(), taken))
            batch_bytes = max(batch_bytes, nbytes(batch))
            if keep and len(held) < min(_HELD_BATCHES, _HELD_BYTES // max(1, batch_bytes)):
                held.append(_copy(batch))  # between blocks, where the copy costs no measured time
        cpu = time.process_time() + cpu_seconds(processes) - cpu
        clock.wait()
        blocks = [(clock.seconds(begin, end), taken) for begin, end, taken in marks]
        mean_wait = statistics.fmean(waits)
        count = len(waits)
        return Seen(
            _interval(slow + blocks), samples / count, startup_s, cpu / count,
            statistics.pstdev(waits) / mean_wait if mean_wait > 0 else 0.0, feed.epoch + 1,
            batch_bytes, warmed + count, held, _memory_per_worker(processes),
        )  # fmt: skip


def observe_step(held: list[Batch], seconds: float, clock: Clock | None = None) -> Steps[StepCost]:
    """Measure the step on batches that cost nothing, for ``seconds``; yields copies of ``held``."""
    most = max(1, min(64, _HELD_BYTES // max(1, nbytes(held[0]))))
    copies, turn, until = 1, 0, math.inf
    blocks: list[tuple[float, int]] = []
    shares: list[tuple[float, float]] = []  # of a block's seconds: CPU, and until the step returned
    while len(blocks) < _SLOW_BLOCKS + 2 or time.perf_counter() < until:
        # Copies, made outside the timing: a step may write into its batch or pop its keys.
        batches = [_copy(held[(turn + number) % len(held)]) for number in range(copies)]
        turn += copies
        now = clock or _clock()  # the first step may bring a device up
        cpu, began, begin = time.process_time(), time.perf_counter(), now.mark()
        yield from batches
        returned, end = time.perf_counter() - began, now.mark()
        now.wait()
        took = max(now.seconds(begin, end), 1e-9)
        blocks.append((took, copies))
        shares.append(((time.process_time() - cpu) / took, min(1.0, returned / took)))
        if len(blocks) <= _SLOW_BLOCKS:
            copies = max(1, min(most, math.ceil(_STEP_BLOCK_S * copies / took)))
            until = time.perf_counter() + seconds
    cores, on_thread = map(statistics.median, zip(*shares[_SLOW_BLOCKS:], strict=True))
    return StepCost(_interval(blocks[_SLOW_BLOCKS:]), cores, on_thread)


@contextmanager
def _opened(
    loader: torch.utils.data.DataLoader[Any],
) -> Iterator[tuple[Feed, Callable[[], list[Any]]]]:
    """Give a loader's feed, and what returns its workers; on leaving, these have ended."""
    known = {child.pid for child in multiprocessing.active_children()}
    made: list[Any] = []

    def iterate() -> Iterator[Batch]:
        made[:] = [started_quietly(lambda: iter(loader))]
        return made[0]  # type: ignore[no-any-return]

    def workers() -> list[Any]:
        children = multiprocessing.active_children() if loader.num_workers else []
        return [one for one in children if one.pid not in known]

    feed = Feed(loader, iterate)
    try:
        yield feed, workers
    finally:
        feed.close()
        loader._iterator = None
        session = getattr(loader, "_session", None)
        if session is not None:
            session.close()
        iterator = made.pop() if made else None
        end = getattr(iterator, "_shutdown_workers", None) or getattr(iterator, "close", None)
        if callable(end):
            end()
        del iterator, end
        if loader.num_workers:  # children are else the dataset's own affair
            gc.collect()  # an iterator inside another one may sit in a reference cycle
        for child in workers():
            child.join(_JOIN_S)


def _clock() -> Clock:
    """Return the clock of the devices on which this process has tensors, if there are any."""
    kind = _device_in_use()
    if kind is None:
        return clock_of([])
    current, count = torch.accelerator.current_device_index(), torch.accelerator.device_count()
    # A mark on a device that nobody uses would bring it up.
    used = [n for n in range(count) if n == current or torch.accelerator.memory_allocated(n)]
    return clock_of([torch.device(kind.type, index) for index in used])


def _device_in_use() -> torch.device | None:
    """Return the accelerator if this process has initialised it.

    Asking must not do so: a process that has brought CUDA up cannot fork workers that use it.
    """
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    # MPS needs no initialisation.
    initialised = getattr(torch.get_device_module(device), "is_initialized", lambda: True)
    return device if initialised() else None


def _copy(batch: Batch) -> Batch:
    """Copy a batch to memory of the same sort: from pageable memory a device gets it slower."""
    used = _device_in_use() is not None

    def copied(leaf: torch.Tensor) -> torch.Tensor:
        clone = leaf.detach().clone()
        return clone.pin_memory() if used and leaf.is_pinned() else clone

    return map_tensors(batch, copied)


def _rate(samples: float, cost: Interval) -> Interval:
    return Interval(*(samples / seconds for seconds in (cost.high, cost.estimate, cost.low)))


def _interval(blocks: list[tuple[float, int]]) -> Interval:
    """Return the mean of a batch with its 95 % interval, kept within what a rate can be."""
    seconds, steps = np.array(blocks, dtype=float).T
    mean = float(seconds.sum() / steps.sum())
    found = interval_of(mean, ratio_draws(seconds, steps), len(blocks))
    estimate = max(found.estimate, 1e-9)
    return Interval(max(found.low, estimate / 4), estimate, min(found.high, estimate * 4))


def _memory_per_worker(workers: list[int]) -> int | None:
    """Return the bytes of the largest worker by the end of an epoch; None if they are not known.

    Its private pages, and what it may come to copy of the pages that it shares with this process:
    no more than counting references comes to (`resources.python_heap_bytes`), since arrays, however
    large, are not copied by being read.
    """
    heap = resources.python_heap_bytes()
    found = map(resources.process_memory, workers)
    return max(
        (m.private + min(m.shared_anonymous, heap) for m in found if m is not None), default=None
    )
