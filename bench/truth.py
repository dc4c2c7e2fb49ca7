"""What a workload's real / synthetic is in the long run.

measured(workload)     long plain training loops and long loops over held batches, in turns
calibrated(workload)   what torch itself costs per batch here, for the computed truth
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from bench.known_work import BATCH, Rows, burn
from bench.played import Overhead
from bench.workloads import Workload
from dataloaders.batches.tree import map_tensors
from dataloaders.measuring.clocks import Clock, HostClock
from dataloaders.measuring.feed import Feed

__all__ = ["Truth", "calibrated", "clock_of_step", "measured"]

_HELD = 62
"""Batches kept for the synthetic loops: two turns of the longest pattern of batch lengths."""

_T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Truth:
    """Real / synthetic, with the 95 % interval of the measurement.

    Attributes:
        low, value, high: the ratio; all equal where it was computed.
        real: seconds per batch of each real chunk.
        synthetic: seconds per batch of each synthetic chunk.
    """

    low: float
    value: float
    high: float
    real: tuple[float, ...] = ()
    synthetic: tuple[float, ...] = ()


def measured(workload: Workload, seconds: float, seed: int = 0, rounds: int = 5) -> Truth:
    """The truth by brute force: ``rounds`` real chunks between ``rounds + 1`` synthetic ones.

    A real chunk is a plain training loop: of whole epochs where an epoch is short enough, so
    that starting one counts, else of one epoch that goes on. The latter starts to count with
    queues that were emptied and then stepped on for a while: a queue filled meanwhile takes
    in_flight / gap steps to empty, which would hide a small gap for a hundred of them. A
    synthetic chunk steps on held batches, the workers idle. Two thirds of ``seconds`` go to the
    real chunks.
    """
    loader, step = workload.make(seed)
    _train(loader, step, workload.warm_s)
    held = _hold(loader, _HELD)
    chunk_s = seconds / rounds
    chunks = _Chunks(loader, step, workload.period, whole_epochs=_is_short(loader, step, chunk_s))
    replay = itertools.cycle(held)
    synthetic = []
    real = []
    for turn in range(rounds + 1):
        time.sleep(workload.settle_s)  # the workers fill their queues and fall idle
        synthetic.append(_replay(replay, step, chunk_s / 3, len(held)))
        if turn < rounds:
            real.append(chunks.chunk(chunk_s * 2 / 3))
    chunks.close()
    ratios = [
        seconds_real / ((before + after) / 2)
        for seconds_real, before, after in zip(real, synthetic, synthetic[1:], strict=False)
    ]
    value = statistics.fmean(ratios)
    spread = statistics.stdev(ratios) if len(ratios) > 1 else math.inf
    half = _T95.get(len(ratios) - 1, 2.262) * spread / math.sqrt(len(ratios))
    return Truth(value - half, value, value + half, tuple(real), tuple(synthetic))


def calibrated(workload: Workload, seconds: float = 4.0, seed: int = 0) -> Overhead:
    """Torch's own costs per batch with this workload's kind of loader and step, in seconds.

    ``take`` is how long next() lasts while ready batches wait, ``make`` how much longer than its
    known time a batch takes if nothing else is waited for. Loads and steps are the workload's
    mean ones: what a core does just before decides how long the next Python line takes.
    """
    loader, _ = workload.make(seed)
    loader = getattr(loader, "inner", loader)  # torch's, where batches are copied ahead of use
    if loader.num_workers == 0:
        next_s, _ = _probe(workload, loader, workload.load_s, workload.step_s, seconds)
        return Overhead(make=max(0.0, next_s - workload.load_s))
    load_s = max(workload.load_s, 0.01 * loader.num_workers)
    take_s, _ = _probe(workload, loader, 0.0, workload.step_s, seconds / 2)
    _, loop_s = _probe(workload, loader, load_s, 0.0, seconds / 2)
    return Overhead(take=take_s, make=max(0.0, loop_s * loader.num_workers - load_s))


class _Chunks:
    """Real chunks from one loader that stays open between them."""

    def __init__(
        self,
        loader: Any,
        step: Callable[[Any], None],
        period: int,
        *,
        whole_epochs: bool,
    ) -> None:
        self._loader = loader
        self._step = step
        self._clock = clock_of_step(step)
        self._period = period
        self._whole_epochs = whole_epochs
        self._feed = Feed(loader)

    def chunk(self, seconds: float) -> float:
        """Seconds per batch of a plain loop of about this long, or of one epoch if longer."""
        step, feed = self._step, self._feed
        if not self._whole_epochs:
            in_flight = self._loader.num_workers * (self._loader.prefetch_factor or 0)
            for _ in range(2 * in_flight):
                feed.next()
            for _ in range(4 * in_flight + 1):
                step(feed.next())
        start, first = time.perf_counter(), self._clock.mark()
        count = 0
        while time.perf_counter() - start < seconds or count == 0:
            if self._whole_epochs:
                for batch in self._loader:
                    step(batch)
                    count += 1
            else:
                for _ in range(self._period):
                    step(feed.next())
                count += self._period
        last = self._clock.mark()
        self._clock.wait()
        return self._clock.seconds(first, last) / count

    def close(self) -> None:
        self._feed.close()


def clock_of_step(step: Any) -> Clock:
    """The device's clock of a step that has one, else the host's."""
    clock: Clock = getattr(step, "clock", None) or HostClock()
    return clock


def _train(loader: DataLoader[Any], step: Callable[[Any], None], seconds: float) -> None:
    """Whole epochs of training until ``seconds`` have passed, the last one cut there."""
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for batch in loader:
            step(batch)
            if time.perf_counter() > deadline:
                break


def _is_short(loader: DataLoader[Any], step: Callable[[Any], None], chunk_s: float) -> bool:
    """Whether at least two whole epochs fit into a real chunk."""
    try:
        batches = len(loader)
    except TypeError:
        return False
    if batches > 10_000:
        return False
    probe = min(batches, 20)
    start = time.perf_counter()
    for batch in itertools.islice(loader, probe):
        step(batch)
    return (time.perf_counter() - start) / probe * batches * 3 < chunk_s


def _probe(
    workload: Workload, like: DataLoader[Any], load_s: float, step_s: float, seconds: float
) -> tuple[float, float]:
    """Median seconds in next(), and of a turn of the loop, with constant loads and steps.

    Medians: what other processes do meanwhile is none of torch's cost.
    """
    loader: DataLoader[Any] = DataLoader(
        Rows((load_s,), batches=1_000_000),
        BATCH,
        num_workers=like.num_workers,
        collate_fn=like.collate_fn if like.batch_size is not None else None,
        in_order=like.in_order,
    )
    iterator = iter(loader)
    for _ in range(2 + 4 * like.num_workers):
        next(iterator)
    in_next: list[float] = []
    rounds: list[float] = []  # of as many turns as there are workers: they finish in bunches
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(rounds) < 10:
        round_start = time.perf_counter()
        for _ in range(max(1, like.num_workers)):
            before = time.perf_counter()
            next(iterator)
            in_next.append(time.perf_counter() - before)
            burn(workload.step_kind, step_s)
        rounds.append((time.perf_counter() - round_start) / max(1, like.num_workers))
    return statistics.median(in_next), statistics.median(rounds)


def _hold(loader: DataLoader[Any], most: int) -> list[Any]:
    batches = list(itertools.islice(loader, most))
    # Held in ordinary memory, as a step's own data would be, not in the workers' shared memory.
    return [map_tensors(batch, torch.clone) for batch in batches]


def _replay(
    batches: Iterator[Any], step: Callable[[Any], None], seconds: float, turn: int
) -> float:
    """Seconds per batch of a loop over ``batches``, whole turns of ``turn`` if they fit."""
    clock = clock_of_step(step)
    for _ in range(2):
        step(next(batches))
    start, first = time.perf_counter(), clock.mark()
    count = 0
    while time.perf_counter() - start < seconds or count % turn:
        step(next(batches))
        count += 1
        if count % turn and time.perf_counter() - start > 2 * seconds:
            break
    last = clock.mark()
    clock.wait()
    return clock.seconds(first, last) / count
