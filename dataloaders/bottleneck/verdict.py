"""From measured blocks to a verdict, and never one that its interval does not carry.

speed-up bound = real / synthetic
    low  >= 1.05  the input costs at least 5 %: the largest stall names the verdict
    high <= 1.08  whatever is done about the input gains at most 8 %: step-bound
    otherwise     inconclusive

Three ways to the bound; the verdict says which one carries it:

    blocks   real / synthetic, whole rounds resampled
    steps    the same, laps resampled: where there are few rounds
    waits    1 + wait in next() / step + contention: the wait of a real step is measured to the
             microsecond. On the host's clock it is lost time; on a device's it is the most
             that can be lost, so there it can only carry "step-bound".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.bottleneck.arms import ARMS, STALLS, Verdict
from dataloaders.measuring.intervals import Interval, Lap, Timed, interval_of, picked, ratio_draws

Evidence: TypeAlias = Literal["blocks", "steps", "waits"]
Round: TypeAlias = Mapping[str, Timed]
Array: TypeAlias = npt.NDArray[np.float64]

BOUND_FROM = 1.05
"""The input is a bottleneck if the whole interval of real/synthetic lies above this."""

STEP_BOUND_UP_TO = 1.08
"""The step is the bottleneck if the whole interval of real/synthetic lies below this."""

_CAUSE_SUPPORT = 0.95
_ENOUGH_HALF_WIDTH = 0.02
_ENOUGH_SHARE_OF_GAP = 0.15
_LEAST = 0.95  # no loop is faster than its step alone: an interval below is the machine's doing
_WIDEST = 3.0  # high / low of an interval that still says something

# What interleaved blocks of one and the same thing still differ by (placement in memory, clock,
# the measuring itself): no interval is narrower than this share of its estimate.
_RESOLUTION = 0.01

_HELD_FROM = 0.005  # what no process ever escapes
_FEWEST_LAPS = 2
_FEWEST_ROUNDS = 4
_MOST_UNITS = 200
_TRIMMED = 0.1
_TRIMMED_OF_A_BLOCK = 0.25
_ALONE_FROM_S = 0.005  # below, what loading does to caches is a part of the step worth measuring
_SLOW_FROM_S = 0.05
_FRESH_COSTS = 1.1


@dataclass(frozen=True)
class Analysis:
    """Says what the blocks so far carry; see `Report` for what both have."""

    verdict: Verdict = "inconclusive"
    evidence: Evidence | None = None
    speedup_bound: Interval | None = None  # None, too, if it is too wide to say anything
    seconds_per_batch: Mapping[str, Interval] = field(default_factory=dict)
    stalls: Mapping[str, Interval] = field(default_factory=dict)
    smallest_gap: float | None = None  # half the interval's width over its estimate
    settled: bool = False  # whether more measuring would change neither verdict nor interval much
    left_out: int = 0  # real steps, on shapes that the step had not seen and paid for
    held: float = 0.0  # share of an arm's time for which other processes may have held it up


@dataclass(frozen=True)
class _Found:
    """Holds one way's figures: draws and means of each arm's seconds a batch, and the bound."""

    evidence: Evidence
    bound: Interval
    draws: Mapping[str, Array]
    means: Mapping[str, float]
    count: int


def analyse(
    rounds: Sequence[Round],
    *,
    part: Round | None = None,
    behind: bool = False,
    parallel: bool = True,
    turn: int = 1,
    ranks: bool = False,
    epoch_starts: Sequence[float] = (),
    batches: int = 1,
) -> Analysis | None:
    """Return the verdict that ``rounds`` (arm -> its block) carry; None if they carry no figure.

    Args:
        rounds: the same arms in each.
        part: the round under way: its laps count where laps do.
        behind: whether the clock is a device's, which runs behind the host.
        parallel: whether anything works for the loader while the step runs.
        turn: batches that the loader's workers deliver in turn, one each.
        ranks: whether the step waits for other ranks, so that this one's waits tell little.
        epoch_starts: seconds from the end of one epoch to the first batch of the next, of epochs
            of ``batches`` batches. An epoch takes start + batches x real - wait, where wait is
            what the steady state waits for each batch anyway; so much is added to real.
    """
    behind = behind or ranks
    whole = [*rounds, part or {}]
    rounds, part, left_out = _cleaned(rounds, part or {}, behind, parallel)
    if parallel and not behind:
        # On the host's clock the step of a real block, its waits taken out, is the contended one.
        rounds, part = [_with_contended(one) for one in rounds], _with_contended(part)
    starts = (epoch_starts, batches)
    found: list[_Found] = []
    if len(rounds) >= 2:
        blocks = {
            arm: np.array([(one[arm].seconds, one[arm].steps) for one in rounds])
            for arm in rounds[0]
        }
        found.append(_by_difference("blocks", blocks, starts, len(rounds)))
    laps = {
        arm.name: [lap for one in [*rounds, part] for lap in _laps(one, arm.name)] for arm in ARMS
    }
    # Where steps are slow there are few, and each one says how long a step takes.
    for arm, also in (("synthetic", "synthetic"), ("contended", "real")):
        if laps[arm] and not behind and _mean(laps["synthetic"]) > _SLOW_FROM_S:
            settled = [s for one in [*rounds, part] if also in one for s in one[also].settled]
            laps[arm] += [Lap(seconds, 1) for seconds in settled]
    alone = not parallel and _mean(laps["synthetic"]) >= _ALONE_FROM_S
    whole_turn = sum(lap.steps for lap in laps["real"]) >= turn
    if whole_turn and min(len(laps["synthetic"]), len(laps["real"])) >= _FEWEST_LAPS:
        if behind:
            units = {arm: _units(those) for arm, those in laps.items() if those}
            # Neighbouring laps share the state of the queue: they count for half.
            count = max(2, min(len(those) for those in units.values()) // 2)
            found.append(_by_difference("steps", units, starts, count))
            if not ranks and (alone or laps["contended"] or not parallel):
                found.append(_bounded_by_waits(laps, starts, found[0]))
        else:
            by_waits = _by_waits(laps, starts, alone=alone, rounds=rounds, turn=turn)
            # Without anything beside the step the wait is the gap: the better way comes first.
            found.insert(0 if alone else len(found), by_waits)
    if not found:
        return None
    if len(found) > 1 and len(rounds) < _FEWEST_ROUNDS:
        # Two or three blocks agree by chance too often; their steps are the better witnesses.
        found = [one for one in found if one.evidence != "blocks"]
    if behind:
        found = [_with_waits_elsewhere(one, laps["synthetic"]) for one in found]
    found = [_undisturbed(one, whole, behind, parallel) for one in found]
    named = [(name(one.bound, *_causes(one)), one) for one in found]
    named = [
        (verdict if _says_something(one.bound) else "inconclusive", one) for verdict, one in named
    ]
    verdict, best = next((pair for pair in named if pair[0] != "inconclusive"), named[0])
    if verdict == "inconclusive":
        best = min(found, key=lambda one: one.bound.high - one.bound.low)
    arms = ([one[arm] for one in whole if arm in one] for arm in ("synthetic", "real"))
    return replace(_analysis(verdict, best, left_out), held=max(map(_held, arms)))


def _with_waits_elsewhere(found: _Found, resident: Sequence[Lap]) -> _Found:
    """Widen the bound by what waits for other loaders may hide: they are in every arm.

    On a device's clock such a wait is part of the step alone as well, and how much of it the
    device hides is not known: without it the step may be as much shorter.
    """
    elsewhere = sum(lap.elsewhere for lap in resident) / max(1, sum(lap.steps for lap in resident))
    step = found.means["synthetic"]
    longer = step / max(step - elsewhere, 0.01 * step) if elsewhere else 1.0
    return replace(found, bound=replace(found.bound, high=found.bound.high * longer))


def _undisturbed(found: _Found, rounds: Sequence[Round], behind: bool, parallel: bool) -> _Found:
    """Widen the bound to what it may be where no other process runs.

    The step may be shorter by what held it up. Workers do not get quicker then: those that were
    at work for a share of the time make a batch in that share of what one took. On a device's
    clock, what holds up the host is hidden in resident blocks more than in real ones.
    """
    own, real = ([one[arm] for one in rounds if arm in one] for arm in ("synthetic", "real"))
    held, held_real = _held(own), _held(real)
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
    if behind:
        low = bound.low * (1 - (held if parallel else held_real))
    return replace(found, bound=Interval(low, bound.estimate, high))


def _held(blocks: Sequence[Timed]) -> float:
    """Return the share of blocks' time for which other processes may have held up the step."""
    seconds = sum(one.seconds for one in blocks)
    share = sum(one.held for one in blocks) / seconds if seconds > 0 else 0.0
    return min(0.9, share) if share > _HELD_FROM else 0.0


def _says_something(bound: Interval) -> bool:
    """Whether an interval is worth printing: not one such as 0.04 to 8555, nor far below 1."""
    return bound.low > 0 and bound.high / bound.low <= _WIDEST and bound.high >= _LEAST


def name(
    bound: Interval, stall_draws: Mapping[str, Array], stall_means: Mapping[str, float]
) -> Verdict:
    """Return the verdict that ``bound`` carries; a gap is named by its largest stall."""
    if bound.low < BOUND_FROM:
        return "step-bound" if bound.high <= STEP_BOUND_UP_TO else "inconclusive"
    cause = max(stall_means, key=lambda stall: stall_means[stall])
    others = [draws for stall, draws in stall_draws.items() if stall != cause]
    support = float(np.mean(stall_draws[cause] >= np.maximum.reduce(others)))
    if support >= _CAUSE_SUPPORT:
        return next(stall.verdict for stall in STALLS if stall.name == cause)
    # Which of two causes is larger may be open while the gap is not. Preparation and contention
    # are both the loader's work on the CPU: their common name is input-bound.
    if stall_means["transfer"] < min(stall_means["prep"], stall_means["contention"]):
        return "input-bound"
    return "inconclusive"


def _analysis(verdict: Verdict, best: _Found, left_out: int) -> Analysis:
    bound, count = best.bound, best.count
    if not _says_something(bound):
        return Analysis(verdict, best.evidence, left_out=left_out)
    stall_draws, stall_means = _causes(best)
    enough = max(_ENOUGH_HALF_WIDTH, _ENOUGH_SHARE_OF_GAP * abs(bound.estimate - 1))
    return Analysis(
        verdict,
        best.evidence,
        bound,
        seconds_per_batch={
            arm.name: interval_of(mean, best.draws[arm.name], count, _RESOLUTION * mean)
            for arm in ARMS
            if (mean := best.means.get(arm.name)) is not None
        },
        stalls={
            stall: interval_of(stall_means[stall], draws, count)
            for stall, draws in stall_draws.items()
        },
        smallest_gap=bound.half_width / bound.estimate,
        settled=verdict != "inconclusive" and bound.half_width <= enough,
        left_out=left_out,
    )


def _by_difference(
    evidence: Evidence, units: Mapping[str, Array], starts: tuple[Sequence[float], int], count: int
) -> _Found:
    """Compare real and synthetic: rounds resampled as wholes, or each arm's laps on their own."""
    means: dict[str, float] = {}
    draws: dict[str, Array] = {}
    for seed, (arm, those) in enumerate(units.items()):
        means[arm], draws[arm] = _ratio(those, 0, 0 if evidence == "blocks" else seed)
    added = _added(starts, np.maximum(0.0, draws["real"] - draws["synthetic"]))
    draws["real"] = draws["real"] + added
    means["real"] += float(np.mean(added))
    return _found(evidence, draws, means, count)


def _ratio(units: Array, column: int, seed: int) -> tuple[float, Array]:
    """Return the sum of a column (0: seconds, 2: waited) over the sum of steps, and draws of it."""
    above, steps = units[:, column], units[:, 1]
    return float(above.sum() / steps.sum()), ratio_draws(above, steps, seed)


def _slower(beside: Array, each: Array) -> tuple[float, Array]:
    """Return how much slower steps are beside the loader's work, and draws of that.

    Trimmed: what the machine did to a few steps of one arm is not the loader's doing.
    """
    beside, each = beside[:, 0] / beside[:, 1], each[:, 0] / each[:, 1]
    draws = _trimmed(picked(beside, 2)) - _trimmed(picked(each, 3))
    return float(_trimmed(beside) - _trimmed(each)), draws


def _by_waits(
    laps: Mapping[str, list[Lap]],
    starts: tuple[Sequence[float], int],
    *,
    alone: bool,
    rounds: Sequence[Round],
    turn: int,
) -> _Found:
    """Add wait and contention to the step, on the host's clock."""
    # Workers deliver in turns: where waits repeat themselves so, whole turns differ less.
    units = (_units(laps["real"], each) for each in (1, turn))
    real, resident = (
        min(units, key=lambda one: _ratio(one, 2, 0)[1].std()),
        _units(laps["synthetic"]),
    )
    wait, waited = _ratio(real, 2, 0)
    own = real.copy()  # the steps of real blocks, without their waits
    own[:, 0] -= own[:, 2]
    if laps["contended"]:
        own = _units(laps["contended"])
    if alone:
        resident = np.concatenate([resident, own])
    step, step_draws = _ratio(resident, 0, 1)
    slower, slower_draws, clustered = 0.0, np.zeros_like(step_draws), len(real)
    if not alone:
        slower, slower_draws = _slower(own, resident)
        pairs = [
            _trimmed(_per_step(_with_contended(one)["contended"]), _TRIMMED_OF_A_BLOCK)
            - _trimmed(_per_step(one["synthetic"]), _TRIMMED_OF_A_BLOCK)
            for one in rounds
            if one["real"].laps and one["synthetic"].laps
        ]
        if len(pairs) >= _FEWEST_ROUNDS:
            # What another process does lasts for a block: its steps are no witnesses of their own.
            by_round = picked(np.array(pairs), 4).mean(axis=1)
            if by_round.std() > slower_draws.std():
                slower, slower_draws, clustered = float(np.mean(pairs)), by_round, len(pairs)
    added = _added(starts, waited)
    wait += float(np.mean(added))
    draws = {"synthetic": step_draws, "real": step_draws + slower_draws + waited + added}
    means = {"synthetic": step, "real": step + slower + wait}
    if not alone:
        draws["contended"], means["contended"] = step_draws + slower_draws, step + slower
    for seed, arm in enumerate(laps):
        if laps[arm] and arm not in means:
            means[arm], draws[arm] = _ratio(_units(laps[arm]), 0, seed)
    count = min(len(own), len(resident), 2 * len(real), 2 * clustered)
    found = _found("waits", draws, means, count)
    if alone:
        return found
    # No step is faster beside workers than alone: what it waits is lost at the least.
    sure = 1 + ratio_draws(real[:, 2], real[:, 0] - real[:, 2], 0)
    mean = 1 + float(real[:, 2].sum() / (real[:, 0] - real[:, 2]).sum())
    least = interval_of(mean, sure, len(real), _RESOLUTION * mean)
    bound = found.bound
    if bound.low < least.low:
        # That leaves one end to chance: all of the 5 % are for the other one.
        bound = interval_of(
            bound.estimate, draws["real"] / step_draws, count, _RESOLUTION, tails=(5, 95)
        )
        estimate = max(bound.estimate, least.estimate)
        bound = Interval(least.low, estimate, max(bound.high, estimate, least.high))
    return replace(found, bound=bound)


def _bounded_by_waits(
    laps: Mapping[str, list[Lap]], starts: tuple[Sequence[float], int], known: _Found
) -> _Found:
    """Bound the gap on a device's clock: no more than the host waited, and what workers cost."""
    real, resident = _units(laps["real"]), _units(laps["synthetic"])
    (step, step_draws), (wait, waited) = _ratio(resident, 0, 1), _ratio(real, 2, 0)
    most = 1 + (waited + _added(starts, np.zeros_like(step_draws))) / step
    estimate = 1 + wait / step
    count = min(len(real), len(resident))
    if laps["contended"]:
        slower, draws = _slower(_units(laps["contended"]), resident)
        most, estimate = most + draws / step, estimate + slower / step
        count = min(count, len(laps["contended"]))
    high = interval_of(estimate, most, count, floor=_RESOLUTION * estimate).high
    low = max(1 - _RESOLUTION, min(known.bound.low, high))
    bound = Interval(min(low, high), min(max(known.bound.estimate, low), high), high)
    all_draws = {**known.draws, "real": np.minimum(known.draws["real"], high * step_draws)}
    means = {**known.means, "real": min(known.means["real"], high * known.means["synthetic"])}
    return _Found("waits", bound, all_draws, means, count)


def _found(
    evidence: Evidence, draws: Mapping[str, Array], means: Mapping[str, float], count: int
) -> _Found:
    ratio = means["real"] / means["synthetic"]
    bound = interval_of(ratio, draws["real"] / draws["synthetic"], count, _RESOLUTION * ratio)
    return _Found(evidence, bound, draws, means, count)


def _causes(found: _Found) -> tuple[dict[str, Array], dict[str, float]]:
    """Return seconds a batch by cause: an arm's difference to synthetic; prep is what is left."""
    means = {stall: float(value) for stall, value in _stalls(found.means).items()}
    return _stalls(found.draws), means


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


def _cleaned(
    rounds: Sequence[Round], part: Round, behind: bool, parallel: bool
) -> tuple[list[Round], Round, int]:
    """Take out of blocks other loaders' waits, first sights of a shape, and batches' sizes."""
    everything = [*rounds, part]
    fresh = _fresh_cost(everything, behind)
    slope, usual = _cost_of_bytes(everything, behind)
    usual_step = _mean([lap for one in everything for lap in _laps(one, "synthetic")])
    left_out = 0
    cleaned: list[Round] = []
    for one in everything:
        arms: dict[str, Timed] = {}
        for arm, took in one.items():
            laps: list[Lap] = []
            for lap in took.laps:
                if fresh and lap.fresh and arm == "real":
                    left_out += lap.steps
                    if parallel or behind:
                        continue
                    # Its wait counts, and its step as a usual one.
                    lap = lap._replace(seconds=lap.waited + usual_step * lap.steps)
                seconds = lap.seconds - slope * (lap.nbytes - usual * lap.steps)
                waited = lap.waited if arm == "real" else 0.0
                if not behind and lap.elsewhere:
                    if arm == "real":
                        waited += lap.elsewhere
                    else:
                        seconds -= lap.elsewhere
                laps.append(lap._replace(seconds=seconds, waited=waited))
            if took.laps and not laps:
                continue
            arms[arm] = replace(_of_laps(laps), settled=took.settled) if laps else took
        cleaned.append(arms)
    kept = [one for one in cleaned[:-1] if all(arm in one for arm in rounds[0])]
    rest = {arm: took for one in cleaned if one not in kept for arm, took in one.items()}
    return kept, rest, left_out


def _laps(one: Round, arm: str) -> tuple[Lap, ...]:
    return one[arm].laps if arm in one else ()


def _of_laps(laps: Sequence[Lap]) -> Timed:
    return Timed(sum(lap.seconds for lap in laps), sum(lap.steps for lap in laps), tuple(laps))


def _with_contended(one: Round) -> Round:
    if "real" not in one or not one["real"].laps:
        return one
    laps = [lap._replace(seconds=lap.seconds - lap.waited) for lap in one["real"].laps]
    return {**one, "contended": _of_laps(laps)}


def _fresh_cost(rounds: Sequence[Round], behind: bool) -> bool:
    """Whether a step costs clearly more on a shape that it sees for the first time."""
    real = [lap for one in rounds for lap in _laps(one, "real")]
    resident = [lap for one in rounds for lap in _laps(one, "synthetic")]
    fresh = [lap for lap in real if lap.fresh]
    seen = [lap for lap in real if not lap.fresh] + resident
    if not fresh or not seen:
        return False

    def step(laps: Sequence[Lap]) -> float:
        waited = 0.0 if behind else sum(lap.waited for lap in laps)
        return (sum(lap.seconds for lap in laps) - waited) / sum(lap.steps for lap in laps)

    return step(fresh) > _FRESH_COSTS * step(seen)


def _cost_of_bytes(rounds: Sequence[Round], behind: bool) -> tuple[float, float]:
    """Return seconds a byte (least squares over resident laps), and the bytes of a usual batch.

    Where batches vary in size, arms see different ones: each lap is moved to the usual size.
    """
    laps = [lap for one in rounds for lap in _laps(one, "synthetic")]
    usual = [lap for one in rounds for lap in _laps(one, "real")] or laps
    sizes = np.array([lap.nbytes / lap.steps for lap in laps])
    if len(laps) < 8 or sizes.std() == 0 or not all(lap.nbytes for lap in usual):
        return 0.0, 0.0
    seconds = np.array([lap.seconds / lap.steps for lap in laps])
    slope = float(np.cov(sizes, seconds, bias=True)[0, 1] / sizes.var())
    mean = sum(lap.nbytes for lap in usual) / sum(lap.steps for lap in usual)
    return max(0.0, slope), mean


def _added(starts: tuple[Sequence[float], int], wait: Array) -> Array:
    """Return the seconds a batch that starting epochs adds, beyond what each batch waits anyway."""
    if not starts[0]:
        return np.zeros_like(wait)
    seconds = np.array(starts[0])
    picks = np.random.default_rng(1).integers(0, len(seconds), (len(wait), len(seconds)))
    return np.asarray(np.maximum(0.0, seconds[picks].mean(axis=1) - wait) / starts[1])


def _units(laps: Sequence[Lap], turn: int = 1) -> Array:
    """(seconds, steps, waited) of ``turn`` neighbouring laps each; of more of very many."""
    values = np.array([(lap.seconds, lap.steps, lap.waited) for lap in laps], dtype=np.float64)
    turns = int(values[:, 1].sum()) // turn
    count = min(_MOST_UNITS, len(values), turns if turns > 1 else len(values))
    edges = np.linspace(0, len(values), count, endpoint=False).astype(int)
    return np.asarray(np.add.reduceat(values, edges))


def _per_step(block: Timed) -> Array:
    return np.array([lap.seconds / lap.steps for lap in block.laps] + list(block.settled))


def _trimmed(values: Array, share: float = _TRIMMED) -> Array:
    """Return the mean along the last axis without ``share`` of it at either end."""
    cut = int(values.shape[-1] * share)
    ordered = np.sort(values, axis=-1)
    return np.asarray(ordered[..., cut : values.shape[-1] - cut].mean(axis=-1))


def _mean(laps: Sequence[Lap]) -> float:
    steps = sum(lap.steps for lap in laps)
    return sum(lap.seconds for lap in laps) / steps if steps else 0.0
