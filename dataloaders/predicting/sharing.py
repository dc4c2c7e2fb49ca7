"""Cores that preparation and the step share: how much slower each is while the other runs.

    step alone ──┐
    step on resident batches, while all workers prepare others ──┴──> how many times slower

A step of one thread keeps its core, and preparation gets the others. A step of several threads
loses time beside workers, since all of its threads wait for the last one: that is measured. If it
cannot be, all that run at one moment are as much slower as they want more cores than there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataloaders.batches.tree import Batch
from dataloaders.tuning.trial import Steps, opened

_FEWEST = 4  # steps
_ONE_THREAD = 1.2  # cores that a step of one thread keeps busy, at the most


@dataclass(frozen=True)
class Beside:
    """Holds a step and preparation that were measured side by side."""

    workers: int  # that prepared all the time
    step: float  # how many times longer the step takes
    load: float  # how many times longer a worker takes for a batch


@dataclass(frozen=True)
class Sharing:
    """Holds what the step and the workers want of the cores."""

    cores: int = 1  # that the loop may use
    load_cores: float = 1.0  # cores that preparation keeps busy; the rest of its time is waiting
    step_cores: float = 1.0  # cores that the step keeps busy
    behind: bool = False  # whether the step is a device's work, which needs no core
    beside: Beside | None = None

    def slowed(self, busy: int, stepping: bool, weight: float = 1.0) -> tuple[float, float]:
        """Return how many times longer preparation and the step take; see `model.Slowed`.

        ``weight`` multiplies what they lose.
        """
        load, step = self._losses(busy, stepping)
        return 1 + weight * load, 1.0 if self.behind else 1 + weight * step

    def _lost(self, busy: int, stepping: bool) -> float:
        wanted = busy * self.load_cores + stepping * self.step_cores
        return max(0.0, wanted / self.cores - 1)

    def _losses(self, busy: int, stepping: bool) -> tuple[float, float]:
        lost, one = self._lost(busy, stepping), self.beside
        if not (busy and stepping and lost):
            return lost, lost
        if one is not None:
            share = lost / self._lost(one.workers, True)
            return share * (one.load - 1), share * (one.step - 1)
        if self.step_cores <= _ONE_THREAD < self.cores:
            return busy * self.load_cores / (self.cores - self.step_cores) - 1, 0.0
        return lost, lost

    def crowded(self, busy: int) -> bool:
        """Whether a step of several threads and ``busy`` workers want more cores than there are."""
        threads = self.step_cores > _ONE_THREAD and not self.behind
        return threads and self._lost(busy, True) > 0


def beside(
    loader: Any,
    resident: Callable[[], Batch],
    seconds: float,
    now: Callable[[], float],
) -> Steps[tuple[float, float] | None]:
    """Yield resident batches to the step while batches of ``loader`` are made all the time.

    Returns the seconds of a step, and those between two batches of the loader; None if it cannot be
    counted how many are ready.
    """
    with opened(loader) as (feed, _):
        for _ in range(max(1, feed.workers) + feed.ahead):  # the first ones take longer
            feed.next()
        steps, made, stepped_s, began = 0, 0, 0.0, now()
        while steps < _FEWEST or now() - began < seconds:
            begin = now()
            yield resident()
            stepped_s, steps = stepped_s + now() - begin, steps + 1
            ready = feed.ready()
            if ready is None:
                return None
            for _ in range(ready):
                feed.next()
            made += ready
        took = now() - began
    return (stepped_s / steps, took / made) if made else None
