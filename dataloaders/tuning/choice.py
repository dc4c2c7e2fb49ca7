"""Which of the settings that were tried suffices, and what the step needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dataloaders.measuring.intervals import Interval
from dataloaders.tuning.model import WORTH
from dataloaders.tuning.result import Settings

__all__ = ["Need", "choose", "enough"]


@dataclass(frozen=True)
class Need:
    """The rate from which faster loading is of no use.

    Attributes:
        samples_per_second: what is needed; None if faster is always better.
        from_step: whether a step was measured; else the user gave the rate.
    """

    samples_per_second: Interval | None = None
    from_step: bool = False

    @property
    def rate(self) -> float:
        """Samples per second that suffice; infinite if faster is always better."""
        if self.samples_per_second is None:
            return math.inf
        # A step's rate is measured, and the loop around it costs something too; a rate that the
        # user gives is meant.
        return self.samples_per_second.estimate * (1 - WORTH if self.from_step else 1)

    @property
    def clause(self) -> str | None:
        """What is needed, and who says so; None if faster is always better."""
        if self.samples_per_second is None:
            return None
        who = "the step takes" if self.from_step else "needed are"
        return f"{who} {self.samples_per_second.estimate:,.0f} samples/s"


def enough(rates: Mapping[Settings, float], need: Need) -> float:
    """The rate from which a setting suffices: what is needed, or within 3 % of the best."""
    return min(max(rates.values(), default=0.0) * (1 - WORTH), need.rate)


def choose(rates: Mapping[Settings, float], need: Need, fallback: Settings) -> Settings:
    """The smallest setting that suffices; ``fallback`` if there is none."""
    least = enough(rates, need)
    return min(
        (one for one, rate in rates.items() if rate >= least),
        key=lambda one: one.size,
        default=fallback,
    )
