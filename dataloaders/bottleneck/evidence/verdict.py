"""Derive from measured blocks the verdict that their interval supports.

speed-up bound = real / synthetic
    low  >= 1.05  input costs at least 5 %: the largest stall names the verdict
    high <= 1.08  no change of the input gains more than 8 %: step-bound
    otherwise     inconclusive
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dataloaders.bottleneck.arms import ARMS, STALLS, Verdict
from dataloaders.bottleneck.evidence.corrections import Loop, Round, corrected
from dataloaders.bottleneck.evidence.estimates import (
    RESOLUTION,
    Array,
    Estimate,
    Evidence,
    estimates_of,
    held_share,
    undisturbed,
)
from dataloaders.measuring.intervals import Interval, interval_of

BOUND_FROM = 1.05
"""The input is a bottleneck if the whole interval of real/synthetic lies above this."""

STEP_BOUND_UP_TO = 1.08
"""The step is the bottleneck if the whole interval of real/synthetic lies below this."""

HELD_UP = 0.03
"""The share of its time for which other processes may hold a step up, as on any machine."""

_CAUSE_SUPPORT = 0.95
_ENOUGH_HALF_WIDTH = 0.02
_ENOUGH_SHARE_OF_GAP = 0.15
_LEAST = 0.95  # no loop is faster than its step alone; lower, and the machine has changed
_WIDEST = 3.0  # the largest high / low of an interval that is printed


@dataclass(frozen=True)
class Analysis:
    """Holds what the blocks so far show; `Report` explains the fields that it has, too."""

    verdict: Verdict = "inconclusive"
    evidence: Evidence | None = None  # None: too few blocks for figures
    speedup_bound: Interval | None = None  # also None if it is too wide to print
    seconds_per_batch: Mapping[str, Interval] = field(default_factory=dict)
    stalls: Mapping[str, Interval] = field(default_factory=dict)
    smallest_gap: float | None = None  # half the interval's width over its estimate
    precise: bool = False  # whether there is a verdict, and the interval is narrow
    left_out: int = 0  # real steps, because their shape was new to the step
    held: float = 0.0  # share of an arm's time in which other processes may have held it up


def analyse(rounds: Sequence[Round], *, part: Round | None = None, **facts: Any) -> Analysis:
    """Return the verdict of ``rounds`` (arm -> its block), without evidence if they are too few.

    Args:
        rounds: the same arms in each.
        part: the running round; its segments count where single segments do.
        facts: attributes of `Loop`.
    """
    loop, everything = Loop(**facts), [*rounds, part or {}]
    loop = replace(loop, asynchronous=loop.asynchronous or loop.ranks)
    found = corrected(rounds, part or {}, loop)
    steps = sum(one["real"].steps for one in everything if "real" in one)
    estimates = [
        _doubted(undisturbed(one, everything, loop), steps, loop)
        for one in estimates_of(found, loop)
    ]
    if not estimates:
        return Analysis()
    named: list[tuple[Verdict, Estimate]] = [
        (name(one.bound, *one.stalls()) if _says_something(one.bound) else "inconclusive", one)
        for one in estimates
    ]
    verdict, best = next((pair for pair in named if pair[0] != "inconclusive"), named[0])
    if verdict == "inconclusive":
        best = min(estimates, key=lambda one: one.bound.high - one.bound.low)
    held = max(held_share(everything, arm) for arm in ("synthetic", "real"))
    if not _says_something(best.bound):
        return Analysis(verdict, best.evidence, left_out=found.left_out, held=held)
    bound, count = best.bound, best.count
    stall_draws, stall_means = best.stalls()
    enough = max(_ENOUGH_HALF_WIDTH, _ENOUGH_SHARE_OF_GAP * abs(bound.estimate - 1))
    return Analysis(
        verdict,
        best.evidence,
        bound,
        seconds_per_batch={
            arm.name: interval_of(mean, best.draws[arm.name], count, RESOLUTION * mean)
            for arm in ARMS
            if (mean := best.means.get(arm.name)) is not None
        },
        stalls={
            stall: interval_of(stall_means[stall], draws, count)
            for stall, draws in stall_draws.items()
        },
        smallest_gap=bound.half_width / bound.estimate,
        precise=verdict != "inconclusive" and bound.half_width <= enough,
        left_out=found.left_out,
        held=held,
    )


def _says_something(bound: Interval) -> bool:
    """Whether an interval is worth printing: not too wide (0.04 to 8555), nor far below 1."""
    return bound.low > 0 and bound.high / bound.low <= _WIDEST and bound.high >= _LEAST


def _doubted(found: Estimate, steps: int, loop: Loop) -> Estimate:
    """Widen a bound that says step-bound to its value with slow batches that no block measured."""
    bound, step_s = found.bound, found.means["synthetic"]
    if not loop.lost_s or bound.high > STEP_BOUND_UP_TO:
        return found
    seconds = steps * found.means["real"] + loop.unmeasured * step_s + loop.lost_s
    high = max(bound.high, seconds / (steps + loop.unmeasured) / step_s)
    return replace(found, bound=replace(bound, high=high))


def name(
    bound: Interval, stall_draws: Mapping[str, Array], stall_means: Mapping[str, float]
) -> Verdict:
    """Return the verdict that ``bound`` supports; the largest stall names a gap."""
    if bound.low < BOUND_FROM:
        return "step-bound" if bound.high <= STEP_BOUND_UP_TO else "inconclusive"
    cause = max(stall_means, key=lambda stall: stall_means[stall])
    others = [draws for stall, draws in stall_draws.items() if stall != cause]
    support = float(np.mean(stall_draws[cause] >= np.maximum.reduce(others)))
    if support >= _CAUSE_SUPPORT:
        return next(stall.verdict for stall in STALLS if stall.name == cause)
    # The gap may be certain although its largest cause is not. Preparation and contention are both
    # the loader's work on the CPU, so input-bound covers both.
    if stall_means["transfer"] < min(stall_means["prep"], stall_means["contention"]):
        return "input-bound"
    return "inconclusive"
