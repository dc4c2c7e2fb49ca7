"""Cores that preparation and the step share: how much slower each is while the other runs.

A step of one thread keeps its core, and preparation gets the others. Beside a step of several
threads, all that run at one moment are as much slower as they want more cores than there are. That
is rough, since all threads of a step wait for the last one: where it matters, the loop is run.
"""

from __future__ import annotations

from dataclasses import dataclass

_ONE_THREAD = 1.2  # cores that a step of one thread keeps busy, at the most


@dataclass(frozen=True)
class Sharing:
    """Holds what the step and the workers want of the cores."""

    cores: int = 1  # that the loop may use
    load_cores: float = 1.0  # cores that preparation keeps busy; the rest of its time is waiting
    step_cores: float = 1.0  # cores that the step keeps busy
    behind: bool = False  # whether the step is a device's work, which needs no core

    def slowed(self, busy: int, stepping: bool, weight: float = 1.0) -> tuple[float, float]:
        """Return how many times longer preparation and the step take; see `model.Slowed`.

        ``weight`` multiplies what they lose.
        """
        load = step = self._overload(busy, stepping)
        if load and busy and stepping and self.step_cores <= _ONE_THREAD < self.cores:
            load, step = busy * self.load_cores / (self.cores - self.step_cores) - 1, 0.0
        return 1 + weight * load, 1.0 if self.behind else 1 + weight * step

    def _overload(self, busy: int, stepping: bool) -> float:
        wanted = busy * self.load_cores + stepping * self.step_cores
        return max(0.0, wanted / self.cores - 1)

    def crowded(self, busy: int) -> bool:
        """Whether a step of several threads and ``busy`` workers want more cores than there are."""
        threads = self.step_cores > _ONE_THREAD and not self.behind
        return threads and self._overload(busy, True) > 0
