"""One setting, measured: start-up, then the steady rate in short blocks until it is clear.

Loading without workers is measured in a process of its own (`Loading`), so that nothing of the
dataset is opened here before workers are forked. All else is measured where the step runs, on the
thread of a loop that asks for batches: so the functions here are generators, which yield each
batch that is to be stepped on and take the time until they are asked for the next one. `driven` is
the loop where the step is a function.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import psutil
import torch
from torch.utils.data._utils import worker as torch_worker

from dataloaders.batches.tree import Batch, map_tensors, nbytes, samples_in
from dataloaders.errors import CheckError
from dataloaders.measuring.intervals import Interval, Timed, resample
from dataloaders.measuring.queues import counts_of
from dataloaders.tuning import device, usage

__all__ = [
    "Loading",
    "Observation",
    "Step",
    "StepCost",
    "Steps",
    "driven",
    "observe",
    "observe_step",
]

T = TypeVar("T")

Step: TypeAlias = Callable[[Batch], object]
Steps: TypeAlias = Generator[Batch, None, T]
"""Batches to be stepped on, one by one; what it returns is known when the last one was."""

_BLOCK_S = 0.1
_LEAST_S = 0.4
_LEAST_BLOCKS = 5
_ENOUGH = 0.02  # relative half width of the interval at which a trial may end
_HELD_BATCHES = 4
_HELD_BYTES = 256 * 2**20
_LONGEST_BLOCK = 1 << 16
_JOIN_S = 10.0


@dataclass
class Observation:
    """What a trial saw; times in seconds, per batch where the name says so.

    Attributes:
        seconds_per_batch: in the steady state; with a step, of loading and stepping.
        samples_per_batch: the mean.
        startup_s: from ``iter()`` to the first batch.
        waiting_per_batch: inside ``next()``; without workers, what a batch costs to make.
        cpu_waiting_per_batch: CPU seconds of this process inside ``next()``, and the seconds for
            which its thread could have run and had no core: with other work on the machine, that
            is no waiting which more workers could overlap.
        cpu_per_batch: CPU seconds of this process and the workers, in all.
        variation: standard deviation over mean of the time inside ``next()``.
        epochs_inside: whether epochs ended within the trial (their turns are then counted in).
        batch_bytes: the tensors of the largest batch held.
        batches: taken in all.
        held: some of its batches, copied; only with a step and without workers.
        memory_per_worker: see `Trial`.
    """

    seconds_per_batch: Interval
    samples_per_batch: float
    startup_s: float
    waiting_per_batch: float
    cpu_waiting_per_batch: float
    cpu_per_batch: float
    variation: float
    epochs_inside: bool
    batch_bytes: int
    batches: int = 0
    held: list[Batch] = field(default_factory=list)
    memory_per_worker: int | None = None

    @property
    def samples_per_second(self) -> Interval:
        """The steady rate."""
        cost, samples = self.seconds_per_batch, self.samples_per_batch
        return Interval(*(samples / seconds for seconds in (cost.high, cost.estimate, cost.low)))

    def followed_by(self, step: StepCost) -> Observation:
        """Return the same with ``step`` after each batch, on the thread that made the batch.

        While a batch is made a device works on: only what the step takes of the thread adds up.
        """
        load, whole = self.seconds_per_batch, step.seconds
        ends = zip(
            (load.low, load.estimate, load.high),
            (whole.low, whole.estimate, whole.high),
            strict=True,
        )
        return replace(
            self,
            seconds_per_batch=Interval(*(max(b, a + b * step.on_thread) for a, b in ends)),
            cpu_per_batch=self.cpu_per_batch + step.cores * whole.estimate,
        )


@dataclass(frozen=True)
class StepCost:
    """What a step takes for a batch.

    Attributes:
        seconds: of the clock.
        cores: CPU seconds of this process per second, all of its threads together, and the share
            of a second for which its main thread waited for a core.
        on_thread: the part of ``seconds`` until the step returns, from 0 to 1; 1 unless a device
            works on afterwards.
    """

    seconds: Interval
    cores: float
    on_thread: float = 1.0


def driven(steps: Steps[T], step: Step) -> T:
    """What ``steps`` returns, with ``step`` called on each of its batches.

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


def observe(
    loader: torch.utils.data.DataLoader[Any],
    *,
    stepping: bool,
    cap_s: float,
    epoch_samples: int | None,
    keep: bool = False,
) -> Steps[Observation]:
    """The cost of ``loader``'s batches, measured for about ``cap_s`` seconds at most.

    Yields every batch if ``stepping``, none otherwise, and holds some if ``keep``. At least two
    blocks are measured, however long they take. Whatever the loader raises passes through. The
    loader's workers have ended when this returns or raises, or is closed.
    """
    known = {child.pid for child in multiprocessing.active_children()}
    feed = _Feed(loader)
    try:
        return (yield from _observe(loader, feed, known, stepping, cap_s, epoch_samples, keep))
    finally:
        feed.close(known)


@dataclass(frozen=True)
class Loading:
    """A look at a dataset (`dataloaders.observing`): what a loader without workers takes for it.

    torch computes with one thread there, as in a worker.

    Attributes:
        loader: a variant of the user's, over the dataset that is looked at.
        cap_s, epoch_samples, keep: as `observe` takes them.
    """

    loader: torch.utils.data.DataLoader[Any]
    cap_s: float
    epoch_samples: int | None
    keep: bool

    def __call__(self, dataset: Any) -> Observation | CheckError:
        """The observation, or why there is none."""
        torch_worker._worker_info = None  # a loop without workers collates in memory of its own
        steps = observe(
            self.loader,
            stepping=False,
            cap_s=self.cap_s,
            epoch_samples=self.epoch_samples,
            keep=self.keep,
        )
        try:
            return driven(steps, lambda batch: None)
        except CheckError as error:
            return error


def observe_step(held: list[Batch], cap_s: float) -> Steps[StepCost]:
    """What a batch that costs nothing takes to be stepped on; yields copies of ``held``."""
    most = max(1, min(64, _HELD_BYTES // max(1, nbytes(held[0]))))
    copies = 1
    rounds: list[float] = []
    cores: list[float] = []
    on_thread: list[float] = []
    began = time.perf_counter()
    turn = 0
    while True:
        # Copies, made outside the timing: a step may write into its batch or pop its keys.
        batches = [_copy(held[(turn + number) % len(held)]) for number in range(copies)]
        turn += copies
        device.synchronise()
        cpu, start = usage.cpu_demand(), time.perf_counter()
        yield from batches
        returned = time.perf_counter() - start
        device.synchronise()
        took = time.perf_counter() - start
        cpu = usage.cpu_demand() - cpu
        rounds.append(took / copies)
        cores.append(cpu / took)
        on_thread.append(returned / took)
        # The first step is slow (lazy initialisation, allocators) and no matter of the steady
        # state; the second says how many make a block.
        if len(rounds) <= 2:
            copies = max(1, min(most, math.ceil(_BLOCK_S / max(rounds[-1], 1e-9))))
        measured = rounds[2:]
        elapsed = time.perf_counter() - began
        if len(measured) >= 2 and (elapsed > cap_s or _clear(measured, elapsed)):
            return StepCost(
                _interval(measured), *map(statistics.median, (cores[2:], on_thread[2:]))
            )


def _observe(
    loader: torch.utils.data.DataLoader[Any],
    feed: _Feed,
    known: set[int | None],
    stepping: bool,
    cap_s: float,
    epoch_samples: int | None,
    keep: bool,
) -> Steps[Observation]:
    count, prefetch = loader.num_workers, loader.prefetch_factor or 0
    began = time.perf_counter()
    first = feed.take()
    startup_s = time.perf_counter() - began
    batch_bytes = nbytes(first)
    held = [_copy(first)] if keep else []
    if stepping:
        yield first
    del first
    pids = [c.pid for c in multiprocessing.active_children() if c.pid not in known]
    crew = [psutil.Process(pid) for pid in pids if pid is not None] if count else []
    # Not yet the steady state: what workers made while nobody took anything. Without a step the
    # queue is empty again after one batch of each; a step may find it full.
    # Threads of a backend have as many batches on their way as it tells.
    under_way = count * (prefetch if stepping else 1) or feed.outstanding
    for _ in range(under_way):
        if time.perf_counter() - began > startup_s + cap_s / 3:
            break
        batch = feed.take()
        if stepping:
            yield batch
    del loader
    memory_before = usage.memory(crew)
    device.synchronise()
    # A batch that takes longer than a whole trial should is not measured more often than needed.
    slow = count == 0 and not stepping and startup_s > cap_s
    blocks: list[float] = [startup_s] if slow else []
    meter = _Meter(feed, stepping, crew)
    size = max(1, count)
    took, batch = yield from meter.block(size) if slow else meter.pilot(size)
    size = len(meter.waits)
    while True:
        blocks.append(took / size)
        batch_bytes = max(batch_bytes, nbytes(batch))
        if keep and len(held) < min(_HELD_BATCHES, _HELD_BYTES // max(1, batch_bytes)):
            held.append(_copy(batch))  # between blocks, where the copy costs no measured time
        elapsed = time.perf_counter() - meter.start
        if len(blocks) >= 2 and (elapsed >= cap_s or _clear(blocks, elapsed)):
            break
        took, batch = yield from meter.block(size)
    batches, seen = len(meter.waits), sum(meter.samples)
    cpu_per_batch = (usage.cpu_seconds(crew) - meter.cpu_start) / batches
    mean_wait = statistics.fmean(meter.waits)
    return Observation(
        seconds_per_batch=_interval(blocks),
        samples_per_batch=seen / batches,
        startup_s=startup_s,
        waiting_per_batch=mean_wait,
        cpu_waiting_per_batch=meter.cpu_waiting / batches,
        cpu_per_batch=cpu_per_batch,
        variation=statistics.pstdev(meter.waits) / mean_wait if mean_wait > 0 else 0.0,
        epochs_inside=feed.epochs > 1,
        batch_bytes=batch_bytes,
        batches=feed.taken,
        held=held,
        memory_per_worker=usage.by_end_of_epoch(
            memory_before, usage.memory(crew), seen, epoch_samples
        ),
    )


class _Meter:
    """Blocks of batches, taken and stepped, and what they took since `start`.

    Attributes:
        start: the clock when the first block that counts began.
        cpu_start: the CPU seconds of this process and the workers at that time.
        waits: seconds inside ``next()``, by batch.
        samples: by batch.
        cpu_waiting: CPU seconds that this process asked for inside ``next()``, in all.
    """

    def __init__(self, feed: _Feed, stepping: bool, crew: list[psutil.Process]) -> None:
        self._feed = feed
        self._stepping = stepping
        self._crew = crew
        self._begin()

    def pilot(self, size: int) -> Steps[tuple[float, Batch]]:
        """As `block`, with more batches than ``size`` if those are too short to be told from noise.

        Only the last block, the one returned, counts.
        """
        on_device = self._stepping and device.in_use()
        least_s = _BLOCK_S * (1.25 if on_device else 0.5)
        while True:
            took, batch = yield from self.block(size)
            if took >= least_s or size >= _LONGEST_BLOCK:
                return took, batch
            size *= max(2, min(16, math.ceil(2 * least_s / max(took, 1e-6))))
            self._begin()

    def block(self, size: int) -> Steps[tuple[float, Batch]]:
        """The seconds that ``size`` batches took, and the last one."""
        stepping = self._stepping
        cpu_block, start = usage.cpu_demand(), time.perf_counter()
        for _ in range(size):
            cpu = usage.cpu_demand() if stepping else 0.0
            before = time.perf_counter()
            batch = self._feed.take()
            self.waits.append(time.perf_counter() - before)
            self.samples.append(samples_in(batch) or 1)
            if stepping:
                self.cpu_waiting += usage.cpu_demand() - cpu
                yield batch
        if stepping:
            device.synchronise()
        took = time.perf_counter() - start
        if not stepping:  # asking takes 20 us: once a block where that serves
            self.cpu_waiting += usage.cpu_demand() - cpu_block
        return took, batch

    def _begin(self) -> None:
        self.waits: list[float] = []
        self.samples: list[int] = []
        self.cpu_waiting = 0.0
        self.cpu_start, self.start = usage.cpu_seconds(self._crew), time.perf_counter()


class _Feed:
    """A loader's batches without end: where an epoch ends the next one begins."""

    def __init__(self, loader: torch.utils.data.DataLoader[Any]) -> None:
        self._loader: torch.utils.data.DataLoader[Any] | None = loader
        self._iterator: Iterator[Batch] | None = None
        self.epochs = 0
        self.taken = 0

    def take(self) -> Batch:
        for _ in range(2):
            if self._iterator is None and self._loader is not None:
                with warnings.catch_warnings():
                    # torch's warning of more workers than cores: that is what is being tried.
                    warnings.filterwarnings("ignore", "This DataLoader will create")
                    # And its comment on the pickling error that it raises next.
                    warnings.filterwarnings("ignore", "Got pickle error")
                    self._iterator = iter(self._loader)
                self.epochs += 1
            try:
                batch = next(self._iterator if self._iterator is not None else iter(()))
            except StopIteration:
                self._iterator = None
                continue
            self.taken += 1
            return batch
        raise CheckError(
            "the loader yields no batch, so there is nothing to tune; look at its dataset, its "
            "sampler and drop_last"
        )

    @property
    def outstanding(self) -> int:
        """Batches that are made or being made and were not taken; 0 where nobody tells."""
        counts = counts_of(self._iterator)
        return 0 if counts is None else counts[1]

    def close(self, known: set[int | None]) -> None:
        """End the workers that this feed started, and wait for them."""
        iterator, self._iterator = self._iterator, None
        loader, self._loader = self._loader, None
        if loader is not None:
            loader._iterator = None
            session = getattr(loader, "_session", None)
            if session is not None:
                session.close()
        end = getattr(iterator, "_shutdown_workers", None) or getattr(iterator, "close", None)
        if callable(end):
            end()
        had_workers = loader is not None and loader.num_workers > 0
        del iterator, loader, end
        if not had_workers:
            return  # children are then the dataset's own affair
        gc.collect()  # an iterator inside another one may sit in a reference cycle
        for child in multiprocessing.active_children():
            if child.pid not in known:
                child.join(_JOIN_S)


def _copy(batch: Batch) -> Batch:
    return map_tensors(batch, _copied)


def _copied(leaf: torch.Tensor) -> torch.Tensor:
    clone = leaf.detach().clone()
    # In memory of the same sort: a copy to a device takes another time from pageable memory.
    return clone.pin_memory() if device.in_use() and leaf.is_pinned() else clone


def _clear(blocks: list[float], elapsed: float) -> bool:
    if len(blocks) < _LEAST_BLOCKS or elapsed < _LEAST_S:
        return False
    interval = _interval(blocks)
    return interval.half_width <= _ENOUGH * interval.estimate


def _interval(blocks: list[float]) -> Interval:
    """The mean of the blocks with its 95 % interval, kept within what a rate can be."""
    resampled = resample([{"block": Timed(seconds, 1)} for seconds in blocks])
    found = resampled.interval(resampled.means["block"], resampled.draws["block"])
    estimate = max(found.estimate, 1e-9)
    return Interval(max(found.low, estimate / 4), estimate, min(found.high, estimate * 4))
