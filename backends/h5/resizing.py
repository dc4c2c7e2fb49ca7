"""Resize windows of planar images with Pillow, plane by plane, as it resizes whole images.

    mapped image [C, H, W] ──window──> a plane ──Pillow──> new size ──flips──> the batch [C, h, w]

Pillow resizes each channel by itself, except for those of RGBA. It releases the GIL meanwhile, so
the threads of a `Team` share a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.transforms.primitives.geometry import Resize

from .geometry import Moves
from .team import Team

__all__ = ["resized"]


def resized(
    batch: torch.Tensor, images: list[npt.NDArray[np.uint8]], moves: Moves, team: Team
) -> None:
    """Fill ``batch``, uint8 [n, C, h, w], with the result of ``moves`` for images [C, H, W]."""
    team.split(len(images), batch.nbytes, _some(batch, images, moves))


def _some(
    batch: torch.Tensor, images: list[npt.NDArray[np.uint8]], moves: Moves
) -> Callable[[int, int], None]:
    from PIL import Image

    assert moves.resize is not None
    resample = _pillows(moves.resize)
    places = batch.numpy()
    taken, placed = moves.taken, moves.placed
    after_height, after_width = moves.sizes

    def one(number: int) -> None:
        top, left = int(taken.top[number]), int(taken.left[number])
        rows = slice(top, top + int(taken.height[number]))
        columns = slice(left, left + int(taken.width[number]))
        image = images[number][:, rows, columns]
        image = _flipped(image, bool(taken.upside_down[number]), bool(taken.mirrored[number]))
        size = int(after_width[number]), int(after_height[number])
        top, left = int(placed.top[number]), int(placed.left[number])
        rows = slice(top, top + int(placed.height[number]))
        columns = slice(left, left + int(placed.width[number]))
        turned = bool(placed.upside_down[number]), bool(placed.mirrored[number])
        for plane, place in zip(image, places[number], strict=True):
            made = Image.fromarray(np.ascontiguousarray(plane)).resize(size, resample)
            place[...] = _flipped(np.asarray(made)[rows, columns], *turned)

    def some(begin: int, end: int) -> None:
        for number in range(begin, end):
            one(number)

    return some


def _flipped(values: Any, upside_down: bool, mirrored: bool) -> Any:
    if upside_down:
        values = values[..., ::-1, :]
    return values[..., ::-1] if mirrored else values


def _pillows(resize: Resize) -> Any:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import pil_modes_mapping

    return pil_modes_mapping[InterpolationMode(resize.interpolation)]
