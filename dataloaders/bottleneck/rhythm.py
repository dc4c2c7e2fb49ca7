"""Find the cycle of a loop's steps, and when they are steady.

Rhythm     seconds between batches, optimizer steps ──> how many batches make one cycle
WarmUp     seconds of each first step               ──> whether steps are steady
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence

_APART = 1.5  # times longer than the longest of the others
_LONGEST_CYCLE = 128
_FETCHED_AHEAD = 2  # batches that a consumer may take before its first step


class Rhythm:
    """Finds how many batches make one cycle of the loop.

    With gradient accumulation, or a log line or checkpoint every so many batches, only whole cycles
    compare. A cycle ends when an optimizer steps; without an optimizer, when a batch is asked for
    much later than usual, always after the same number of batches.
    """

    def __init__(self) -> None:
        self.cycle = 1  # in batches, by the last update
        self.aligned = True  # whether the next batch is the first of a cycle
        self._stepped = False
        self._optimizers = False
        self._late_s = math.inf  # the shortest gap that ends a cycle, without an optimizer
        self._seen: deque[tuple[bool, float]] = deque(maxlen=4 * _LONGEST_CYCLE)

    @property
    def known(self) -> bool:
        """Whether enough ends of cycles were seen, or none at all."""
        if self.cycle > 1:
            return True
        if self._optimizers:
            return sum(stepped for stepped, _ in self._seen) >= 3
        gaps = [gap for _, gap in self._seen][_FETCHED_AHEAD:]  # the first steps may compile
        return not 0 < len(_late(gaps)) < 4

    def stepped(self) -> None:
        """Note that an optimizer stepped."""
        self._stepped = self._optimizers = True

    def asked(self, gap_s: float) -> None:
        """Note that a batch is asked for, ``gap_s`` seconds after the previous one was given."""
        self._seen.append((self._stepped, gap_s))
        self.aligned = self.cycle == 1 or gap_s > self._late_s or self._stepped
        self._stepped = False

    def update(self) -> None:
        """Find the cycle in the steps noted so far."""
        self._late_s = math.inf
        self.cycle = _spacing([at for at, (stepped, _) in enumerate(self._seen) if stepped], 3)
        if self.cycle > 1:
            return
        gaps = [gap for _, gap in self._seen]
        late = _late(gaps)
        self.cycle = _spacing(late, 4)
        if self.cycle > 1:
            self._late_s = min(gaps[at] for at in late) / 2


def _spacing(ends: Sequence[int], count: int) -> int:
    """Return the distance between the last ``count`` positions if it is always the same, else 1."""
    last = ends[-count:]
    steps = {after - before for before, after in itertools.pairwise(last)}
    same = len(last) == count and len(steps) == 1
    return steps.pop() if same and max(steps) <= _LONGEST_CYCLE else 1


def _late(gaps: Sequence[float]) -> list[int]:
    """Return the positions of the gaps that are far longer than all others."""
    if not gaps:
        return []
    late_s = max(3 * statistics.median(gaps), max(gaps) / 3, 0.001)
    late_s = max(late_s, _APART * max((gap for gap in gaps if gap <= late_s), default=0.0))
    return [at for at, gap in enumerate(gaps) if gap > late_s]


class WarmUp:
    """Decides when steps are steady: compiled, their kernels chosen, the loader's queue settled."""

    def __init__(self, most_s: float, fewest: int = 2) -> None:
        # The warm-up takes at least `fewest` steps and at most `most_s` seconds, in which single
        # steps far longer than the others (compilation) do not count.
        self._most_s, self.fewest = most_s, fewest
        self._steps: list[float] = []
        self._spent = 0.0

    def stepped(self, step_s: float, loop_s: float) -> None:
        """Note the seconds of a step, without and with its wait."""
        self._steps.append(step_s)
        self._spent += loop_s

    @property
    def due(self) -> bool:
        """Whether to call `over` now; after many short steps, only every 16th time."""
        return len(self._steps) <= 64 or len(self._steps) % 16 == 0

    @property
    def excess_s(self) -> float:
        """Return the seconds of early steps that took far longer than the last ones."""
        if len(self._steps) < 3:
            return 0.0
        usual = statistics.fmean(self._steps[-min(64, (len(self._steps) + 1) // 2) :])
        return sum(step for step in self._steps[:64] if step > 10 * usual and step > 0.5)

    def over(self, cycle: int = 1, waiting_for_more: bool = False) -> bool:
        """Return whether measuring can begin: whether the last three whole cycles agree."""
        done = len(self._steps)
        if done < 3:
            return False
        ends = [done - turn * cycle for turn in range(3)]
        last = [sum(self._steps[end - cycle : end]) for end in ends if end >= cycle]
        steady = len(last) == 3 and max(last) <= 2 * min(last) + 0.001
        if self._spent - self.excess_s > self._most_s:
            return steady or done >= 5
        return steady and done >= self.fewest and self._spent > 0.5 and not waiting_for_more
