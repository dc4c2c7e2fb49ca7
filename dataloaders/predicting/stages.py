"""The stages of a loop, measured one by one, and its seconds a batch after a change of them.

    step, copy, samples: each measured alone ──> queue model ──> seconds of the loop as it is
                                                   │             (scaled to what was measured)
    workers, prefetch, rows of a cache, DALI ──────┴───────────> seconds after it; the speed-up

An interval spans the intervals of the samples and the step, the model with and without the scale
that makes it agree with the loop, and steps and workers with and without competition for cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

from dataloaders.measuring.intervals import Interval
from dataloaders.predicting.caches import SmallCache
from dataloaders.predicting.model import seconds_per_batch

_PINNED_GAINS = 5.0  # how many times as fast a copy from pinned memory is, at most
# The wait of a batch for a busy core, if neither workers nor the step have time to spare. On 2
# cores, a step of 8 ms and 16 ms of preparation by 2 workers take 14.7 ms a batch, not 12.
_WAIT_FOR_CORE_S = 0.0025

Competing: TypeAlias = Literal["never", "usually", "always"]


@dataclass(frozen=True)
class Stages:
    """Holds the measured stages of a loop, in seconds a batch and in cores."""

    real: Interval  # the whole loop
    step: Interval  # the step alone, on resident batches
    loads: Sequence[float]  # to prepare each of some batches, alone in one process
    spread: float = 0.05  # relative half width of the interval of their mean
    transfer: float = 0.0  # wait of the step for its copy; 0 if nothing is copied
    pinned: bool = False  # whether the copy is from pinned memory, so that it cannot be faster
    take: float = 0.0  # to take a ready batch from a worker
    starting: float = 0.0  # share of starting the workers for each epoch; without workers, of one
    cached: Mapping[str, SmallCache] = field(default_factory=dict)  # by how images are stored
    uncached: str = ""  # why no cache can hold the samples
    samples: int = 1  # in a batch
    load_cores: float = 1.0  # cores that preparation keeps busy; the rest of its time is waiting
    step_cores: float = 1.0  # cores that the step keeps busy
    contention: float = 0.0  # by which workers slow the step down
    workers: int = 0  # of the loader
    prefetch: int = 2  # of the loader
    cores: int = 1  # that the loop may use
    overlaps: bool = False  # whether, without workers, batches are made during a device's work
    room: int | None = None  # batches that fit into the workers' shared memory; None: no limit
    factor: float | None = None  # `scale`, where it is known
    threads: bool = False  # whether batches are made by threads of this process, not by workers

    def seconds(
        self, *, workers: int | None = None, prefetch: int | None = None, hidden: bool = False
    ) -> Interval:
        """Return the predicted seconds a batch with other workers, or with copies ``hidden``."""
        workers = self.workers if workers is None else workers
        prefetch = prefetch or self.prefetch
        copy = self.transfer
        quickest = copy if self.pinned else copy / _PINNED_GAINS
        scale, ends = self.scale, []
        # With fewer workers, none, a proportional part or all of the contention is left.
        kept = min(1.0, workers / max(1, self.workers))
        usually: Competing = "usually"
        if self.contention and workers <= self.workers:
            usually = "never"  # except for the contention, which was measured
        cases: tuple[tuple[float, float, Competing, float, float], ...] = (
            (self.step.low, min(1.0, scale) * (1 - self.spread), "never", kept // 1, quickest),
            (self.step.estimate, scale, usually, kept, copy),
            (self.step.high, max(1.0, scale) * (1 + self.spread), "always", 1.0, copy),
        )
        for step, load, competing, slowed, beside in cases:
            step += slowed * self.contention
            # Hidden copies still wait for each other.
            own = (max(step, beside), 0.0) if hidden else (step, copy)
            took = self._seconds(workers, prefetch, load, *own, competing)
            ends.append(took + self.started(workers))
        low, estimate, high = ends
        return Interval(min(low, estimate), estimate, max(estimate, high))

    def started(self, workers: int) -> float:
        """Return the seconds a batch of starting ``workers`` for each epoch.

        The first worker counts as three others, since the loop waits for it.
        """
        return self.starting * (2 + workers) / (2 + max(1, self.workers)) if workers else 0.0

    def ahead(self, alone: Interval, cores: float) -> Interval:
        """Return the seconds a batch if a thread of this process makes batches ahead of the step.

        Without the step, a batch takes ``alone`` seconds and keeps ``cores`` busy.
        """
        workers = max(1, self.workers)
        spread = alone.half_width / alone.estimate
        one_queue = replace(self, workers=1, loads=[alone.estimate], spread=spread)
        one_queue = replace(one_queue, load_cores=cores, factor=1.0, threads=True)
        own = replace(one_queue, take=0.0, starting=0.0).seconds()
        return plus(own, self.started(workers))

    def gain(self, took: Interval) -> Interval:
        """Return how many times as fast the loop is where a batch takes ``took``."""
        return ratio(self.real, took)

    @cached_property
    def scale(self) -> float:
        """Time of preparation in the loop over its time alone; 1 if that makes no difference."""
        if self.factor is not None:
            return self.factor
        step, copy = self.step.estimate + self.contention, self.transfer
        real = self.real.estimate - self.started(self.workers)

        def modelled(scale: float) -> float:
            return self._seconds(self.workers, self.prefetch, scale, step, copy, "never")

        low, high = 0.2, 20.0
        if not modelled(low) * 1.01 < real:
            return 1.0
        for _ in range(20):
            middle = math.sqrt(low * high)
            below = modelled(middle) < real
            low, high = (middle, high) if below else (low, middle)
        return math.sqrt(low * high)

    def _seconds(
        self,
        workers: int,
        prefetch: int,
        scale: float,
        step: float,
        copy: float,
        competing: Competing,
    ) -> float:
        """Return the seconds a batch; ``competing``: how often workers and step want one core."""
        mean = sum(self.loads) / len(self.loads) * scale
        if not workers:
            # If batches are made during a device's work, the copy waits for the last step.
            return (max(mean, step) if self.overlaps else mean + step) + copy
        step += copy
        wanted = min(workers, self.cores) * self.load_cores + self.step_cores
        crowd = 0.0 if competing == "never" else max(0.0, wanted / self.cores - 1)
        # Workers that keep up are idle for a part of the time, and do not compete then.
        busy = mean / max(1e-9, workers * step)
        slower = 1 + crowd * min(1.0, busy) * (competing == "always")
        took = seconds_per_batch(
            [load * scale * slower for load in self.loads],
            step * slower,
            workers=workers,
            prefetch=prefetch,
            take_s=self.take,
        )
        computed = mean * self.load_cores + self.step.estimate * self.step_cores
        waits = _WAIT_FOR_CORE_S * min(busy, 1 / busy) if crowd and not self.threads else 0.0
        return max(took, computed / self.cores + waits)


def plus(seconds: Interval, more: float) -> Interval:
    """Return ``seconds`` and ``more``."""
    return Interval(seconds.low + more, seconds.estimate + more, seconds.high + more)


def ratio(above: Interval, below: Interval) -> Interval:
    """Return the widest interval of above / below."""
    low = max(1e-9, below.low)
    return Interval(above.low / below.high, above.estimate / below.estimate, above.high / low)
