"""What a few measurements say about settings that were not tried.

A batch takes ``batch_s`` seconds in one process, ``cpu_s`` of them CPU work. w workers make at most

    min(w / batch_s, cores / (cpu_s + step_cpu_s), 1 / handover_s)   batches a second

the waiting of workers overlaps without end, their CPU work only as far as there are cores, and
this process must take every batch over. A step bounds the loop by 1 / step_s besides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["WORTH", "Model"]

WORTH = 0.03
"""The smallest relative gain that is worth a larger setting."""

# What one batch costs the process that takes it from a worker's queue, at least: measured 80 to
# 200 us for one small tensor (a file descriptor is passed, mapped and closed).
_HANDOVER_S = 80e-6
# Predictions are off by several percent: a knee at 2.1 workers is tried with 2, not 3.
_ROUNDING = 0.25


@dataclass(frozen=True)
class Model:
    """One process's costs, in seconds per batch, and the cores there are.

    Attributes:
        batch_s: making a batch.
        cpu_s: CPU seconds in that.
        step_s: the step alone; 0 without a step.
        step_cpu_s: CPU seconds in that.
        loop_s: making a batch and stepping, one after the other as it was measured.
        needed_s: seconds per batch that are short enough; 0 if faster is always better.
        cores: usable ones.
    """

    batch_s: float
    cpu_s: float
    step_s: float
    step_cpu_s: float
    loop_s: float
    needed_s: float
    cores: int

    @property
    def cpu_share(self) -> float:
        """CPU seconds per second of making a batch, above 0 and at most 1."""
        return min(1.0, max(1e-3, self.cpu_s / self.batch_s)) if self.batch_s > 0 else 1.0

    def best_s(self, num_workers: int) -> float:
        """Seconds per batch that ``num_workers`` cannot be faster than."""
        cpu = (min(self.cpu_s, self.batch_s) + self.step_cpu_s) / self.cores
        return max(self.batch_s / max(1, num_workers), cpu, self.step_s, _HANDOVER_S)

    def gain(self, cap: int) -> float:
        """How much faster up to ``cap`` workers can be than one process: 1.0 is not at all."""
        return self.loop_s / max(self.best_s(cap), self.needed_s) if cap else 1.0

    def knee(self, cap: int) -> int:
        """The number of workers, 1 to ``cap``, beyond which more should not help."""
        target = max(self.best_s(cap), self.needed_s)
        return max(1, min(cap, math.ceil(self.batch_s / target - _ROUNDING)))

    def fewest_for(self, seconds_per_batch: float, per_worker_s: float) -> int:
        """Workers below which ``seconds_per_batch`` is out of reach.

        ``per_worker_s`` is the fewest seconds per batch and worker seen so far.
        """
        fastest = min(per_worker_s, self.batch_s)
        return max(1, math.ceil(fastest / seconds_per_batch - 0.05))
