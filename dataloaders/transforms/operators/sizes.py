"""Operators that resize: Resize, and v2's RandomResize, RandomShortestSize and ScaleJitter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Action, Operator, Sizes, refused
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.geometry import Resize

from .options import affine32, range_of, times32, whole
from .table import NotRead, mode_of, reads

_Ints = npt.NDArray[np.int64]


class _Resize(Operator):
    """Resize to a pair of sides, to a shorter side, or to a longer one."""

    def __init__(self, transform: Any, v2: bool) -> None:
        size, longest = transform.size, transform.max_size
        sides = [size] if isinstance(size, int) else [] if size is None else list(size)
        self._sides = tuple(whole(side, "size") for side in sides)
        self._longest = None if longest is None else whole(longest, "max_size")
        if len(self._sides) == 2 and longest is not None:
            raise NotRead(
                f"size={list(self._sides)} with max_size={longest}: torchvision takes max_size "
                "with one side only; leave it out"
            )
        if len(self._sides) == 1 and longest is not None and longest <= self._sides[0]:
            raise NotRead(
                f"size={self._sides[0]} with max_size={longest}: torchvision wants max_size above "
                "size; raise it"
            )
        mode = mode_of(transform.interpolation, v2)
        self.primitives = (Resize(mode, transform.antialias, v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        before = sizes.copy()
        if len(self._sides) == 2:
            height, width = (np.full(len(sizes), side) for side in self._sides)
        elif self._sides:
            height, width = _by_shorter(sizes, np.array(self._sides[0]), self._longest)
        else:
            assert self._longest is not None
            height, width = _by_longer(sizes, self._longest)
        action = resized(self.primitives[0], sizes, height, width, where)
        with_pixels([action], (height < 1) | (width < 1), before, where)
        return [action]


class _RandomSize(Operator):
    """v2's RandomResize, RandomShortestSize and ScaleJitter: `sized` says how."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self.primitives = (Resize(mode_of(transform.interpolation), transform.antialias, v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        before = sizes.copy()
        height, width = self.sized(draws, sizes, where)
        action = resized(self.primitives[0], sizes, height, width, where)
        with_pixels([action], (height < 1) | (width < 1), before, where)
        return [action]

    @abstractmethod
    def sized(self, draws: Draws, sizes: Sizes, where: Where) -> tuple[_Ints, _Ints]:
        """The new height and width."""


class _RandomResize(_RandomSize):
    def __init__(self, transform: Any, v2: bool) -> None:
        super().__init__(transform, v2)
        self._least = whole(transform.min_size, "min_size")
        self._most = whole(transform.max_size, "max_size")
        if self._least >= self._most:
            raise NotRead(
                f"min_size={self._least}, max_size={self._most}: torchvision draws from min_size "
                "to max_size - 1; raise max_size"
            )

    def sized(self, draws: Draws, sizes: Sizes, where: Where) -> tuple[_Ints, _Ints]:
        return _by_shorter(sizes, draws.randint(self._least, self._most, where), None)


class _RandomShortestSize(_RandomSize):
    def __init__(self, transform: Any, v2: bool) -> None:
        super().__init__(transform, v2)
        self._shortest = np.array([whole(side, "min_size") for side in transform.min_size])
        longest = transform.max_size
        self._longest = None if longest is None else whole(longest, "max_size")
        if not len(self._shortest):
            raise NotRead("min_size=[] has nothing to draw from; give a size")

    def sized(self, draws: Draws, sizes: Sizes, where: Where) -> tuple[_Ints, _Ints]:
        shortest = self._shortest[draws.randint(0, len(self._shortest), where)]
        height, width = sizes.height, sizes.width
        scale = shortest / np.minimum(height, width)
        if self._longest is not None:
            scale = np.minimum(scale, self._longest / np.maximum(height, width))
        return (height * scale).astype(np.int64), (width * scale).astype(np.int64)


class _ScaleJitter(_RandomSize):
    def __init__(self, transform: Any, v2: bool) -> None:
        super().__init__(transform, v2)
        self._target = tuple(map(float, transform.target_size))
        self._low, high = range_of(transform.scale_range, "scale_range", 0.0)
        self._width = high - self._low

    def sized(self, draws: Draws, sizes: Sizes, where: Where) -> tuple[_Ints, _Ints]:
        height, width = sizes.height, sizes.width
        # The numbers of a tensor and of Python meet in float32.
        scale = affine32(draws.rand(where), self._width, self._low)
        fit = np.minimum(self._target[1] / height, self._target[0] / width).astype(np.float32)
        scale = scale * fit
        return times32(height, scale), times32(width, scale)


def _by_shorter(sizes: Sizes, wanted: _Ints, longest: int | None) -> tuple[_Ints, _Ints]:
    """Height and width of which the shorter is ``wanted``, the longer at most ``longest``."""
    height, width = sizes.height, sizes.width
    short, long = np.minimum(height, width), np.maximum(height, width)
    new_short = np.array(np.broadcast_to(wanted, len(short)), np.int64)
    new_long = (new_short * long / short).astype(np.int64)
    if longest is not None:
        beyond = new_long > longest
        new_short = np.where(
            beyond, (longest * new_short / np.maximum(new_long, 1)).astype(np.int64), new_short
        )
        new_long = np.where(beyond, longest, new_long)
    upright = width <= height
    return np.where(upright, new_long, new_short), np.where(upright, new_short, new_long)


def _by_longer(sizes: Sizes, longest: int) -> tuple[_Ints, _Ints]:
    """Height and width of which the longer is ``longest``."""
    height, width = sizes.height, sizes.width
    short, long = np.minimum(height, width), np.maximum(height, width)
    new_short = (longest * short / long).astype(np.int64)
    upright = width <= height
    return np.where(upright, longest, new_short), np.where(upright, new_short, longest)


def resized(primitive: Any, sizes: Sizes, height: Any, width: Any, where: Where) -> Action:
    """The images made ``height`` x ``width``, numbers or [n], which ``sizes`` takes on."""
    numbers = {
        "height": np.full(len(sizes), height, np.int64),
        "width": np.full(len(sizes), width, np.int64),
    }
    sizes.become(height, width, where)
    return Action(primitive, numbers, where)


def with_pixels(
    actions: Sequence[Action],
    empty: npt.NDArray[np.bool_],
    before: Sizes,
    where: Where,
) -> None:
    """Let torchvision refuse the samples that come out without a pixel."""
    for sample in np.flatnonzero(empty if where is None else empty & where).tolist():
        refused(actions, sample, before)


@reads("Resize")
def _resize(transform: Any, v2: bool) -> Operator:
    return _Resize(transform, v2)


@reads("RandomResize")
def _random_resize(transform: Any, v2: bool) -> Operator:
    return _RandomResize(transform, v2)


@reads("RandomShortestSize")
def _random_shortest_size(transform: Any, v2: bool) -> Operator:
    return _RandomShortestSize(transform, v2)


@reads("ScaleJitter")
def _scale_jitter(transform: Any, v2: bool) -> Operator:
    return _ScaleJitter(transform, v2)
