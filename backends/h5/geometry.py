"""Express a chain of crops and flips as windows: the stored bytes move once.

    RandomCrop(224), RandomHorizontalFlip()  ──>  rows, columns, mirrored or not

What torchvision draws for each image of a batch is drawn at once (`dataloaders.transforms.draws`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import (
    Action,
    Crop,
    HorizontalFlip,
    Operator,
    Primitive,
    SampleError,
    Sizes,
    VerticalFlip,
)
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.operators import operator_of
from dataloaders.transforms.read import Member

__all__ = ["Geometry", "Windows", "geometry_of"]

Integers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_MOVES = (Crop, HorizontalFlip, VerticalFlip)


@dataclass(frozen=True)
class Windows:
    """The part that is taken of each of n images, in pixels of the stored image; arrays [n].

    Attributes:
        top, left, height, width: the part.
        upside_down, mirrored: whether it is flipped along its height, along its width.
    """

    top: Integers
    left: Integers
    height: Integers
    width: Integers
    upside_down: Flags
    mirrored: Flags

    @classmethod
    def whole(cls, heights: Integers, widths: Integers) -> Windows:
        """Return windows of whole images."""
        none, no = np.zeros(len(heights), np.int64), np.zeros(len(heights), np.bool_)
        return cls(none, none, heights, widths, no, no)

    def cropped(self, top: Integers, left: Integers, height: Integers, width: Integers) -> Windows:
        """Return a part of these windows; ``top`` and ``left`` count after the flips."""
        below = self.height - height - top
        beside = self.width - width - left
        return Windows(
            self.top + np.where(self.upside_down, below, top),
            self.left + np.where(self.mirrored, beside, left),
            height,
            width,
            self.upside_down,
            self.mirrored,
        )

    def are_whole(self, heights: Integers, widths: Integers) -> bool:
        """Whether all of them cover whole images of these sizes."""
        return np.array_equal(self.height, heights) and np.array_equal(self.width, widths)

    def flipped(self, primitive: Primitive, where: Where) -> Windows:
        """Return these windows, with those selected by ``where`` flipped."""
        flip = np.True_ if where is None else where
        upside_down, mirrored = self.upside_down, self.mirrored
        if isinstance(primitive, VerticalFlip):
            upside_down = upside_down ^ flip
        else:
            mirrored = mirrored ^ flip
        return Windows(self.top, self.left, self.height, self.width, upside_down, mirrored)


class Geometry:
    """A sequence of crops and flips; see `geometry_of`."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._operators = tuple(operators)

    @property
    def random(self) -> bool:
        """Whether two batches of the same images may differ."""
        return any(operator.random for operator in self._operators)

    def draw(
        self, heights: Integers, widths: Integers, draws: Draws
    ) -> tuple[Windows, bool] | None:
        """Draw windows of images of these sizes, and return whether one extends beyond its image.

        There it has zeros: after a crop with a border. None: one of the images needs something
        else, such as a crop of more than the image, where torchvision raises.
        """
        sizes = Sizes(heights, widths)
        seen = Windows.whole(heights, widths)
        outside = False
        for operator in self._operators:
            try:
                actions = operator.draw(draws, sizes)
            except SampleError:
                return None
            for action in actions:
                if not isinstance(action.primitive, Crop):
                    seen = seen.flipped(action.primitive, action.where)
                    continue
                cropped, inside = _cropped(seen, action)
                if not inside:
                    # There are zeros around the image, but around a part of it are its pixels.
                    if outside or not seen.are_whole(heights, widths):
                        return None
                    outside = True
                seen = cropped
        return seen, outside


def geometry_of(members: Sequence[Member]) -> Geometry | str:
    """Return ``members`` as a `Geometry`, or say which one is not part of any and why."""
    operators: list[Operator] = []
    is_cropped = False
    for member in members:
        operator = operator_of(member)
        if isinstance(operator, str):
            return f"{member} is not supported for a whole batch: {operator}"
        if not all(isinstance(each, _MOVES) for each in operator.primitives):
            return f"{member} does more than crop and flip"
        is_crop = any(isinstance(each, Crop) for each in operator.primitives)
        pads = [getattr(member.transform, name, None) for name in ("padding", "pad_if_needed")]
        if is_crop and is_cropped and any(pads):
            return f"{member} puts a border around a part of an image"
        is_cropped |= is_crop
        operators.append(operator)
    return Geometry(operators)


def _cropped(seen: Windows, action: Action) -> tuple[Windows, bool]:
    """Return the part of ``seen`` that a crop takes, and whether it is entirely inside."""
    numbers: Any = action.numbers
    top, left, height, width = (numbers[name] for name in Crop.numbers)
    if action.where is not None:
        top, left = np.where(action.where, top, 0), np.where(action.where, left, 0)
        height = np.where(action.where, height, seen.height)
        width = np.where(action.where, width, seen.width)
    inside = bool(
        ((top >= 0) & (left >= 0)).all()
        and (top + height <= seen.height).all()
        and (left + width <= seen.width).all()
    )
    return seen.cropped(top, left, height, width), inside
