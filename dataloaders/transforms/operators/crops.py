"""Operators that cut out a window: CenterCrop, RandomCrop, RandomResizedCrop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Action, Operator, SampleError, Sizes, taking
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.geometry import Crop, Pad, Resize

from .attempts import Rectangles
from .options import fill_of, padding_of, pair_of, whole
from .sizes import resized, with_pixels
from .table import mode_of, reads

_Ints = npt.NDArray[np.int64]


class RandomResizedCrop(Operator):
    """A window of random area and shape, made ``size`` pixels."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._height, self._width = pair_of(transform.size)
        self._rectangles = Rectangles(transform)
        mode = mode_of(transform.interpolation, v2)
        self.primitives = (Crop(v2), Resize(mode, transform.antialias, v2))

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        crop = self._windows(draws, sizes, where)
        before = sizes.copy()
        actions = [
            Action(self.primitives[0], crop, where),
            resized(self.primitives[1], sizes, self._height, self._width, where),
        ]
        empty = (crop["height"] < 1) | (crop["width"] < 1)
        with_pixels(actions, empty, before, where)
        return actions

    def _windows(self, draws: Draws, sizes: Sizes, where: Where) -> dict[str, _Ints]:
        """``RandomResizedCrop.get_params``; its loop ends for each sample by itself."""
        height, width = sizes.height, sizes.width
        tried = self._rectangles.tried(draws, height * width)
        w, h = tried.long, tried.short
        fits = (w > 0) & (w <= width[:, None]) & (h > 0) & (h <= height[:, None])
        found, (h, w) = tried.first(fits, h, w)
        top = tried.below(0, height - h + 1)
        left = tried.below(1, width - w + 1)
        tried.take(draws, where)
        for sample in np.flatnonzero(~found if where is None else where & ~found).tolist():
            central = _central(int(height[sample]), int(width[sample]), self._rectangles.ratio)
            top[sample], left[sample], h[sample], w[sample] = central
        return {"top": top, "left": left, "height": h, "width": w}


def _central(height: int, width: int, ratio: Sequence[float]) -> tuple[int, int, int, int]:
    """The largest window in the middle whose shape is allowed: for when no attempt fits."""
    shape = float(width) / float(height)
    if shape < min(ratio):
        w, h = width, round(width / min(ratio))
    elif shape > max(ratio):
        w, h = round(height * max(ratio)), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


class _CenterCrop(Operator):
    """The middle; with zeros around it where the image is smaller."""

    def __init__(self, transform: Any, v2: bool) -> None:
        self._size = pair_of(transform.size)
        self.primitives = (Crop(v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        height, width = self._size
        window = {
            "top": _middle(sizes.height, height),
            "left": _middle(sizes.width, width),
            "height": np.full(len(sizes), height),
            "width": np.full(len(sizes), width),
        }
        sizes.become(height, width, where)
        return [Action(self.primitives[0], window, where)]


def _middle(side: _Ints, wanted: int) -> _Ints:
    """Where ``wanted`` pixels begin that have the middle; below 0 where there are fewer."""
    room = side - wanted
    inside = np.rint(room / 2.0).astype(np.int64)
    return np.where(room < 0, -(-room // 2), inside)


class _RandomCrop(Operator):
    """A window of ``size``, after a border where one is asked for or needed.

    A border of zeros is none: a `Crop` that reaches out of the image has zeros there.
    """

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._v2 = v2
        self._size = pair_of(transform.size)
        self._padding = _crop_padding_of(transform.padding, v2)
        self._if_needed = bool(transform.pad_if_needed)
        pad = Pad(fill_of(transform, v2), transform.padding_mode, v2)
        height, width = self._size
        left, top, right, bottom = self._padding or (0, 0, 0, 0)
        # torchvision's crop of a tensor must reach into it.
        reaches = max(left, right) < width and max(top, bottom) < height
        black = pad.mode == "constant" and not isinstance(pad.fill, tuple) and not pad.fill
        self._folded = black and reaches
        steps = (self._padding is not None) + self._if_needed * (1 if v2 else 2)
        borders = 0 if self._folded else min(steps, 1) if v2 else steps
        self.primitives = (*(pad for _ in range(borders)), Crop(v2))

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        sides = _Sides(sizes, self._padding)
        if self._if_needed:
            sides.widen("width", self._size[1])
            sides.widen("height", self._size[0])
        self._refuse_smaller(sides, where)
        top, left, moved = self._corners(draws, sides, where)
        if self._folded:
            top, left = top - sides.added["top"], left - sides.added["left"]
        height, width = self._size
        window = {
            "top": top,
            "left": left,
            "height": np.full(len(sizes), height),
            "width": np.full(len(sizes), width),
        }
        borders = self._borders(sides, where)
        sizes.become(height, width, where)
        if self._v2:
            if self._folded:
                moved |= sides.any_added
            where = taking(where, moved)
        return [*borders, Action(self.primitives[-1], window, where)]

    def _corners(
        self, draws: Draws, sides: _Sides, where: Where
    ) -> tuple[_Ints, _Ints, npt.NDArray[np.bool_]]:
        """Row, column, and whether it is not the whole image."""
        down, across = sides.height - self._size[0], sides.width - self._size[1]
        if self._v2:
            tall, wide = down > 0, across > 0
        else:
            tall = wide = (down > 0) | (across > 0)
        top = np.where(tall, draws.randint(0, down + 1, taking(where, tall)), 0)
        left = np.where(wide, draws.randint(0, across + 1, taking(where, wide)), 0)
        return top, left, tall | wide

    def _borders(self, sides: _Sides, where: Where) -> list[Action]:
        if self._folded or len(self.primitives) == 1:
            return []
        if self._v2:
            return [Action(self.primitives[0], sides.added, taking(where, sides.any_added))]
        actions = []
        for pad, step in zip(self.primitives, sides.steps, strict=False):
            added = {side: step.get(side, np.zeros_like(sides.height)) for side in Pad.numbers}
            lacks = where if step is sides.first else taking(where, sides.lacking(step))
            actions.append(Action(pad, added, lacks))
        return actions

    def _refuse_smaller(self, sides: _Sides, where: Where) -> None:
        height, width = self._size
        small = (sides.height < height) | (sides.width < width)
        if where is not None:
            small &= where
        if not small.any():
            return
        sample = int(np.flatnonzero(small)[0])
        there = (int(sides.height[sample]), int(sides.width[sample]))
        text = f"Required crop size {(height, width)} is larger than "
        if self._v2:
            text += f"{'padded ' if self._padding is not None else ''}input image size {there}."
        else:
            text += f"input image size {there}"
        raise SampleError(sample, ValueError(text))


class _Sides:
    """Heights and widths with borders: torchvision adds as much on both sides."""

    def __init__(self, sizes: Sizes, padding: tuple[int, int, int, int] | None) -> None:
        zeros = np.zeros(len(sizes), np.int64)
        self.first: dict[str, _Ints] = {}
        self.steps: list[dict[str, _Ints]] = []
        self.added = dict.fromkeys(Pad.numbers, zeros)
        if padding is not None:
            self.added = {
                side: np.full(len(sizes), pixels)
                for side, pixels in zip(Pad.numbers, padding, strict=True)
            }
            self.first = dict(self.added)
            self.steps = [self.first]
        self.height = sizes.height + self.added["top"] + self.added["bottom"]
        self.width = sizes.width + self.added["left"] + self.added["right"]

    def widen(self, name: str, wanted: int) -> None:
        """Add what lacks on both sides, each as much as lacks in all."""
        lacks = np.maximum(wanted - getattr(self, name), 0)
        setattr(self, name, getattr(self, name) + 2 * lacks)
        two = ("left", "right") if name == "width" else ("top", "bottom")
        self.steps.append(dict.fromkeys(two, lacks))
        for side in two:
            self.added = {**self.added, side: self.added[side] + lacks}

    def lacking(self, step: dict[str, _Ints]) -> npt.NDArray[np.bool_]:
        """bool [n]: whether this step adds anything."""
        one, other = step.values()
        return np.asarray((one > 0) | (other > 0))

    @property
    def any_added(self) -> npt.NDArray[np.bool_]:
        """bool [n]: whether any side has a border."""
        left, top, right, bottom = (pixels != 0 for pixels in self.added.values())
        return np.asarray(left | top | right | bottom)


def _crop_padding_of(padding: Any, v2: bool) -> tuple[int, int, int, int] | None:
    if padding is None:
        return None
    if not v2:
        return padding_of(padding)
    left, right, top, bottom = (whole(side, "padding") for side in padding)
    return left, top, right, bottom


@reads("RandomResizedCrop")
def _random_resized_crop(transform: Any, v2: bool) -> Operator:
    return RandomResizedCrop(transform, v2)


@reads("CenterCrop")
def _center_crop(transform: Any, v2: bool) -> Operator:
    return _CenterCrop(transform, v2)


@reads("RandomCrop")
def _random_crop(transform: Any, v2: bool) -> Operator:
    return _RandomCrop(transform, v2)
