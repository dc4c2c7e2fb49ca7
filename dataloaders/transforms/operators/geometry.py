"""Operators that move pixels: crops, flips, sizes, turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.transforms.actions import Action, Operator, Sizes
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.geometry import Crop, HorizontalFlip, Resize, VerticalFlip

from .table import mode_of, reads

_ATTEMPTS = 10


class RandomResizedCrop(Operator):
    """A window of random area and shape, made ``size`` pixels."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._height, self._width = (int(side) for side in transform.size)
        self._scale = tuple(map(float, transform.scale))
        self._ratio = tuple(map(float, transform.ratio))
        # In float32, as torchvision takes it.
        self._log_ratio = torch.log(torch.tensor(transform.ratio)).numpy()
        mode = mode_of(transform.interpolation)
        self.primitives = (Crop(), Resize(mode, transform.antialias, v2))

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        crop = self._windows(draws, sizes, where)
        resized = {
            "height": np.full(len(sizes), self._height),
            "width": np.full(len(sizes), self._width),
        }
        sizes.become(self._height, self._width, where)
        return [
            Action(self.primitives[0], crop, where),
            Action(self.primitives[1], resized, where),
        ]

    def _windows(
        self, draws: Draws, sizes: Sizes, where: Where
    ) -> dict[str, npt.NDArray[np.int64]]:
        """``RandomResizedCrop.get_params``; its loop ends for each sample by itself."""
        height, width = sizes.height, sizes.width
        area = (height * width).astype(np.float64)
        found = {name: np.zeros(len(sizes), np.int64) for name in Crop.numbers}
        todo = np.ones(len(sizes), np.bool_) if where is None else where.copy()
        for _ in range(_ATTEMPTS):
            if not todo.any():
                return found
            target = area * draws.uniform(self._scale[0], self._scale[1], todo).astype(np.float64)
            logarithm = draws.uniform(self._log_ratio[0], self._log_ratio[1], todo)
            aspect = torch.exp(torch.from_numpy(logarithm)).numpy().astype(np.float64)
            w = np.rint(np.sqrt(target * aspect)).astype(np.int64)
            h = np.rint(np.sqrt(target / aspect)).astype(np.int64)
            fits = todo & (w > 0) & (w <= width) & (h > 0) & (h <= height)
            top = draws.randint(0, height - h + 1, fits)
            left = draws.randint(0, width - w + 1, fits)
            for name, value in zip(Crop.numbers, (top, left, h, w), strict=True):
                found[name] = np.where(fits, value, found[name])
            todo &= ~fits
        for sample in np.flatnonzero(todo).tolist():
            whole = _central(int(height[sample]), int(width[sample]), self._ratio)
            for name, side in zip(Crop.numbers, whole, strict=True):
                found[name][sample] = side
        return found


def _central(height: int, width: int, ratio: tuple[float, ...]) -> tuple[int, int, int, int]:
    """The largest window in the middle whose shape is allowed: for when no attempt fits."""
    shape = float(width) / float(height)
    if shape < min(ratio):
        w, h = width, round(width / min(ratio))
    elif shape > max(ratio):
        w, h = round(height * max(ratio)), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


class _Flip(Operator):
    random = True

    def __init__(self, transform: Any, primitive: HorizontalFlip | VerticalFlip) -> None:
        self._probability = float(transform.p)
        self.primitives = (primitive,)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        return [Action(self.primitives[0], {}, draws.below(self._probability, where))]


@reads("RandomResizedCrop")
def _random_resized_crop(transform: Any, v2: bool) -> Operator:
    return RandomResizedCrop(transform, v2)


@reads("RandomHorizontalFlip")
def _horizontal(transform: Any, v2: bool) -> Operator:
    return _Flip(transform, HorizontalFlip())


@reads("RandomVerticalFlip")
def _vertical(transform: Any, v2: bool) -> Operator:
    return _Flip(transform, VerticalFlip())
