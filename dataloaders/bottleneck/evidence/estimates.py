"""Estimate real / synthetic, and what each cause takes, from corrected blocks.

waits    the host's clock: 1 + wait in next() / step + how much slower steps are beside workers.
         Both waits and steps are measured to the microsecond, one by one.
blocks   a device's clock, or several ranks: real / synthetic, whole rounds resampled
steps    the same with less than four rounds: segments resampled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.bottleneck.arms import ARMS, STALLS
from dataloaders.bottleneck.evidence.corrections import Corrected, Round, per_step, segments_of
from dataloaders.measuring.intervals import (
    BlockTimes,
    Interval,
    Segment,
    interval_of,
    picked,
    ratio_draws,
)

Evidence: TypeAlias = Literal["blocks", "steps", "waits"]
Array: TypeAlias = npt.NDArray[np.float64]

# What interleaved blocks of one and the same thing still differ by (placement in memory, clock,
# the measuring itself): no interval is narrower than this share of its estimate.
RESOLUTION = 0.01

_HELD_FROM = 0.005  # a share that no process ever escapes
_FEWEST_SEGMENTS = 2
_FEWEST_ROUNDS = 4  # two or three blocks agree by chance too often
_MOST_UNITS = 200
_TRIMMED = 0.1
_TRIMMED_OF_A_BLOCK = 0.25
_SLOW_FROM_S = 0.05
_ALONE_FROM_S = 0.005  # below, what loading does to caches is a part of the step worth measuring


@dataclass(frozen=True)
class Estimate:
    """Holds draws and means of each arm's seconds a batch, and the bound, real / synthetic."""

    evidence: Evidence
    bound: Interval
    draws: Mapping[str, Array]
    means: Mapping[str, float]
    count: int

    def stalls(self) -> tuple[dict[str, Array], dict[str, float]]:
        """Return draws and means of the seconds a batch that each cause takes.

        A cause is an arm's difference to synthetic; prep is what is left.
        """
        means = {stall: float(value) for stall, value in _stalls(self.means).items()}
        return _stalls(self.draws), means


def estimate_of(
    found: Corrected,
    *,
    asynchronous: bool,
    parallel: bool,
    turn: int,
    epoch_starts: Sequence[float],
    length: int,
) -> Estimate | None:
    """Return the estimate, or None if too little was measured; see `analyse`."""
    rounds, everything = found.rounds, [*found.rounds, found.part]
    starts = found.starts if asynchronous else epoch_starts
    starts = [] if found.whole_epochs else starts
    if asynchronous and len(rounds) >= _FEWEST_ROUNDS:
        blocks = {
            arm: np.array([(one[arm].seconds, one[arm].steps) for one in rounds])
            for arm in rounds[0]
        }
        estimate = _by_difference("blocks", blocks, starts, length, len(rounds))
        return _with_waits_elsewhere(estimate, segments_of(everything, "synthetic"))
    segments = {arm.name: those for arm in ARMS if (those := segments_of(everything, arm.name))}
    fewest = min(len(segments.get(arm, ())) for arm in ("synthetic", "real"))
    if not (parallel or asynchronous) and len(segments.get("synthetic", ())) < _FEWEST_SEGMENTS:
        # Nothing works beside the step: without their waits, real steps are steps alone.
        own = (one._replace(seconds=one.seconds - one.waited) for one in segments.get("real", ()))
        segments["synthetic"] = [*own]
        fewest = len(segments["synthetic"])
    # Of each worker a batch, unless they were idle, their queue full.
    busy = any(one["real"].busy for one in everything if "real" in one)
    few = busy and sum(one.steps for one in segments.get("real", ())) < turn
    if few or fewest < _FEWEST_SEGMENTS:
        return None
    if asynchronous:
        units = {arm: _units(those) for arm, those in segments.items()}
        # Neighbouring segments share the state of the queue: they count for half.
        count = max(2, min(map(len, units.values())) // 2)
        estimate = _by_difference("steps", units, starts, length, count)
        return _with_waits_elsewhere(estimate, segments["synthetic"])
    # Where steps are slow there are few: those of the warm-up say as well how long a step takes.
    if per_step(segments["synthetic"]) > _SLOW_FROM_S:
        for arm in segments.keys() & {"synthetic", "contended"}:
            warm_up = [seconds for one in everything if arm in one for seconds in one[arm].warm_up]
            segments[arm] += [Segment(seconds, 1) for seconds in warm_up]
    return _by_waits(segments, rounds, starts, length, parallel=parallel, turn=turn)


def _by_difference(
    evidence: Evidence,
    units: Mapping[str, Array],
    starts: Sequence[float],
    length: int,
    count: int,
) -> Estimate:
    """Compare real and synthetic: rounds resampled as wholes, or each arm's segments."""
    means: dict[str, float] = {}
    draws: dict[str, Array] = {}
    for seed, (arm, those) in enumerate(units.items()):
        means[arm], draws[arm] = _ratio(those, 0, 0 if evidence == "blocks" else seed)
    added = _added_by_starts(starts, length, draws["real"])
    draws["real"] = draws["real"] + added
    means["real"] += float(np.mean(added))
    return _estimate(evidence, draws, means, count)


def _by_waits(
    segments: Mapping[str, list[Segment]],
    rounds: Sequence[Round],
    starts: Sequence[float],
    length: int,
    *,
    parallel: bool,
    turn: int,
) -> Estimate:
    """Add the wait and what workers slow the step down by to the step."""
    several = sum(one.steps for one in segments["real"]) >= 2 * turn
    real = _units(segments["real"], turn if several else 1)  # workers deliver in turns
    resident = _units(segments["synthetic"])
    wait, waited = _ratio(real, 2, 0)
    own = real.copy()  # the steps of real blocks, without their waits
    own[:, 0] -= own[:, 2]
    slower, slower_draws, clusters = 0.0, np.zeros_like(waited), len(own)
    alone = not parallel and per_step(segments["synthetic"]) >= _ALONE_FROM_S
    if alone:  # without anything beside the step, all of these are steps alone
        resident = np.concatenate([resident, own])
    else:
        beside = _units(segments["contended"]) if "contended" in segments else own
        slower, slower_draws, clusters = _slower(beside, resident, rounds)
    step, step_draws = _ratio(resident, 0, 1)
    added = _added_by_starts(starts, length, waited)
    draws = {"synthetic": step_draws, "real": step_draws + slower_draws + waited + added}
    means = {"synthetic": step, "real": step + slower + wait + float(np.mean(added))}
    if parallel:
        draws["contended"], means["contended"] = step_draws + slower_draws, step + slower
    for seed, arm in enumerate(segments):
        if arm not in means:
            means[arm], draws[arm] = _ratio(_units(segments[arm]), 0, seed)
    # The interval is widened for the observations of what varies most.
    counts = _effective(real[:, 2]), clusters, len(resident)
    spreads = [float(each.std()) for each in (waited, slower_draws, step_draws)]
    count = counts[spreads.index(max(spreads))]
    found = _estimate("waits", draws, means, count)
    if alone:
        return found
    # No step is faster beside workers than alone: what it waits is lost at the least.
    sure = 1 + ratio_draws(real[:, 2], real[:, 0] - real[:, 2], 0)
    mean = 1 + float(real[:, 2].sum() / (real[:, 0] - real[:, 2]).sum())
    least = interval_of(mean, sure, len(real), RESOLUTION * mean)
    bound = found.bound
    low, estimate = max(bound.low, least.low), max(bound.estimate, least.low)
    return replace(found, bound=Interval(low, estimate, max(bound.high, estimate)))


def _slower(beside: Array, alone: Array, rounds: Sequence[Round]) -> tuple[float, Array, int]:
    """Return how much slower steps are beside workers, draws of that, and how many observations.

    Trimmed: what the machine did to a few steps of one arm is not the loader's doing. What another
    process does lasts for a block: where there are enough rounds, they are resampled.
    """
    pairs = [
        _trimmed(_steps_of(one["contended"]), _TRIMMED_OF_A_BLOCK)
        - _trimmed(_steps_of(one["synthetic"]), _TRIMMED_OF_A_BLOCK)
        for one in rounds
        if "contended" in one
    ]
    beside, alone = beside[:, 0] / beside[:, 1], alone[:, 0] / alone[:, 1]
    draws = _trimmed(picked(beside, 2)) - _trimmed(picked(alone, 3))
    if len(pairs) >= _FEWEST_ROUNDS:
        by_round = picked(np.array(pairs), 4).mean(axis=1)
        if by_round.std() > draws.std():
            return float(np.mean(pairs)), by_round, len(pairs)
    return float(_trimmed(beside) - _trimmed(alone)), draws, min(len(beside), len(alone))


def _added_by_starts(starts: Sequence[float], length: int, usual: Array) -> Array:
    """Return draws of what starts of epochs add to each batch, beyond its ``usual`` seconds."""
    if not starts:
        return np.zeros_like(usual)
    seconds = picked(np.array(starts), 1).mean(axis=1)
    return np.asarray(np.maximum(0.0, seconds - usual) / length)


def _with_waits_elsewhere(found: Estimate, resident: Sequence[Segment]) -> Estimate:
    """Widen the bound by what waits for other loaders may hide: they are in every arm.

    On a device's clock such a wait is part of the step alone as well, and how much of it the
    device hides is not known: without it the step may be as much shorter.
    """
    elsewhere = sum(one.elsewhere for one in resident) / max(1, sum(one.steps for one in resident))
    step = found.means["synthetic"]
    longer = step / max(step - elsewhere, 0.01 * step) if elsewhere else 1.0
    return replace(found, bound=replace(found.bound, high=found.bound.high * longer))


def undisturbed(
    found: Estimate, rounds: Sequence[Round], asynchronous: bool, parallel: bool
) -> Estimate:
    """Widen the bound to what it may be where no other process runs.

    The step may be shorter by what held it up. Workers do not get quicker then: those that were
    at work for a share of the time make a batch in that share of what one took. On a device's
    clock, what holds up the host is hidden in resident blocks more than in real ones.
    """
    real = [one["real"] for one in rounds if "real" in one]
    held, held_real = (held_share(rounds, arm) for arm in ("synthetic", "real"))
    if not held and not held_real:
        return found
    bound = found.bound
    low, high = bound.low, bound.high
    if parallel:
        busy = sum(one.busy * one.steps for one in real) / sum(one.steps for one in real)
        high *= max(1.0, busy / (1 - max(held, held_real)))
    else:
        free = (1 - held_real) / (1 - held)
        low, high = low * min(1.0, free), high * max(1.0, free)
    if asynchronous:
        low = bound.low * (1 - (held if parallel else held_real))
    return replace(found, bound=Interval(low, bound.estimate, high))


def held_share(rounds: Sequence[Round], arm: str) -> float:
    """Return the share of an arm's time for which other processes may have held up the step."""
    blocks = [one[arm] for one in rounds if arm in one]
    seconds = sum(one.seconds for one in blocks)
    share = sum(one.held for one in blocks) / seconds if seconds > 0 else 0.0
    return min(0.9, share) if share > _HELD_FROM else 0.0


def _estimate(
    evidence: Evidence, draws: Mapping[str, Array], means: Mapping[str, float], count: int
) -> Estimate:
    ratio = means["real"] / means["synthetic"]
    bound = interval_of(ratio, draws["real"] / draws["synthetic"], count, RESOLUTION * ratio)
    return Estimate(evidence, bound, draws, means, count)


def _stalls(seconds: Mapping[str, object]) -> dict[str, Array]:
    synthetic = np.asarray(seconds["synthetic"], dtype=np.float64)
    left = np.asarray(seconds["real"], dtype=np.float64) - synthetic
    stalls: dict[str, Array] = {stall.name: np.zeros_like(left) for stall in STALLS}
    for arm in ARMS:
        if arm.stall is not None and arm.name in seconds:
            own = np.asarray(seconds[arm.name]) - synthetic
            # No part can exceed the whole: with the loader idling between batches, an arm may do
            # worse than the real loop does.
            stalls[arm.stall.name] = np.minimum(own, left)
            left = left - stalls[arm.stall.name]
    return {**stalls, "prep": left}


def _units(segments: Sequence[Segment], turn: int = 1) -> Array:
    """Return rows (seconds, steps, waited) of ``turn`` neighbouring steps, or of more steps."""
    values = np.array([(one.seconds, one.steps, one.waited) for one in segments], dtype=np.float64)
    turns = max(1, int(values[:, 1].sum()) // turn)
    count = min(_MOST_UNITS, len(values), turns)
    edges = np.linspace(0, len(values), count, endpoint=False).astype(int)
    return np.asarray(np.add.reduceat(values, edges))


def _ratio(units: Array, column: int, seed: int) -> tuple[float, Array]:
    """Return the sum of a column (0: seconds, 2: waited) over the sum of steps, and draws of it."""
    above, steps = units[:, column], units[:, 1]
    return float(above.sum() / steps.sum()), ratio_draws(above, steps, seed)


def _effective(values: Array) -> int:
    """Return how many observations ``values`` are worth: few where a few make up their sum (Kish).

    The tail of heavy-tailed waits is hardly seen in few steps.
    """
    squares = float((values**2).sum())
    return max(2, round(float(values.sum()) ** 2 / squares)) if squares else len(values)


def _steps_of(block: BlockTimes) -> Array:
    return np.array([one.seconds / one.steps for one in block.segments] + list(block.warm_up))


def _trimmed(values: Array, share: float = _TRIMMED) -> Array:
    """Return the mean along the last axis without ``share`` of it at either end."""
    cut = int(values.shape[-1] * share)
    ordered = np.sort(values, axis=-1)
    return np.asarray(ordered[..., cut : values.shape[-1] - cut].mean(axis=-1))
