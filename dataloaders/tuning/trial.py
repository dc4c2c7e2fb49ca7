"""Measure one setting: start-up, then the steady rate in short blocks.

Loading without workers is measured in a separate process (`Loading`), so that the dataset opens
nothing here before workers are forked. All else is measured on the thread of the training loop: by
generators that yield each batch to be stepped on, and measure until the next one is asked for.
`driven` is the loop if the step is a function.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from dataloaders.batches.tree import Batch, copied, counter_of_samples, nbytes
from dataloaders.errors import CheckError
from dataloaders.measuring.clocks import Clock, clock_in_use, cpu_seconds, host_time_of
from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import Interval, interval_of, ratio_draws
from dataloaders.observing import started_quietly
from dataloaders.specification import size_of_batches

T = TypeVar("T")

Step: TypeAlias = Callable[[Batch], object]
Steps: TypeAlias = Generator[Batch, None, T]
"""A generator of batches to be stepped on, which returns the result."""

_BLOCKS = 8  # of a trial, each with at least one batch from each worker
_STEP_BLOCK_S = 0.1
# The first step is slow (lazy initialisation, allocators); the second says how many make a block.
_SLOW_BLOCKS = 2
_HELD_BATCHES = 4
_HELD_BYTES = 256 * 2**20
_JOIN_S = 10.0


@dataclass
class Measured:
    """Holds what a trial measured."""

    seconds_per_batch: Interval  # in the steady state, the step included if there is one
    samples_per_batch: float  # mean
    startup_s: float  # from ``iter()`` to the first batch
    cpu_per_batch: float  # CPU seconds of this process and the workers
    variation: float  # standard deviation over mean of the seconds in ``next()``
    epochs: int  # that were begun; starting them is part of the rate
    batch_bytes: int  # of the largest batch's tensors
    batches: int = 0  # in total
    held: list[Batch] = field(default_factory=list)  # copies of some batches, if wanted

    @property
    def samples_per_second(self) -> Interval:
        """The steady rate."""
        return rate_of(self.samples_per_batch, self.seconds_per_batch)

    def followed_by(self, step: StepCost) -> Measured:
        """Return the same with ``step`` after each batch, on the thread that makes the batches.

        A device goes on working while a batch is made: only the step's time on the thread is added.
        """
        load, whole = self.seconds_per_batch, step.seconds
        ends = ((load.low, whole.low), (load.estimate, whole.estimate), (load.high, whole.high))
        seconds = Interval(*(max(b, a + b * step.on_thread) for a, b in ends))
        return replace(self, seconds_per_batch=seconds)


@dataclass(frozen=True)
class StepCost:
    """Holds the cost of a step."""

    seconds: Interval
    on_thread: float = 1.0  # the share of ``seconds`` after which the step has returned


def driven(steps: Steps[T], step: Step) -> T:
    """Call ``step`` on each batch of ``steps``; return the result of ``steps``.

    If the step raises, ``steps`` is closed first.
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
    """Measures a loader without workers, in the process of `dataloaders.observing.observe`.

    torch has one thread there, as in a worker. The attributes are arguments of `observe`, below.
    """

    loader: torch.utils.data.DataLoader[Any]
    seconds: float
    keep: bool

    def __call__(self, dataset: Any) -> Measured | CheckError:
        """Measure; return the error of a loader that yields nothing."""
        torch_worker._worker_info = None  # a loop without workers collates in memory of its own
        steps = observe(self.loader, stepping=False, seconds=self.seconds, keep=self.keep)
        try:
            return driven(steps, lambda batch: None)
        except CheckError as error:  # raising it would wrap its text in torch's
            return error


def observe(
    loader: torch.utils.data.DataLoader[Any],
    *,
    stepping: bool,
    seconds: float,
    keep: bool = False,
    clock: Clock | None = None,
) -> Steps[Measured]:
    """Measure the batches of ``loader`` for about ``seconds``, in at least two blocks.

    Yields each batch if ``stepping``; keeps copies of some if ``keep``. Errors of the loader are
    raised. Its workers have ended when this returns, raises or is closed. ``clock`` is the step's;
    None: that of the device in use.
    """
    now = host_time_of(clock).now
    with opened(loader) as (feed, workers):
        makers, warmed = loader.num_workers, 1
        began = now()
        batch = feed.next()
        startup_s = now() - began
        batch_bytes = nbytes(batch)
        samples_in = counter_of_samples(batch, size_of_batches(loader))
        held = [copied(batch)] if keep else []
        if stepping:
            yield batch
        # Batches made before anybody took one are not the steady state. Without a step, the queue
        # is empty after one batch of each worker; with a step, it may stay full.
        while warmed <= (makers * (loader.prefetch_factor or 0 if stepping else 1) or feed.ahead):
            if now() - began > startup_s + seconds / 3:
                break
            batch, warmed = feed.next(), warmed + 1
            if stepping:
                yield batch
        clock = clock or clock_in_use()
        marks: list[tuple[Any, Any, int]] = []
        waits: list[float] = []
        samples, start = 0, now()
        cpu = _cpu_s(workers())
        while len(marks) < 2 or now() - start < seconds:
            taken, begin, began = 0, clock.mark(), now()
            # Workers that started together may deliver together, so a block has batches of all.
            while taken % max(1, makers) or now() - began < seconds / _BLOCKS:
                before = now()
                batch = feed.next()
                waits.append(now() - before)
                taken += 1
                samples += samples_in(batch) or 1
                if stepping:
                    yield batch
            marks.append((begin, clock.mark(), taken))
            batch_bytes = max(batch_bytes, nbytes(batch))
            if keep and len(held) < min(_HELD_BATCHES, _HELD_BYTES // max(1, batch_bytes)):
                held.append(copied(batch))  # between blocks: not in the measured time
        cpu = _cpu_s(workers()) - cpu
        clock.wait()
        count, mean_wait = len(waits), statistics.fmean(waits)
        return Measured(
            seconds_per_batch=_interval([(clock.seconds(a, b), taken) for a, b, taken in marks]),
            samples_per_batch=samples / count,
            startup_s=startup_s,
            cpu_per_batch=cpu / count,
            variation=statistics.pstdev(waits) / mean_wait if mean_wait > 0 else 0.0,
            epochs=feed.epoch + 1,
            batch_bytes=batch_bytes,
            batches=warmed + count,
            held=held,
        )


def observe_step(held: list[Batch], seconds: float, clock: Clock | None = None) -> Steps[StepCost]:
    """Measure the step alone for about ``seconds``, on copies of the ``held`` batches."""
    most = max(1, min(64, _HELD_BYTES // max(1, nbytes(held[0]))))
    copies, turn, until = 1, 0, math.inf
    blocks: list[tuple[float, int]] = []
    shares: list[float] = []  # of each block's time that is spent on the thread
    while len(blocks) < _SLOW_BLOCKS + 2 or time.perf_counter() < until:
        # Copies made outside the timing, since a step may write into its batch or pop its keys.
        batches = [copied(held[(turn + number) % len(held)]) for number in range(copies)]
        turn += copies
        now = clock or clock_in_use()  # the first step may initialise a device
        began, begin = time.perf_counter(), now.mark()
        yield from batches
        returned, end = time.perf_counter() - began, now.mark()
        now.wait()
        took = max(now.seconds(begin, end), 1e-9)
        blocks.append((took, copies))
        shares.append(min(1.0, returned / took))
        if len(blocks) <= _SLOW_BLOCKS:
            copies = max(1, min(most, math.ceil(_STEP_BLOCK_S * copies / took)))
            until = time.perf_counter() + seconds
    on_thread = statistics.median(shares[_SLOW_BLOCKS:])
    return StepCost(_interval(blocks[_SLOW_BLOCKS:]), on_thread)


@contextmanager
def opened(
    loader: torch.utils.data.DataLoader[Any],
) -> Iterator[tuple[Feed, Callable[[], list[Any]]]]:
    """Give the loader's feed and a function that returns its workers; end them on leaving."""
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
        if loader.num_workers:  # other children belong to the dataset
            gc.collect()  # an iterator inside another one may be in a reference cycle
        for child in workers():
            child.join(_JOIN_S)


def rate_of(samples: float, cost: Interval) -> Interval:
    """Return samples per second where ``samples`` take ``cost`` seconds."""
    return Interval(*(samples / seconds for seconds in (cost.high, cost.estimate, cost.low)))


def _cpu_s(workers: list[Any]) -> float:
    """Return the CPU seconds of this process, its live ``workers``, and its children that ended."""
    ended = os.times()  # workers end with each epoch
    own = time.process_time() + ended.children_user + ended.children_system
    return own + cpu_seconds(one.pid for one in workers)


def _interval(blocks: list[tuple[float, int]]) -> Interval:
    """Return the mean seconds of a batch with its 95 % interval, within a factor of 4."""
    seconds, steps = np.array(blocks, dtype=float).T
    mean = float(seconds.sum() / steps.sum())
    found = interval_of(mean, ratio_draws(seconds, steps), len(blocks))
    estimate = max(found.estimate, 1e-9)
    return Interval(max(found.low, estimate / 4), estimate, min(found.high, estimate * 4))
