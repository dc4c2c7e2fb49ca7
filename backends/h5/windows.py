"""Read crops and flips as windows of the stored images, drawn as torchvision draws them.

    RandomCrop(224), RandomHorizontalFlip() ──steps_of──> steps
    steps ──draw for the whole batch──> Windows: top, left, upside down, mirrored

The stored bytes are then copied once. All other transforms are torchvision's, sample by sample.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.transforms.read import CONVERTERS, Member

from .draws import Draws

__all__ = ["NotThisBatch", "Obstacle", "Step", "Windows", "steps_of"]

_Ints: TypeAlias = npt.NDArray[np.int64]


class Obstacle(Exception):
    """Batches cannot be made in this way; the message says why in a few words."""


class NotThisBatch(Exception):
    """This batch has to be made sample by sample, by torchvision and `default_collate`."""


class Windows:
    """The part that is taken of each of n images, in pixels of the stored image; arrays [n].

    Args:
        heights, widths: of the images.

    Attributes:
        top, left, height, width: the part.
        upside_down, mirrored: whether it is flipped along its height, along its width.
        outside: whether a part extends beyond its image. There it has zeros.
    """

    def __init__(self, heights: _Ints, widths: _Ints) -> None:
        self.height, self.width = self._whole = heights, widths
        self.top = self.left = np.zeros_like(heights)
        self.upside_down = self.mirrored = np.zeros(len(heights), np.bool_)
        self.outside = False

    def crop(self, top: _Ints, left: _Ints, height: int, width: int) -> None:
        """Take a part of each window; ``top`` and ``left`` count after the flips.

        Raises:
            NotThisBatch: there would be a border around a part of an image.
        """
        below, beside = self.height - height - top, self.width - width - left
        if min(each.min() for each in (top, left, below, beside)) < 0:
            # Zeros surround a whole image, but pixels surround a part of one.
            if self.outside or not np.array_equal(self._whole, (self.height, self.width)):
                raise NotThisBatch
            self.outside = True
        self.top = self.top + np.where(self.upside_down, below, top)
        self.left = self.left + np.where(self.mirrored, beside, left)
        self.height, self.width = np.full_like(self.height, height), np.full_like(self.width, width)


Step: TypeAlias = Callable[[Draws, Windows], None]
"""One crop or flip of all windows; NotThisBatch: torchvision would raise for one of the images."""


def steps_of(members: Sequence[Member]) -> list[Step]:
    """Return ``members`` as steps, without those that only change the type of an image.

    Raises:
        Obstacle: one of them cannot be a step.
    """
    return [_step_of(member) for member in members if member.torchvision not in CONVERTERS]


def _step_of(member: Member) -> Step:
    if member.torchvision is None:
        why = "it is code of your own"
    elif member.torchvision not in _STEPS:
        why = f"only {', '.join(_STEPS)} are, and what makes tensors or floats"
    elif torch.get_default_device().type != "cpu":
        why = "torch.set_default_device() makes torchvision draw from that device's generator"
    else:
        try:
            is_v2 = ".v2" in type(member.transform).__module__
            return _STEPS[member.torchvision](member.transform, is_v2)
        except (TypeError, ValueError) as error:
            why = f"not with its options ({error})"
    raise Obstacle(f"{member} is not supported for a whole batch: {why}")


def _center_crop(transform: Any, v2: bool) -> Step:
    """Return a step to the middle of the image, with zeros around an image that is smaller."""
    height, width = _pair_of(transform.size)

    def step(draws: Draws, windows: Windows) -> None:
        top, left = _middle(windows.height - height), _middle(windows.width - width)
        windows.crop(top, left, height, width)

    return step


def _middle(room: _Ints) -> _Ints:
    return np.where(room < 0, -(-room // 2), np.rint(room / 2.0).astype(np.int64))


def _random_crop(transform: Any, v2: bool) -> Step:
    """Return a step to a window that may reach into a border of zeros."""
    height, width = _pair_of(transform.size)
    if_needed = bool(transform.pad_if_needed)
    left, top, right, bottom = _padding_of(transform.padding, v2)
    if transform.padding is not None or if_needed:
        fill = transform.fill
        zero = fill is None or (isinstance(fill, (int, float)) and fill == 0)
        if transform.padding_mode != "constant" or not zero:
            raise ValueError("only borders of zeros are read")
    # torchvision's crop of a tensor must reach into it.
    if min(left, top, right, bottom) < 0 or max(left, right) >= width or max(top, bottom) >= height:
        raise ValueError("only a padding from 0 to below size is read")

    def side(length: _Ints, before: int, after: int, wanted: int) -> tuple[_Ints, _Ints]:
        """Return the first position of a window, and how many further ones there are."""
        room = length + before + after - wanted
        # torchvision adds as much on both sides.
        lacking = np.maximum(-room, 0) if if_needed else np.zeros_like(room)
        further = room + 2 * lacking
        if further.min() < 0:
            raise NotThisBatch
        return -before - lacking, further

    def step(draws: Draws, windows: Windows) -> None:
        row, down = side(windows.height, top, bottom, height)
        column, across = side(windows.width, left, right, width)
        tall, wide = down > 0, across > 0
        if not v2:
            tall = wide = tall | wide
        row = row + draws.randint(down + 1, tall)
        windows.crop(row, column + draws.randint(across + 1, wide), height, width)

    return step


def _flip(axis: str) -> Callable[[Any, bool], Step]:
    def make(transform: Any, v2: bool) -> Step:
        probability = float(transform.p)

        def step(draws: Draws, windows: Windows) -> None:
            setattr(windows, axis, getattr(windows, axis) ^ draws.below(probability))

        return step

    return make


_STEPS: dict[str, Callable[[Any, bool], Step]] = {
    "CenterCrop": _center_crop,
    "RandomCrop": _random_crop,
    "RandomHorizontalFlip": _flip("mirrored"),
    "RandomVerticalFlip": _flip("upside_down"),
}
"""By the name of torchvision's class, from a transform and whether it is v2's."""


def _pair_of(size: Sequence[Any]) -> tuple[int, int]:
    """Return (height, width)."""
    height, width = map(operator.index, size)
    if height < 1 or width < 1:
        raise ValueError("only sizes of at least 1 x 1 are read")
    return height, width


def _padding_of(padding: Any, v2: bool) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of the numbers that RandomCrop keeps."""
    sides = list(padding) if isinstance(padding, (list, tuple)) else [padding or 0]
    first, second, third, last = (list(map(operator.index, sides)) * 4)[:4]
    return (first, third, second, last) if v2 else (first, second, third, last)
