"""Seconds a batch of a training loop over torch's loader, computed from times of its stages.

    worker 0  ── batch 0 ── batch 2 ──┐
    worker 1  ── batch 1 ── batch 3 ──┴─ queue: workers x prefetch ──> take ──> step ──> ...

Each stage is measured alone, and a queue puts them together: DS-Analyzer predicts what-if questions
from stage rates (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021),
tf.data models a pipeline as queues of stages to place its parallelism (Murray et al., "tf.data",
VLDB 2021), and Plumber adds what CPU a stage costs, which bounds any parallelism (Kuchnik et al.,
MLSys 2022). Here the queue is torch's own, batch by batch, so that uneven batches count, and those
that run at the same moment share the cores (processor sharing: Kleinrock, "Queueing Systems",
volume 2, 1976, chapter 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TypeAlias

Slowed: TypeAlias = Callable[[int, bool], tuple[float, float]]
"""How many times longer preparation and the step take, from the number of workers that are busy
and whether the step runs."""

_SKIPPED, _COUNTED = 5, 200  # rounds of the queue that are left out; batches that count, at least
_LONGEST_PERIOD = 400  # batches after which loads and workers come together again, at the most
_SOON = 1e-12  # seconds that are rounding


def _alone(busy: int, stepping: bool) -> tuple[float, float]:
    return 1.0, 1.0


def seconds_per_batch(
    loads: Sequence[float],
    step_s: float,
    *,
    workers: int,
    prefetch: int,
    take_s: float = 0.0,
    slowed: Slowed = _alone,
) -> float:
    """Return the mean seconds of a batch in the long run.

    As torch does: ``workers * prefetch`` batches are ordered at once, then one for each that is
    taken; batch ``k`` goes to worker ``k % workers``.

    Args:
        loads: seconds to make batch ``k`` are ``loads[k % len(loads)]``.
        step_s: seconds of a step.
        workers: number of workers, at least one.
        prefetch: batches in flight for each worker.
        take_s: seconds of the main process to take a batch that is ready.
        slowed: how much slower all of it is at a moment.
    """
    in_flight = workers * prefetch
    period = math.lcm(len(loads), workers)
    if period > _LONGEST_PERIOD:
        period = len(loads) * math.ceil(_COUNTED / len(loads))
    skipped = period * math.ceil((_SKIPPED * in_flight + len(loads)) / period)
    last = skipped + period * math.ceil(_COUNTED / period)
    now, began, ordered = 0.0, 0.0, in_flight
    done = [0] * workers  # batches that each worker has made
    # All busy workers are as slow: a batch ends when so many seconds of work are done by each.
    work, ends = 0.0, list[tuple[float, int]]()
    idle = list(range(workers))
    taken, stage, rest = 0, "wait", math.inf  # of the main process: its next batch, what it does
    while True:
        for worker in idle:
            batch = done[worker] * workers + worker
            if batch < ordered:
                heappush(ends, (work + loads[batch % len(loads)], worker))
        idle = []
        if stage == "wait" and done[taken % workers] > taken // workers:
            stage, rest = "take", take_s
        load_slowed, step_slowed = slowed(len(ends), stage != "wait")
        left = ends[0][0] - work if ends else math.inf
        passed = min(left * load_slowed, rest * step_slowed)
        now += passed
        rest -= passed / step_slowed
        work += passed / load_slowed
        while ends and ends[0][0] <= work + _SOON * (1 + work):
            worker = heappop(ends)[1]
            done[worker] += 1
            idle.append(worker)
        if rest > _SOON:
            continue
        if stage == "take":
            stage, rest, taken, ordered = "step", step_s, taken + 1, ordered + 1
            worker = (ordered - 1) % workers
            if done[worker] == (ordered - 1) // workers and worker not in idle:
                idle.append(worker)  # it had no batch to make
            continue
        if taken == skipped:
            began = now
        if taken == last:
            return (now - began) / (last - skipped)
        stage, rest = "wait", math.inf
