"""Compute 95 % intervals from a few blocks, by the block bootstrap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_DRAWS = 1000

# Two-sided 95 % points of Student's t for 1 to 30 degrees of freedom; 1.96 beyond.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z95 = 1.960


@dataclass(frozen=True)
class Interval:
    """Holds a figure with its 95 % interval; low <= estimate <= high, in the figure's own unit."""

    low: float
    estimate: float
    high: float

    @property
    def half_width(self) -> float:
        """Return half of ``high - low``."""
        return (self.high - self.low) / 2

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        return f"{self.estimate:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


class Segment(NamedTuple):
    """Holds one or more steps of a block, between two marks of its clock."""

    seconds: float  # on the clock
    steps: int  # whole accumulation cycles
    waited: float = 0.0  # the host's seconds in next() of the loader
    elsewhere: float = 0.0  # the same, of other loaders
    nbytes: int = 0  # of all its batches; 0 where batches do not vary
    new_shape: bool = False  # whether a batch in it had a shape that the step had not seen before
    starts_epoch: bool = False  # whether an epoch of the loader begins in it


class Step(NamedTuple):
    """Holds one measured step as the host's clock saw it, in seconds."""

    begin: float  # when the loop asked for the batch, counted from the first step that is kept
    wait: float  # in ``next()`` of the loader
    step: float  # until the next batch was asked for; a device may still be at work then
    transfer: float = 0.0  # of ``step``, at its begin: what the copy of a batch costs on average

    @property
    def end(self) -> float:
        """Return when the next batch was asked for."""
        return self.begin + self.wait + self.step

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of its parts, in order."""
        own = self.step - self.transfer
        return {"wait": self.wait, "transfer": self.transfer, "step": own}


@dataclass(frozen=True)
class BlockTimes:
    """Holds what a block took: ``steps`` steps in ``seconds`` seconds."""

    seconds: float
    steps: int
    segments: tuple[Segment, ...] = ()  # where the block was marked
    warm_up: tuple[float, ...] = ()  # seconds of steps before the first mark, without their waits
    held: float = 0.0  # seconds for which other processes kept the step from running, at most
    busy: float = 1.0  # the share of the loader's workers that were at work

    @property
    def per_batch(self) -> float:
        """Return the seconds for one step."""
        return self.seconds / self.steps


def block_of(segments: Sequence[Segment], **facts: Any) -> BlockTimes:
    """Return the block of ``segments``; ``facts`` are its other fields."""
    seconds, steps = sum(one.seconds for one in segments), sum(one.steps for one in segments)
    return BlockTimes(seconds, steps, tuple(segments), **facts)


def interval_of(
    estimate: float,
    draws: npt.NDArray[np.float64],
    count: int,
    floor: float = 0.0,
    tails: tuple[float, float] = (2.5, 97.5),
) -> Interval:
    """Return the 95 % interval of ``estimate`` from bootstrap draws over ``count`` observations.

    A percentile interval from n observations is too narrow when n is small; it is widened by
    sqrt(n / (n - 1)) and by Student's t over the normal's 1.96 (Hesterberg 2015, "What Teachers
    Should Know About the Bootstrap", narrowness bias). ``floor`` is the least half width, which the
    clock and the measuring cannot resolve. ``tails`` are the percentiles of the two ends.
    """
    if count < 2:
        return Interval(-math.inf, estimate, math.inf)
    low, high = np.percentile(draws, tails)
    degrees = count - 1
    t95 = _T95[degrees - 1] if degrees <= len(_T95) else _Z95
    widen = math.sqrt(count / degrees) * t95 / _Z95
    if estimate > 0 and draws.min() > 0:
        # A ratio or a time: widened on the logarithmic scale, it stays positive.
        below = estimate * -math.expm1(math.log(low / estimate) * widen)
        above = estimate * math.expm1(math.log(high / estimate) * widen)
    else:
        below, above = (estimate - low) * widen, (high - estimate) * widen
    return Interval(
        float(estimate - max(below, floor)), float(estimate), float(estimate + max(above, floor))
    )


def mean_of(values: npt.ArrayLike) -> Interval:
    """Return the mean of ``values`` with its 95 % interval."""
    those = np.array(values, dtype=np.float64)
    return interval_of(float(those.mean()), picked(those, 0).mean(axis=1), len(those))


def picked(values: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.float64]:
    """Return bootstrap draws of ``values``: an array of shape (draws, len(values), ...)."""
    picks = np.random.default_rng(seed).integers(0, len(values), (_DRAWS, len(values)))
    return np.asarray(values[picks])


def ratio_draws(
    above: npt.NDArray[np.float64], below: npt.NDArray[np.float64], seed: int = 0
) -> npt.NDArray[np.float64]:
    """Return bootstrap draws of the sum of ``above`` over that of ``below``.

    The same seed picks the same observations, so that drift common to all arms cancels.
    """
    return np.asarray(picked(above, seed).sum(axis=1) / picked(below, seed).sum(axis=1))
