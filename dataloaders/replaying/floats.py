"""Kernels on a whole batch of floats, [n, 3, H, W], on any device: as torchvision does it to one.

Each takes the images and what is given for each of them, as those of ``kernels.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .kernels import Array, upload


def normalised(images: Tensor, numbers: Sequence[Array]) -> Tensor:
    """Return the images less their mean, over their deviation; float32 [2, 3] of each."""
    mean, std = upload(np.stack(numbers), images.device).view(-1, 2, 3, 1, 1).unbind(1)
    return images.sub_(mean).div_(std)


def mirrored(images: Tensor, _: Any) -> Tensor:
    """Return the images with left and right exchanged."""
    return images.flip(3)


def flipped(images: Tensor, _: Any) -> Tensor:
    """Return the images with top and bottom exchanged."""
    return images.flip(2)


def erased(images: Tensor, boxes: Sequence[tuple[Any, ...]]) -> Tensor:
    """Return the images with a box of each replaced.

    Args:
        images: the images.
        boxes: of each image float32 values, (top, left, height, width) of the box, and how far
            apart the values of channels, rows and columns are.
    """
    values, places, strides = zip(*boxes, strict=True)
    starts = np.cumsum([0, *map(len, values[:-1])]).reshape(-1, 1)
    table = np.concatenate([starts, places, strides], 1).astype(np.int32)
    device, (_, channels, rows, columns) = images.device, images.shape
    flat = upload(np.concatenate(values), device)
    start, top, left, height, width, *steps = upload(table, device).view(-1, 8, 1, 1, 1).unbind(1)
    row = torch.arange(rows, dtype=torch.int32, device=device).view(-1, 1) - top
    column = torch.arange(columns, dtype=torch.int32, device=device) - left
    channel = torch.arange(channels, dtype=torch.int32, device=device).view(-1, 1, 1)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    index = start + channel * steps[0] + row * steps[1] + column * steps[2]
    found = flat.index_select(0, index.masked_fill_(~inside, 0).view(-1)).view(images.shape)
    return torch.where(inside, found, images)
