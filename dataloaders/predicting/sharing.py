"""Cores that preparation and the step share: how much slower each is while the other runs.

    step alone ──┐
    step on resident batches, while all workers prepare others ──┴──> how many times slower

A step of one thread keeps its core, and preparation gets the others. A step of several threads
loses time beside workers, since all of its threads wait for the last one: that is measured. If it
cannot be, all that run at one moment are as much slower as they want more cores than there are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    loader: Any, step: Callable[[], Steps[float | None]], seconds: float
) -> Steps[tuple[float, float] | None]:
    """Run steps while batches of ``loader`` are made all the time, for about ``seconds``.

    ``step`` yields a resident batch and returns the seconds of the step, None if the loop did
    something else meanwhile.

    Returns the seconds of a step, and those between two batches of the loader; None if they are not
    known, as where it cannot be counted how many batches are ready.
    """
    took: list[float] = []
    drained: list[tuple[float, int]] = []  # when, and how many batches were ready
    with opened(loader) as (feed, _):
        for _ in range(max(1, feed.workers) + feed.ahead):  # the first ones take longer
            feed.next()
        until = time.perf_counter() + seconds
        while len(took) < _FEWEST or time.perf_counter() < until:
            step_s = yield from step()
            ready = feed.ready()
            if step_s is None or ready is None:
                return None
            took.append(step_s)
            for _ in range(ready):
                feed.next()
            if ready:
                drained.append((time.perf_counter(), ready))
    # Workers that began together end together: whole bunches count, from one to another.
    made = sum(ready for _, ready in drained[1:])
    if not made:
        return None
    return statistics.fmean(took), (drained[-1][0] - drained[0][0]) / made
