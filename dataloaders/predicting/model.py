"""Seconds a batch of a training loop over torch's loader, computed from times of its stages.

    worker 0  ── batch 0 ── batch 2 ──┐
    worker 1  ── batch 1 ── batch 3 ──┴─ queue: workers x prefetch ──> take ──> step ──> ...

Each stage is measured alone, and a queue puts them together: DS-Analyzer predicts what-if questions
from stage rates (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021),
tf.data models a pipeline as queues of stages to place its parallelism (Murray et al., "tf.data",
VLDB 2021), and Plumber adds what CPU a stage costs, which bounds any parallelism (Kuchnik et al.,
MLSys 2022). Here the queue is torch's own, batch by batch, so that uneven batches count.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Overhead", "seconds_per_batch"]


@dataclass(frozen=True)
class Overhead:
    """Seconds that torch itself adds to each batch on this machine.

    Attributes:
        take: in the main process, to take a batch that is ready.
        make: where the batch is made, beyond its load.
    """

    take: float = 0.0
    make: float = 0.0


def seconds_per_batch(
    loads: Sequence[float],
    steps: Sequence[float],
    *,
    workers: int,
    prefetch: int = 2,
    in_order: bool = True,
    batches: int | None = None,
    overhead: Overhead = Overhead(),
) -> float:
    """Return the mean seconds of a batch in the long run.

    Args:
        loads: seconds to make batch ``k`` are ``loads[k % len(loads)]``.
        steps: seconds of step ``k``, likewise; they go on from epoch to epoch.
        workers: number of workers; with 0, each batch is made between two steps.
        prefetch: batches in flight for each worker.
        in_order: as DataLoader's.
        batches: of an epoch, which starts with idle workers and nothing in flight; None for an
            epoch without end.
        overhead: added to each batch.
    """
    if workers == 0:
        return statistics.fmean(loads) + overhead.make + statistics.fmean(steps)
    if batches is None:
        # Many periods of both patterns; the start of the epoch is left out.
        skipped = 20 * workers * prefetch + 2 * len(loads)
        counted = 20 * max(len(loads), len(steps), 50)
        ends = _epoch(loads, steps, workers, prefetch, in_order, skipped + counted, overhead)
        return (ends[-1] - ends[skipped - 1]) / counted
    turns = itertools.count()
    epochs = 20 * len(steps) if len(steps) > 1 else 1
    total = 0.0
    for _ in range(epochs):
        start = next(turns) * batches
        shifted = [steps[(start + k) % len(steps)] for k in range(batches)]
        total += _epoch(loads, shifted, workers, prefetch, in_order, batches, overhead)[-1]
    return total / (epochs * batches)


def _epoch(
    loads: Sequence[float],
    steps: Sequence[float],
    workers: int,
    prefetch: int,
    in_order: bool,
    batches: int,
    overhead: Overhead,
) -> list[float]:
    """Return the time at which each step of one epoch ends, in seconds from the epoch's start.

    As torch does: ``workers * prefetch`` batches are ordered at once, then one for each that is
    taken. Batch ``k`` goes to worker ``k % workers``; out of order, it goes to the next worker with
    fewer than ``prefetch`` in flight, and the batch that is ready first is taken.
    """
    now, sent = 0.0, 0
    free_at, in_flight = [0.0] * workers, [0] * workers
    ready: dict[int, tuple[float, int]] = {}  # batch -> when, and its worker
    turn = itertools.cycle(range(workers))
    ends: list[float] = []

    def order() -> None:
        nonlocal sent
        in_turn = itertools.islice(turn, workers)
        worker = next((w for w in in_turn if in_order or in_flight[w] < prefetch), None)
        if sent == batches or worker is None:
            return
        load = loads[sent % len(loads)] + overhead.make
        free_at[worker] = max(free_at[worker], now) + load
        ready[sent] = free_at[worker], worker
        in_flight[worker] += 1
        sent += 1

    for _ in range(workers * prefetch):
        order()
    for number in range(batches):
        at, worker = ready.pop(number if in_order else min(ready, key=ready.__getitem__))
        now = max(now, at) + overhead.take
        in_flight[worker] -= 1
        order()
        now += steps[number % len(steps)]
        ends.append(now)
    return ends
