"""Crops and flips of a chain as one window of the stored image: its bytes are moved once.

    RandomCrop(224), RandomHorizontalFlip()  ──>  rows top..., columns left..., mirrored or not

The windows of a whole batch are drawn at once, after torchvision's distributions. `replay` draws
one as torchvision does, number by number, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.transforms.read import Member

__all__ = ["Geometry", "Windows", "geometry_of"]

Integers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Windows:
    """The part of each of n images that is taken, in pixels of the stored image; arrays [n].

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
        """All of each image."""
        none, no = np.zeros(len(heights), np.int64), np.zeros(len(heights), np.bool_)
        return cls(none, none, heights, widths, no, no)

    @classmethod
    def joined(cls, each: Sequence[Windows]) -> Windows:
        """These windows, one after the other."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*map(_fields, each), strict=True)))

    def cropped(self, top: Integers, left: Integers, height: int, width: int) -> Windows:
        """A part of these windows, ``top`` and ``left`` as they are seen, flips included."""
        below = self.height - height - top
        beside = self.width - width - left
        return Windows(
            self.top + np.where(self.upside_down, below, top),
            self.left + np.where(self.mirrored, beside, left),
            np.full_like(self.height, height),
            np.full_like(self.width, width),
            self.upside_down,
            self.mirrored,
        )


def _fields(windows: Windows) -> tuple[npt.NDArray[Any], ...]:
    return tuple(vars(windows).values())


@dataclass(frozen=True)
class _Crop:
    height: int
    width: int
    random: bool
    both: bool  # v1 draws both anchors, or none; v2 each where there is a choice

    def draw(self, seen: Windows, random: np.random.Generator) -> Windows | None:
        down, right = seen.height - self.height, seen.width - self.width
        if min(down.min(), right.min()) < 0:
            return None
        if not self.random:
            return seen.cropped(_centre(down), _centre(right), self.height, self.width)
        top, left = (random.integers(0, free + 1) for free in (down, right))
        return seen.cropped(top, left, self.height, self.width)

    def replay(self, seen: Windows, generator: torch.Generator) -> Windows | None:
        down, right = seen.height - self.height, seen.width - self.width
        if not self.random or down[0] < 0 or right[0] < 0:
            return self.draw(seen, np.random.default_rng(0))
        top = left = np.zeros(1, np.int64)
        either = bool(down[0] or right[0])
        if down[0] or (self.both and either):
            top = torch.randint(0, int(down[0]) + 1, (1,), generator=generator).numpy()
        if right[0] or (self.both and either):
            left = torch.randint(0, int(right[0]) + 1, (1,), generator=generator).numpy()
        return seen.cropped(top, left, self.height, self.width)


@dataclass(frozen=True)
class _Flip:
    vertical: bool
    probability: float

    def draw(self, seen: Windows, random: np.random.Generator) -> Windows:
        return self._flipped(seen, random.random(len(seen.top)) < self.probability)

    def replay(self, seen: Windows, generator: torch.Generator) -> Windows:
        return self._flipped(seen, (torch.rand(1, generator=generator) < self.probability).numpy())

    def _flipped(self, seen: Windows, flip: Flags) -> Windows:
        upside_down, mirrored = seen.upside_down, seen.mirrored
        if self.vertical:
            upside_down = upside_down ^ flip
        else:
            mirrored = mirrored ^ flip
        return Windows(seen.top, seen.left, seen.height, seen.width, upside_down, mirrored)


class Geometry:
    """Some crops and flips, one after the other; made by `geometry_of`."""

    def __init__(self, steps: Sequence[_Crop | _Flip]) -> None:
        self._steps = tuple(steps)

    @property
    def random(self) -> bool:
        """Whether two batches of the same images may differ."""
        return any(isinstance(step, _Flip) or step.random for step in self._steps)

    def draw(
        self, heights: Integers, widths: Integers, random: np.random.Generator
    ) -> Windows | None:
        """A window of each image of these sizes; None if one is smaller than a crop."""
        seen: Windows | None = Windows.whole(heights, widths)
        for step in self._steps:
            if seen is not None:
                seen = step.draw(seen, random)
        return seen

    def replay(self, height: int, width: int, generator: torch.Generator) -> Windows | None:
        """The window of one image that torchvision takes, where ``generator`` is torch's default.

        None if the image is smaller than a crop, where torchvision raises or pads.
        """
        seen: Windows | None = Windows.whole(np.array([height]), np.array([width]))
        for step in self._steps:
            if seen is not None:
                seen = step.replay(seen, generator)
        return seen


def geometry_of(members: Sequence[Member]) -> Geometry | str:
    """``members`` as a `Geometry`, or why they are none: the first one that stands in the way."""
    steps: list[_Crop | _Flip] = []
    for member in members:
        step = _step(member)
        if step is None:
            return f"{member} is neither a plain crop nor a flip"
        steps.append(step)
    return Geometry(steps)


def _step(member: Member) -> _Crop | _Flip | None:
    transform, name = member.transform, member.torchvision
    if name in ("RandomHorizontalFlip", "RandomVerticalFlip"):
        return _Flip(name == "RandomVerticalFlip", float(transform.p))
    if name not in ("RandomCrop", "CenterCrop"):
        return None
    if name == "RandomCrop" and (transform.padding or transform.pad_if_needed):
        return None
    height, width = _pair(transform.size)
    first = not type(transform).__module__.startswith("torchvision.transforms.v2")
    return _Crop(height, width, name == "RandomCrop", first)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    sizes = [int(side) for side in size]
    return (sizes[0], sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _centre(free: Integers) -> Integers:
    # torchvision: int(round(free / 2.0)), which rounds halves to even, as NumPy does.
    return np.round(free / 2.0).astype(np.int64)
