"""The stages of a loop, measured one by one, and its seconds a batch after a change of them.

    step, copy, samples: each measured alone ──> queue model ──> seconds of the loop as it is
                                                   │             (scaled to what was measured)
    workers, rows of a cache, DALI ────────────────┴───────────> seconds after it; the speed-up

An interval spans the intervals of the samples and the step, the model with and without the scale
that makes it agree with the loop, and steps and workers that never share a core and that lose more
by it than `Sharing` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dataloaders.measuring.intervals import Interval
from dataloaders.predicting.caches import SmallCache
from dataloaders.predicting.model import seconds_per_batch
from dataloaders.predicting.sharing import Sharing

_PINNED_GAINS = 5.0  # how many times as fast a copy from pinned memory is, at most
_MORE_LOST = 1.5  # how many times as much sharing cores costs, at the most


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
    sharing: Sharing = field(default_factory=Sharing)  # of the cores
    contention: float = 0.0  # by which workers slow the step down
    workers: int = 0  # of the loader
    prefetch: int = 2  # of the loader
    overlaps: bool = False  # whether, without workers, batches are made during a device's work
    room: int | None = None  # batches that fit into the workers' shared memory; None: no limit
    factor: float | None = None  # `scale`, where it is known

    def seconds(self, *, workers: int | None = None, hidden: bool = False) -> Interval:
        """Return the predicted seconds a batch with other workers, or with copies ``hidden``."""
        low, estimate, high = (self._end(end, workers, hidden) for end in range(3))
        return Interval(min(low, estimate), estimate, max(estimate, high))

    def estimate(self, workers: int | None = None, *, hidden: bool = False) -> float:
        """Return the estimate of `seconds`, in a third of the time."""
        return self._end(1, workers, hidden)

    def _end(self, end: int, workers: int | None, hidden: bool) -> float:
        """Return the low end of the seconds a batch (0), the estimate (1) or the high end (2)."""
        workers = self.workers if workers is None else workers
        copy, scale = self.transfer, self.scale
        quickest = copy if self.pinned else copy / _PINNED_GAINS
        cases = (
            (self.step.low, min(1.0, scale) * (1 - self.spread), quickest),
            (self.step.estimate, scale, copy),
            (self.step.high, max(1.0, scale) * (1 + self.spread), copy),
        )
        step, load, beside = cases[end]
        step += self.contention
        # Hidden copies still wait for each other.
        own = (max(step, beside), 0.0) if hidden else (step, copy)
        lost = self._weights(workers)[end]
        took = self._seconds(workers, load, *own, lost)
        return took + self.started(workers)

    def started(self, workers: int) -> float:
        """Return the seconds a batch of starting ``workers`` for each epoch.

        The first worker counts as three others, since the loop waits for it.
        """
        return self.starting * (2 + workers) / (2 + max(1, self.workers)) if workers else 0.0

    @property
    def load(self) -> float:
        """Return the seconds to prepare a batch, as in the loop."""
        return sum(self.loads) / len(self.loads) * self.scale

    @cached_property
    def scale(self) -> float:
        """Time of preparation in the loop over its time alone; 1 if that makes no difference."""
        if self.factor is not None:
            return self.factor
        step, copy = self.step.estimate + self.contention, self.transfer
        real, lost = self.real.estimate - self.started(self.workers), self._weights(self.workers)[1]

        def modelled(scale: float) -> float:
            return self._seconds(self.workers, scale, step, copy, lost)

        low, high = 0.2, 20.0
        if not modelled(low) * 1.01 < real:
            return 1.0
        for _ in range(20):
            middle = math.sqrt(low * high)
            below = modelled(middle) < real
            low, high = (middle, high) if below else (low, middle)
        return math.sqrt(low * high)

    def _weights(self, workers: int) -> tuple[float, float, float]:
        """Return the weights of what sharing cores costs: the least, the usual, the most."""
        if self.contention and workers <= self.workers:
            return 0.0, 0.0, _MORE_LOST  # the contention, which was measured, has it
        return 0.0, 1.0, _MORE_LOST

    def _seconds(self, workers: int, scale: float, step: float, copy: float, lost: float) -> float:
        """Return the seconds a batch; ``lost`` weighs what sharing cores costs."""
        sharing, loads = self.sharing, [load * scale for load in self.loads]
        mean = sum(loads) / len(loads)
        if not workers:
            # If batches are made during a device's work, the copy waits for the last step.
            return (max(mean, step) if self.overlaps else mean + step) + copy
        took = seconds_per_batch(
            loads,
            step + copy,
            workers=workers,
            prefetch=self.prefetch,
            take_s=self.take,
            slowed=lambda busy, stepping: sharing.slowed(busy, stepping, lost),
        )
        computed = mean * sharing.load_cores + self.step.estimate * sharing.step_cores
        return max(took, computed / sharing.cores)


def ratio(above: Interval, below: Interval) -> Interval:
    """Return the widest interval of above / below."""
    low = max(1e-9, below.low)
    return Interval(above.low / below.high, above.estimate / below.estimate, above.high / low)
