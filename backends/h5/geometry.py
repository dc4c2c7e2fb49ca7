"""Express a chain of crops, flips and one resize as windows: the stored bytes move once.

    RandomCrop(224), RandomHorizontalFlip()         ──>  rows, columns, mirrored or not
    RandomResizedCrop(224), RandomHorizontalFlip()  ──>  a window, its new size, a window of that

What torchvision draws for each image of a batch is drawn at once (`dataloaders.transforms.draws`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Action, Operator, Primitive, SampleError, Sizes
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.operators import operator_of
from dataloaders.transforms.primitives.geometry import Crop, HorizontalFlip, Resize, VerticalFlip
from dataloaders.transforms.read import Member

__all__ = ["Geometry", "Moves", "Windows", "geometry_of"]

Integers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_MOVES = (Crop, HorizontalFlip, VerticalFlip, Resize)


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


@dataclass(frozen=True)
class Moves:
    """What is done to each image of a batch.

    Attributes:
        taken: the part of the stored image.
        resize: how that part is resized; None: it is not.
        placed: the part that is taken of the result of `resize`; without it, the same as ``taken``.
        sizes: height and width after `resize`; int64 [n] each.
        outside: whether a part extends beyond its image, where zeros are: after a crop with a
            border. Only without ``resize``.
    """

    taken: Windows
    resize: Resize | None
    placed: Windows
    sizes: tuple[Integers, Integers]
    outside: bool = False


class Geometry:
    """A sequence of crops, flips and at most one resize; see `geometry_of`."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._operators = tuple(operators)

    @property
    def random(self) -> bool:
        """Whether two batches of the same images may differ."""
        return any(operator.random for operator in self._operators)

    @property
    def resizes(self) -> bool:
        """Whether images are resized."""
        return any(
            isinstance(primitive, Resize)
            for operator in self._operators
            for primitive in operator.primitives
        )

    def draw(self, heights: Integers, widths: Integers, draws: Draws) -> Moves | None:
        """Draw the moves of images of these sizes; None if one of them needs something else.

        For instance a crop of more than the image, where torchvision raises.
        """
        sizes = Sizes(heights, widths)
        taken = seen = Windows.whole(heights, widths)
        resize: Resize | None = None
        after = (heights, widths)
        outside = False
        for operator in self._operators:
            try:
                actions = operator.draw(draws, sizes)
            except SampleError:
                return None
            for action in actions:
                if isinstance(action.primitive, Resize):
                    if resize is not None or outside or not _all(action.where):
                        return None
                    resize, taken = action.primitive, seen
                    after = (action.numbers["height"], action.numbers["width"])
                    seen = Windows.whole(*after)
                elif isinstance(action.primitive, Crop):
                    cropped, inside = _cropped(seen, action)
                    if not inside:
                        # There are zeros around the image, but around a part of it there are its
                        # pixels.
                        if outside or resize is not None or not seen.are_whole(heights, widths):
                            return None
                        outside = True
                    seen = cropped
                else:
                    seen = seen.flipped(action.primitive, action.where)
        return Moves(seen if resize is None else taken, resize, seen, after, outside)


def geometry_of(members: Sequence[Member]) -> Geometry | str:
    """Return ``members`` as a `Geometry`, or say which one is not part of any and why."""
    operators: list[Operator] = []
    resizes = 0
    for member in members:
        operator = operator_of(member)
        if isinstance(operator, str):
            return f"{member} is not supported for a whole batch: {operator}"
        other = [each for each in operator.primitives if not isinstance(each, _MOVES)]
        if other:
            return f"{member} does more than crop, resize and flip"
        resizes += sum(isinstance(each, Resize) for each in operator.primitives)
        operators.append(operator)
    if resizes > 1:
        return "images are resized more than once"
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


def _all(where: Where) -> bool:
    return where is None or bool(where.all())
