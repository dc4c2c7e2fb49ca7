"""Correct blocks for known effects before arms are compared.

a wait for another loader         counts as input in real blocks, and not at all in the others
a shape that is new to the step   its segment is left out, if steps take longer on new shapes
batches that vary in size         times are corrected to the size of a usual batch
the start of an epoch             its segment is left out; its time is divided among the batches
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dataloaders.measuring.intervals import BlockTimes, Segment, block_of

Round: TypeAlias = Mapping[str, BlockTimes]

_NEW_SHAPES_COST = 1.1
_SHORT_EPOCH = 100  # batches


@dataclass(frozen=True)
class Loop:
    """Says how the measured loop gets its batches.

    Attributes:
        asynchronous: whether the clock is a device's, which runs behind the host.
        parallel: whether workers or a thread make batches while the step runs.
        turn: the number of workers, which deliver one batch each in turn.
        ranks: whether steps wait for other ranks, so that the waits of this one say little.
        epoch_starts: seconds that the loop waited from the end of an epoch to the first batch of
            the next one.
        length: batches of an epoch.
        unmeasured: real steps that no block measured.
        lost_s: seconds that training would have waited for slow batches, at least, where no block
            measured it.
    """

    asynchronous: bool = False
    parallel: bool = True
    turn: int = 1
    ranks: bool = False
    epoch_starts: Sequence[float] = ()
    length: int = 1
    unmeasured: int = 0
    lost_s: float = 0.0


@dataclass(frozen=True)
class Corrected:
    """Holds corrected blocks.

    Attributes:
        rounds: complete rounds, with the same arms in each.
        part: the blocks of incomplete rounds.
        left_out: how many real steps were left out because their shape was new to the step.
        starts: seconds of the first real step of each epoch, if these steps are left out.
        whole_epochs: whether segments already contain the starts of epochs: they are whole epochs,
            or starting one takes no time of its own.
    """

    rounds: list[Round]
    part: Round
    left_out: int
    starts: list[float]
    whole_epochs: bool


def corrected(rounds: Sequence[Round], part: Round, loop: Loop) -> Corrected:
    """Return the ``rounds`` of ``loop``, and the running round ``part``, corrected."""
    asynchronous, parallel, length = loop.asynchronous, loop.parallel, loop.length
    # Without workers the first batch of a short epoch is like any other.
    starts_apart = parallel or length > _SHORT_EPOCH
    everything = [*rounds, part]
    pays_for_shapes = _pays_for_new_shapes(everything, asynchronous)
    slope, usual_size = _cost_of_bytes(everything)
    step_s = per_step(segments_of(everything, "synthetic"))
    real_s = per_step([one for one in segments_of(everything, "real") if not one.starts_epoch])
    left_out, starts, whole_epochs = 0, list[float](), not starts_apart
    corrected: list[Round] = []
    for one in everything:
        arms: dict[str, BlockTimes] = {}
        for arm, took in one.items():
            segments: list[Segment] = []
            for each in took.segments:
                real = arm == "real"
                if real and each.starts_epoch and starts_apart:
                    whole_epochs = whole_epochs or each.steps >= length
                    if each.steps < length:
                        starts.append(each.seconds - (each.steps - 1) * real_s)
                        continue
                if pays_for_shapes and each.new_shape and real:
                    left_out += each.steps
                    if parallel or asynchronous:
                        continue
                    # Its wait counts; its step counts as a usual one.
                    each = each._replace(seconds=each.waited + step_s * each.steps)
                seconds = each.seconds - slope * (each.nbytes - usual_size * each.steps)
                waited = each.waited if real else 0.0
                if not asynchronous:
                    waited += each.elsewhere * real
                    seconds -= each.elsewhere * (not real)
                elif arm == "contended":
                    # Dropping a ready batch waits if it is not the next one in order. That wait is
                    # not contention.
                    seconds = max(seconds - each.waited, min(seconds, step_s * each.steps))
                segments.append(each._replace(seconds=seconds, waited=waited))
            if segments:
                arms[arm] = block_of(segments, warm_up=took.warm_up)
            elif not took.segments:
                arms[arm] = took
        corrected.append(arms)
    if parallel and not asynchronous:
        corrected = [_with_contended(one) for one in corrected]
    arms_of = {arm for one in corrected[:-1] for arm in one}
    kept = [one for one in corrected[:-1] if one.keys() >= arms_of]
    rest = {arm: took for one in corrected if one not in kept for arm, took in one.items()}
    return Corrected(kept, rest, left_out, starts, whole_epochs)


def segments_of(rounds: Iterable[Round], arm: str) -> list[Segment]:
    """Return the segments of an arm's blocks."""
    return [segment for one in rounds if arm in one for segment in one[arm].segments]


def per_step(segments: Sequence[Segment]) -> float:
    """Return the mean seconds of a step; 0 if there is none."""
    steps = sum(one.steps for one in segments)
    return sum(one.seconds for one in segments) / steps if steps else 0.0


def _with_contended(one: Round) -> Round:
    """Return a round with "contended": the steps of its real block without their waits."""
    if "real" not in one or not one["real"].segments:
        return one
    own = [each._replace(seconds=each.seconds - each.waited) for each in one["real"].segments]
    return {**one, "contended": block_of(own, warm_up=one["real"].warm_up)}


def _pays_for_new_shapes(rounds: Sequence[Round], asynchronous: bool) -> bool:
    """Whether a step takes clearly longer on a shape that is new to it."""
    real = segments_of(rounds, "real")
    if not asynchronous:
        real = [one._replace(seconds=one.seconds - one.waited) for one in real]
    new = [one for one in real if one.new_shape]
    seen = [one for one in real if not one.new_shape] + segments_of(rounds, "synthetic")
    return bool(new and seen) and per_step(new) > _NEW_SHAPES_COST * per_step(seen)


def _cost_of_bytes(rounds: Sequence[Round]) -> tuple[float, float]:
    """Return seconds per byte, by least squares over resident steps, and a usual batch's bytes."""
    resident = segments_of(rounds, "synthetic")
    usual = segments_of(rounds, "real") or resident
    sizes = np.array([one.nbytes / one.steps for one in resident])
    if len(resident) < 8 or sizes.std() == 0 or not all(one.nbytes for one in usual):
        return 0.0, 0.0
    seconds = np.array([one.seconds / one.steps for one in resident])
    slope = float(np.cov(sizes, seconds, bias=True)[0, 1] / sizes.var())
    return max(0.0, slope), sum(one.nbytes for one in usual) / sum(one.steps for one in usual)
