"""Operators that mirror and frame: flips, Pad, RandomZoomOut."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataloaders.transforms.actions import Action, Operator, Sizes
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.geometry import HorizontalFlip, Pad, VerticalFlip

from .options import affine32, fill_of, padding_of, range_of, times32
from .sizes import with_pixels
from .table import reads


class _Flip(Operator):
    random = True

    def __init__(self, transform: Any, primitive: HorizontalFlip | VerticalFlip) -> None:
        self._probability = float(transform.p)
        self.primitives = (primitive,)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        return [Action(self.primitives[0], {}, draws.below(self._probability, where))]


class _Pad(Operator):
    """A border; `padding` is (left, top, right, bottom)."""

    def __init__(self, transform: Any, v2: bool) -> None:
        self._padding = padding_of(transform.padding)
        self.primitives = (Pad(fill_of(transform, v2), transform.padding_mode, v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        padding = dict(zip(Pad.numbers, self._padding, strict=True))
        return [_padded(self.primitives[0], sizes, padding, where)]


class _RandomZoomOut(Operator):
    """The image somewhere on a larger one of one colour."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._probability = float(transform.p)
        self._low, high = range_of(transform.side_range, "side_range", 1.0)
        self._width = high - self._low
        self.primitives = (Pad(fill_of(transform, v2), "constant", v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        where = draws.below(self._probability, where)
        scale = affine32(draws.rand(where), self._width, self._low)
        room_down = times32(sizes.height, scale) - sizes.height
        room_across = times32(sizes.width, scale) - sizes.width
        left = times32(room_across, draws.rand(where))
        top = times32(room_down, draws.rand(where))
        padding = {
            "left": left,
            "top": top,
            "right": room_across - left,
            "bottom": room_down - top,
        }
        return [_padded(self.primitives[0], sizes, padding, where)]


def _padded(primitive: Any, sizes: Sizes, padding: dict[str, Any], where: Where) -> Action:
    before = sizes.copy()
    numbers = {side: np.broadcast_to(pixels, len(sizes)) for side, pixels in padding.items()}
    action = Action(primitive, numbers, where)
    height = sizes.height + padding["top"] + padding["bottom"]
    width = sizes.width + padding["left"] + padding["right"]
    sizes.become(height, width, where)
    with_pixels([action], (height < 1) | (width < 1), before, where)
    return action


@reads("RandomHorizontalFlip")
def _horizontal(transform: Any, v2: bool) -> Operator:
    return _Flip(transform, HorizontalFlip(v2))


@reads("RandomVerticalFlip")
def _vertical(transform: Any, v2: bool) -> Operator:
    return _Flip(transform, VerticalFlip(v2))


@reads("Pad")
def _pad(transform: Any, v2: bool) -> Operator:
    return _Pad(transform, v2)


@reads("RandomZoomOut")
def _random_zoom_out(transform: Any, v2: bool) -> Operator:
    return _RandomZoomOut(transform, v2)
