"""Seconds a batch of a training loop over torch's loader, computed from known times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bench.played import PlayedLoader, VirtualTime

__all__ = ["Overhead", "seconds_per_batch"]


@dataclass(frozen=True)
class Overhead:
    """What torch itself adds to a batch on this machine, in seconds.

    Attributes:
        take: of the main process, to take a batch that is ready.
        make: of the worker (without workers: of the main process), beside the known time.
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
    """Mean seconds of a batch in the long run.

    Args:
        loads: seconds to make batch ``k``: ``loads[k % len(loads)]``.
        steps: seconds of step ``k``, in the same way; the steps do not restart with an epoch.
        workers: 0 makes each batch between two steps.
        prefetch: batches under way for each worker.
        in_order: as torch's.
        batches: of an epoch; None for an epoch that does not end. The next epoch starts with
            idle workers and nothing under way.
        overhead: added to every batch.
    """
    if workers == 0:
        return _mean(loads) + overhead.make + _mean(steps)
    if batches is None:
        # Long against every pattern; the start of the only epoch is left out.
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
    """When each of the steps of one epoch ends, in seconds from its start."""
    time = VirtualTime()
    loader = PlayedLoader(
        time,
        [load + overhead.make for load in loads],
        workers=workers,
        prefetch=prefetch,
        batches=batches,
        take_s=overhead.take,
        in_order=in_order,
    )
    ends = []
    for number, _ in enumerate(loader):
        time.sleep(steps[number % len(steps)])
        ends.append(time.now())
    return ends


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
