"""Estimate real / synthetic from corrected blocks; a report names the estimate that it uses.

blocks   real / synthetic, with whole rounds resampled
steps    the same with segments resampled: for few rounds on a device's clock
waits    1 + wait in next() / step + contention. A real step's wait is measured to the microsecond.
         On the host's clock it is lost time. On a device's clock it is the most that can be lost,
         so there it supports only "step-bound".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.bottleneck.arms import ARMS, STALLS
from dataloaders.bottleneck.evidence.corrections import (
    Corrected,
    Loop,
    Round,
    per_step,
    segments_of,
)
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
Starts: TypeAlias = Callable[[Array], Array]

# No interval is narrower than this share of its estimate: interleaved blocks of one arm differ by
# that much, because of placement in memory, clocks and the measuring itself.
RESOLUTION = 0.01

_HELD_FROM = 0.005  # on any machine, a process waits for a core for this share of the time
_FEWEST_SEGMENTS = 2
_FEWEST_ROUNDS = 4
_MOST_UNITS = 200
_TRIMMED = 0.1
_TRIMMED_OF_A_BLOCK = 0.25
_ALONE_FROM_S = 0.005  # shorter steps are slower after loading, which fills the CPU's caches
_SLOW_FROM_S = 0.05


@dataclass(frozen=True)
class Estimate:
    """Holds the bound, real / synthetic, and draws and means of each arm's seconds a batch."""

    evidence: Evidence
    bound: Interval
    draws: Mapping[str, Array]
    means: Mapping[str, float]
    count: int
    apart: bool = False  # whether the gap is a wait that was measured within real steps

    def stalls(self) -> tuple[dict[str, Array], dict[str, float]]:
        """Return draws and means of the seconds a batch that each cause takes.

        A cause is an arm's difference to synthetic; "prep" is the rest.
        """
        means = {stall: float(value) for stall, value in _stalls(self.means).items()}
        return _stalls(self.draws), means


def estimates_of(found: Corrected, loop: Loop) -> list[Estimate]:
    """Return the estimates for which there are enough figures, the best first."""
    asynchronous, rounds, everything = loop.asynchronous, found.rounds, [*found.rounds, found.part]
    visible = found.starts if asynchronous else loop.epoch_starts
    starts = partial(_of_starts, () if found.whole_epochs else visible, loop.length)
    estimates: list[Estimate] = []
    if len(rounds) >= 2:
        blocks = {
            arm: np.array([(one[arm].seconds, one[arm].steps) for one in rounds])
            for arm in rounds[0]
        }
        estimates.append(_by_difference("blocks", blocks, starts, asynchronous, len(rounds)))
    segments = {arm.name: segments_of(everything, arm.name) for arm in ARMS}
    step_s = per_step(segments["synthetic"])
    # Slow steps are few, so those of the warm-up count as well.
    for arm in ("synthetic", "contended"):
        if segments[arm] and not asynchronous and step_s > _SLOW_FROM_S:
            warm_up = [seconds for one in everything if arm in one for seconds in one[arm].warm_up]
            segments[arm] += [Segment(seconds, 1) for seconds in warm_up]
    alone = not loop.parallel and step_s >= _ALONE_FROM_S
    whole_turn = sum(one.steps for one in segments["real"]) >= loop.turn
    if whole_turn and min(len(segments["synthetic"]), len(segments["real"])) >= _FEWEST_SEGMENTS:
        if asynchronous:
            units = {arm: _units(those) for arm, those in segments.items() if those}
            # Neighbouring segments share the queue's state: two of them count as one observation.
            count = max(2, min(len(those) for those in units.values()) // 2)
            estimates.append(_by_difference("steps", units, starts, asynchronous, count))
            if not loop.ranks and (segments["contended"] or not loop.parallel):
                # As if the device hid none of the starts of epochs.
                most = partial(_of_starts, loop.epoch_starts, loop.length)
                estimates.append(_bounded_by_waits(segments, most, estimates[0]))
        else:
            by_waits = _by_waits(segments, starts, alone=alone, rounds=rounds, turn=loop.turn)
            # Without workers the wait is the whole gap, and this is the best estimate.
            estimates.insert(0 if alone else len(estimates), by_waits)
    if len(estimates) > 1 and len(rounds) < _FEWEST_ROUNDS:
        # Two or three rounds agree by chance too often; single steps are better evidence.
        estimates = [one for one in estimates if one.evidence != "blocks"]
    if asynchronous:
        estimates = [_with_waits_elsewhere(one, segments["synthetic"]) for one in estimates]
    return estimates


def _of_starts(starts: Sequence[float], length: int, usual: Array) -> Array:
    """Return draws of the seconds a batch that starts of epochs take beyond a ``usual`` step."""
    if not starts:
        return np.zeros_like(usual)
    seconds = np.array(starts)
    picks = np.random.default_rng(1).integers(0, len(seconds), (len(usual), len(seconds)))
    return np.asarray(np.maximum(0.0, seconds[picks].mean(axis=1) - usual) / length)


def _by_difference(
    evidence: Evidence,
    units: Mapping[str, Array],
    starts: Starts,
    asynchronous: bool,
    count: int,
) -> Estimate:
    """Compare real and synthetic; resample whole rounds, or the segments of each arm."""
    means: dict[str, float] = {}
    draws: dict[str, Array] = {}
    for seed, (arm, those) in enumerate(units.items()):
        means[arm], draws[arm] = _ratio(those, 0, 0 if evidence == "blocks" else seed)
    usual = draws["real"] if asynchronous else np.maximum(0.0, draws["real"] - draws["synthetic"])
    added = starts(usual)
    draws["real"] = draws["real"] + added
    means["real"] += float(np.mean(added))
    return _estimate(evidence, draws, means, count)


def _ratio(units: Array, column: int, seed: int) -> tuple[float, Array]:
    """Return the sum of a column (0: seconds, 2: waited) over the sum of steps, and draws of it."""
    above, steps = units[:, column], units[:, 1]
    return float(above.sum() / steps.sum()), ratio_draws(above, steps, seed)


def _slower(beside: Array, each: Array) -> tuple[float, Array]:
    """Return how many seconds slower steps are while the loader works, and draws of that.

    Means are trimmed, because a few steps that the machine disturbed are not contention.
    """
    beside, each = beside[:, 0] / beside[:, 1], each[:, 0] / each[:, 1]
    draws = _trimmed(picked(beside, 2)) - _trimmed(picked(each, 3))
    return float(_trimmed(beside) - _trimmed(each)), draws


def _by_waits(
    segments: Mapping[str, list[Segment]],
    starts: Starts,
    *,
    alone: bool,
    rounds: Sequence[Round],
    turn: int,
) -> Estimate:
    """Estimate the loop on the host's clock: the step, its wait and contention."""
    # Workers deliver in turn. If waits repeat with each turn, whole turns differ less.
    units = (_units(segments["real"], each) for each in (1, turn))
    real = min(units, key=lambda one: _ratio(one, 2, 0)[1].std())
    resident = _units(segments["synthetic"])
    wait, waited = _ratio(real, 2, 0)
    own = real.copy()  # real steps without their waits
    own[:, 0] -= own[:, 2]
    if segments["contended"]:
        own = _units(segments["contended"])
    if alone:
        resident = np.concatenate([resident, own])
    step, step_draws = _ratio(resident, 0, 1)
    slower, slower_draws, clustered = 0.0, np.zeros_like(step_draws), len(real)
    if not alone:
        slower, slower_draws = _slower(own, resident)
        pairs = [
            _trimmed(_steps_of(one["contended"]), _TRIMMED_OF_A_BLOCK)
            - _trimmed(_steps_of(one["synthetic"]), _TRIMMED_OF_A_BLOCK)
            for one in rounds
            if "contended" in one and one["contended"].segments and one["synthetic"].segments
        ]
        if len(pairs) >= _FEWEST_ROUNDS:
            # Another process may disturb a whole block: its steps are no independent observations.
            by_round = picked(np.array(pairs), 4).mean(axis=1)
            if by_round.std() > slower_draws.std():
                slower, slower_draws = float(np.mean(pairs)), by_round
                clustered = min(len(real), len(pairs))
    added = starts(waited)
    wait += float(np.mean(added))
    draws = {"synthetic": step_draws, "real": step_draws + slower_draws + waited + added}
    means = {"synthetic": step, "real": step + slower + wait}
    if not alone:
        draws["contended"], means["contended"] = step_draws + slower_draws, step + slower
    for seed, arm in enumerate(segments):
        if segments[arm] and arm not in means:
            means[arm], draws[arm] = _ratio(_units(segments[arm]), 0, seed)
    count = min(len(own), len(resident), 2 * clustered)
    if float(waited.std()) > max(float(step_draws.std()), float(slower_draws.std())):
        count = min(count, _effective(real[:, 2]))  # the waits vary most
    found = _estimate("waits", draws, means, count)
    if alone:
        return replace(found, apart=True)
    # Workers make no step faster, so at least its wait is lost.
    sure = 1 + ratio_draws(real[:, 2], real[:, 0] - real[:, 2], 0)
    mean = 1 + float(real[:, 2].sum() / (real[:, 0] - real[:, 2]).sum())
    least = interval_of(mean, sure, len(real), RESOLUTION * mean)
    bound = found.bound
    if bound.low < least.low:
        # Then the lower end is certain, and the upper one gets all of the 5 %.
        bound = interval_of(
            bound.estimate, draws["real"] / step_draws, count, RESOLUTION, tails=(5, 95)
        )
        estimate = max(bound.estimate, least.estimate)
        bound = Interval(least.low, estimate, max(bound.high, estimate, least.high))
    return replace(found, bound=bound)


def _bounded_by_waits(
    segments: Mapping[str, list[Segment]], starts: Starts, known: Estimate
) -> Estimate:
    """Bound the gap on a device's clock from above: the host's waits, contention and the copy."""
    real, resident = _units(segments["real"]), _units(segments["synthetic"])
    (step, step_draws), (wait, waited) = _ratio(resident, 0, 1), _ratio(real, 2, 0)
    most = 1 + (waited + starts(waited)) / step
    estimate = 1 + wait / step
    count = min(len(real), len(resident))
    for arm in ("contended", "host"):  # contention, and the copy to the device
        if segments[arm]:
            slower, draws = _slower(_units(segments[arm]), resident)
            most, estimate = most + draws / step, estimate + slower / step
            count = min(count, len(segments[arm]))
    high = interval_of(estimate, most, count, floor=RESOLUTION * estimate).high
    low = max(1 - RESOLUTION, min(known.bound.low, high))
    bound = Interval(min(low, high), min(max(known.bound.estimate, low), high), high)
    all_draws = {**known.draws, "real": np.minimum(known.draws["real"], high * step_draws)}
    means = {**known.means, "real": min(known.means["real"], high * known.means["synthetic"])}
    return Estimate("waits", bound, all_draws, means, count)


def _with_waits_elsewhere(found: Estimate, resident: Sequence[Segment]) -> Estimate:
    """Widen the bound by the waits for other loaders, which are part of every arm.

    On a device's clock, "synthetic" contains these waits as well. The device may hide any part of
    them, so without them the step may be shorter by as much.
    """
    elsewhere = per_step([one._replace(seconds=one.elsewhere) for one in resident])
    step = found.means["synthetic"]
    longer = step / max(step - elsewhere, 0.01 * step) if elsewhere else 1.0
    return replace(found, bound=replace(found.bound, high=found.bound.high * longer))


def undisturbed(found: Estimate, rounds: Sequence[Round], loop: Loop) -> Estimate:
    """Widen the bound to include its value on a machine without other processes.

    There the step may be shorter by the time for which it was held up, while workers may be no
    quicker: if they were busy for a share of the time, a batch may still take that share of it. On
    a device's clock, resident blocks hide delays of the host better than real ones.
    """
    real = [one["real"] for one in rounds if "real" in one]
    held, held_real = (held_share(rounds, arm) for arm in ("synthetic", "real"))
    bound = found.bound
    low, high = bound.low, bound.high
    if loop.parallel:
        busy = sum(one.busy * one.steps for one in real) / sum(one.steps for one in real)
        high *= max(1.0, busy / (1 - max(held, held_real)))
    else:
        free = (1 - held_real) / (1 - held)
        low, high = low * min(1.0, free), high * max(1.0, free)
    if found.apart:  # it is no gain, and the wait is as long as it was beside any step
        low = max(low, min(bound.low, 1.0))
        high = min(high, 1 + (bound.high - 1) / (1 - max(held, held_real)))
    if loop.asynchronous:
        low = bound.low * (1 - (held if loop.parallel else held_real))
    return replace(found, bound=Interval(low, bound.estimate, high))


def held_share(rounds: Sequence[Round], arm: str) -> float:
    """Return the share of an arm's time in which other processes may have held up the step."""
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
            # An arm may be slower than the real loop, in which the loader is idle between batches;
            # a part cannot exceed the whole.
            stalls[arm.stall.name] = np.minimum(own, left)
            left = left - stalls[arm.stall.name]
    return {**stalls, "prep": left}


def _units(segments: Sequence[Segment], turn: int = 1) -> Array:
    """Return (seconds, steps, waited) of each ``turn`` of segments, or of longer runs if many."""
    values = np.array([(one.seconds, one.steps, one.waited) for one in segments], dtype=np.float64)
    turns = int(values[:, 1].sum()) // turn
    count = min(_MOST_UNITS, len(values), turns if turns > 1 else len(values))
    edges = np.linspace(0, len(values), count, endpoint=False).astype(int)
    return np.asarray(np.add.reduceat(values, edges))


def _steps_of(block: BlockTimes) -> Array:
    return np.array([one.seconds / one.steps for one in block.segments] + list(block.warm_up))


def _trimmed(values: Array, share: float = _TRIMMED) -> Array:
    """Return the mean along the last axis, without ``share`` of the values at either end."""
    cut = int(values.shape[-1] * share)
    ordered = np.sort(values, axis=-1)
    return np.asarray(ordered[..., cut : values.shape[-1] - cut].mean(axis=-1))


def _effective(values: Array) -> int:
    """Return Kish's effective number of observations: small if a few values make up the sum.

    A few steps hardly show the tail of heavy-tailed waits.
    """
    squares = float((values**2).sum())
    return max(2, round(float(values.sum()) ** 2 / squares)) if squares else len(values)
