"""What a workload's real / synthetic is in the long run.

measured(workload)     long plain training loops and long loops over held batches, in turns
computed(workload)     from its known times, and what torch itself is seen to cost a batch here
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from bench.check.known_work import BATCH, Rows, burn
from bench.check.played import Overhead
from bench.check.workloads import Workload
from dataloaders.batches.tree import map_tensors
from dataloaders.measuring.clocks import Clock, HostClock
from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import Interval, mean_of

_SHORT = 100  # batches of an epoch
_HELD = 62
"""Batches kept for the synthetic loops: two turns of the longest pattern of batch lengths."""


def measured(workload: Workload, seconds: float, rounds: int = 5) -> Interval:
    """The truth by brute force: ``rounds`` real chunks between ``rounds + 1`` synthetic ones.

    A real chunk is a plain training loop: of whole epochs where they are short, so that starting
    one counts, else of an epoch that goes on. The latter starts to count with queues that were
    emptied and then stepped on for a while: a queue filled meanwhile takes in_flight / gap steps
    to empty, which would hide a small gap for a hundred of them. A synthetic chunk steps on held
    batches, the workers idle. Two thirds of ``seconds`` go to the real chunks.
    """
    loader, step = workload.make()
    feed, clock = Feed(loader), clock_of_step(step)
    until = time.perf_counter() + workload.warm_s
    while time.perf_counter() < until:
        step(feed.next())
    # Held in ordinary memory, as a step's own data would be, not in the workers' shared memory.
    held = [map_tensors(batch, torch.clone) for batch in itertools.islice(loader, _HELD)]
    short = feed.length is not None and feed.length <= _SHORT
    turn = math.lcm(workload.period, feed.length if short and feed.length else 1)
    replay = itertools.cycle(held)
    synthetic, real = [], []
    for number in range(rounds + 1):
        time.sleep(workload.settle_s)  # the workers fill their queues and fall idle
        for _ in range(2):
            step(next(replay))
        take = replay.__next__
        synthetic.append(_timed(take, step, clock, seconds / rounds / 3, len(held)))
        if number == rounds:
            break
        if short:
            feed.close()
        else:
            for _ in range(2 * feed.in_flight):
                feed.next()
            for _ in range(4 * feed.in_flight):
                step(feed.next())
        real.append(_timed(feed.next, step, clock, seconds / rounds * 2 / 3, turn))
    feed.close()
    ratios = [
        took / ((before + after) / 2)
        for took, before, after in zip(real, synthetic, synthetic[1:], strict=False)
    ]
    return mean_of(ratios)


def computed(workload: Workload, seconds: float) -> Interval:
    """The ratio of known times and of what torch itself is seen to cost a batch here."""
    assert workload.computed is not None
    value = workload.computed(calibrated(workload, min(3.0, seconds)))
    return Interval(value, value, value)


def calibrated(workload: Workload, seconds: float) -> Overhead:
    """Torch's own costs per batch with this workload's kind of loader and step, in seconds.

    ``take`` is how long next() lasts while ready batches wait, ``make`` how much longer than its
    known time a batch takes if nothing else is waited for. Loads and steps are the workload's
    mean ones: what a core does just before decides how long the next Python line takes.
    """
    loader, _ = workload.make()
    loader = getattr(loader, "inner", loader)  # torch's, where batches are copied ahead of use
    if loader.num_workers == 0:
        next_s, _ = _probe(workload, loader, workload.load_s, workload.step_s, seconds)
        return Overhead(make=max(0.0, next_s - workload.load_s))
    load_s = max(workload.load_s, 0.01 * loader.num_workers)
    take_s, _ = _probe(workload, loader, 0.0, workload.step_s, seconds / 2)
    _, loop_s = _probe(workload, loader, load_s, 0.0, seconds / 2)
    return Overhead(take=take_s, make=max(0.0, loop_s * loader.num_workers - load_s))


def clock_of_step(step: Any) -> Clock:
    """The device's clock of a step that has one, else the host's."""
    clock: Clock = getattr(step, "clock", None) or HostClock()
    return clock


def seconds_per_batch(
    loader: Any, step: Callable[[Any], Any], seconds: float, epoch_s: float = 0.0
) -> float:
    """Return those of a plain loop that runs for some seconds, epoch after epoch.

    It runs for a whole epoch at least, if that takes less than ``epoch_s``, so that the start of
    the workers counts.
    """
    feed, clock = Feed(loader), clock_of_step(step)
    for _ in range(2 * feed.in_flight + 1):
        step(feed.next())
    first, last, count = clock.mark(), clock.mark(), 0
    took, whole = 0.0, 0.0
    while took < seconds or (feed.epoch == 0 and whole < epoch_s):
        step(feed.next())
        last, count = clock.mark(), count + 1
        took = clock.seconds(first, last)
        whole = took / count * (feed.length or math.inf)
    clock.wait()
    feed.close()  # its workers would take cores from the next loop
    return clock.seconds(first, last) / count


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


def _timed(
    take: Callable[[], Any], step: Callable[[Any], None], clock: Clock, seconds: float, turn: int
) -> float:
    """Seconds per batch of a loop, whole turns of ``turn`` batches if they fit."""
    start, first, count = time.perf_counter(), clock.mark(), 0
    while time.perf_counter() - start < seconds or count % turn or not count:
        step(take())
        count += 1
        if count % turn and time.perf_counter() - start > 2 * seconds:
            break
    last = clock.mark()
    clock.wait()
    return clock.seconds(first, last) / count
