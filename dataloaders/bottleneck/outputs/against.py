"""Compare two reports: how many times as fast the loop is as before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dataloaders.bottleneck.arms import Verdict
from dataloaders.bottleneck.outputs.contents import Table, milliseconds, times
from dataloaders.measuring.intervals import Interval

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report


@dataclass(frozen=True)
class Comparison:
    """Holds what changed between two reports."""

    verdicts: tuple[Verdict, Verdict]  # before, now
    # Arm -> seconds a batch before, now, and before / now, with 95 % intervals; above 1: faster.
    arms: Mapping[str, tuple[Interval, Interval, Interval]]
    differs: tuple[str, ...]  # differences in loader, batch and machine, a sentence each

    def __str__(self) -> str:
        lines = [
            f"COMPARED WITH BEFORE: {self.sentence}",
            *(f"  {arm}: {times(each[2])}" for arm, each in self.arms.items()),
        ]
        return "\n".join([*lines, *(f"note: {line}" for line in self.differs)])

    @property
    def sentence(self) -> str:
        """Return both verdicts and the change of the loop's speed, in a sentence."""
        before, now = self.verdicts
        verdicts = f"still {now}" if before == now else f"{before} before, {now} now"
        if "real" not in self.arms:
            return f"{verdicts}; one of the two has no figure for the loop."
        ratio = self.arms["real"][2]
        if ratio.low <= 1 <= ratio.high:
            loop = f"no difference that the two show: {times(ratio)} as fast"
        else:
            loop = f"the loop is {times(ratio)} as fast as before"
        return f"{verdicts}; {loop}."

    @property
    def table(self) -> Table:
        """Return how many times as fast each arm is as before."""
        rows = [
            (name, milliseconds(before.estimate), milliseconds(now.estimate), times(ratio))
            for name, (before, now, ratio) in self.arms.items()
        ]
        return Table(("input", "ms before", "ms now", "as fast as before"), rows)


def compare(before: Report, now: Report) -> Comparison:
    """Compare ``now`` with ``before``.

    Each report was measured on its own, so their errors are independent: on the logarithmic scale,
    the distances of the two ends from their estimates add as squares.
    """
    arms = {
        arm: (then, took, _ratio(then, took))
        for arm, took in now.seconds_per_batch.items()
        if (then := before.seconds_per_batch.get(arm)) is not None
    }
    facts = [("loader", before.loader, now.loader), ("batch", before.batch, now.batch)]
    keys = dict.fromkeys((*before.machine, *now.machine))
    facts += [(key, before.machine.get(key, ""), now.machine.get(key, "")) for key in keys]
    differs = [f"{name}: {then or '?'} before, {here or '?'} now" for name, then, here in facts
               if then != here]  # fmt: skip
    return Comparison((before.verdict, now.verdict), arms, tuple(differs))


def _ratio(above: Interval, below: Interval) -> Interval:
    ratio = above.estimate / below.estimate
    down = math.hypot(_log(above.estimate, above.low), _log(below.high, below.estimate))
    up = math.hypot(_log(above.high, above.estimate), _log(below.estimate, below.low))
    return Interval(ratio * math.exp(-down), ratio, ratio * math.exp(min(up, 700.0)))


def _log(high: float, low: float) -> float:
    return math.log(high / low) if low > 0 else math.inf
