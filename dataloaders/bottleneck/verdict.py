"""From rounds of measured blocks to a verdict, and never one that the interval does not carry.

speed-up bound = real / synthetic
    low  >= 1.05  the input costs at least 5 %: the largest stall names the verdict
    high <= 1.08  whatever is done about the input gains at most 8 %: step-bound
    otherwise     inconclusive
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from dataloaders.measuring.intervals import Interval, Timed, resample

__all__ = ["BOUND_FROM", "STEP_BOUND_UP_TO", "Analysis", "Verdict", "analyse"]

Verdict: TypeAlias = Literal[
    "input-bound", "transfer-bound", "contention-bound", "step-bound", "inconclusive"
]

BOUND_FROM = 1.05
"""The input is a bottleneck if the whole interval of real/synthetic lies above this."""

STEP_BOUND_UP_TO = 1.08
"""The step is the bottleneck if the whole interval of real/synthetic lies below this."""

_NAMED_BY: dict[str, Verdict] = {
    "prep": "input-bound",
    "transfer": "transfer-bound",
    "contention": "contention-bound",
}
_CAUSE_SUPPORT = 0.95
_ENOUGH_HALF_WIDTH = 0.02
_ENOUGH_SHARE_OF_GAP = 0.15

# What interleaved blocks of one and the same thing still differ by (placement in memory, clock,
# the measuring itself): no interval is narrower than this share of its estimate.
_RESOLUTION = 0.01


@dataclass(frozen=True)
class Analysis:
    """What the rounds so far say.

    Attributes:
        verdict: one of the five.
        speedup_bound: real / synthetic, dimensionless: how many times faster a perfect input
            would make the loop.
        seconds_per_batch: arm -> seconds for one step in that arm.
        stalls: "prep", "transfer", "contention" -> seconds a batch; they add up to real minus
            synthetic.
        smallest_gap: the smallest share of the loop's time that this run could have told from
            none: half the interval's width over its estimate.
        settled: whether more measuring would not change the verdict or help the interval much.
    """

    verdict: Verdict
    speedup_bound: Interval
    seconds_per_batch: Mapping[str, Interval]
    stalls: Mapping[str, Interval]
    smallest_gap: float
    settled: bool


def analyse(
    rounds: Sequence[Mapping[str, Timed]],
    *,
    epoch_starts: Sequence[float] = (),
    batches: int = 1,
) -> Analysis:
    """The verdict that ``rounds`` (arm -> its block, the same arms in each) carry.

    ``epoch_starts`` are seconds from the end of one epoch to the first batch of the next, of
    epochs of ``batches`` batches. An epoch takes start + batches x real - wait, where wait is
    what the steady state waits for each batch anyway; so much is added to real.
    """
    sampled = resample(rounds)
    draws = dict(sampled.draws)
    means = dict(sampled.means)
    if epoch_starts:
        starts = np.array(epoch_starts)
        picks = np.random.default_rng(1).integers(0, len(starts), (len(draws["real"]), len(starts)))
        wait = np.maximum(0.0, draws["real"] - draws["synthetic"])
        added = np.maximum(0.0, starts[picks].mean(axis=1) - wait) / batches
        draws["real"] = draws["real"] + added
        means["real"] += float(added.mean())

    ratio = means["real"] / means["synthetic"]
    bound = sampled.interval(ratio, draws["real"] / draws["synthetic"], floor=_RESOLUTION * ratio)
    stall_draws = _stalls(draws)
    stall_means = {name: float(value) for name, value in _stalls(means).items()}
    verdict = _verdict(bound, stall_draws, stall_means)
    enough = max(_ENOUGH_HALF_WIDTH, _ENOUGH_SHARE_OF_GAP * abs(ratio - 1))
    return Analysis(
        verdict=verdict,
        speedup_bound=bound,
        seconds_per_batch={
            arm: sampled.interval(means[arm], draws[arm], floor=_RESOLUTION * means[arm])
            for arm in draws
        },
        stalls={
            name: sampled.interval(stall_means[name], stall_draws[name]) for name in stall_draws
        },
        smallest_gap=bound.half_width / bound.estimate,
        settled=verdict != "inconclusive" and bound.half_width <= enough,
    )


def _stalls(
    seconds: Mapping[str, object],
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Seconds a batch by cause: each arm adds one thing to the one before; prep is the rest."""
    real, synthetic = np.asarray(seconds["real"]), np.asarray(seconds["synthetic"])
    gap = real - synthetic
    transfer = np.asarray(seconds.get("host", synthetic)) - synthetic
    contention = np.asarray(seconds.get("contended", synthetic)) - synthetic
    # No part can exceed the whole: with the loader idling between batches, an arm may do worse
    # than the real loop does.
    transfer = np.minimum(transfer, gap)
    contention = np.minimum(contention, gap - transfer)
    return {"prep": gap - transfer - contention, "transfer": transfer, "contention": contention}


def _verdict(
    bound: Interval, stall_draws: Mapping[str, np.ndarray], stall_means: Mapping[str, float]
) -> Verdict:
    if bound.low >= BOUND_FROM:
        cause = max(stall_means, key=lambda name: stall_means[name])
        others = [draws for name, draws in stall_draws.items() if name != cause]
        support = float(np.mean(stall_draws[cause] >= np.maximum.reduce(others)))
        if support >= _CAUSE_SUPPORT:
            return _NAMED_BY[cause]
        # Which of two causes is larger may be open while the gap is not. Preparation and
        # contention are both the loader's work on the CPU: their common name is input-bound.
        if stall_means["transfer"] < min(stall_means["prep"], stall_means["contention"]):
            return "input-bound"
        return "inconclusive"
    if bound.high <= STEP_BOUND_UP_TO:
        return "step-bound"
    return "inconclusive"
