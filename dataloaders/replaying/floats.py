"""Colours, blurs and erased boxes on a whole batch of floats, [n, 3, H, W], on any device.

As torchvision does it to one tensor, with the factor of each image: 1e-6 off at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .kernels import rotated, upload


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Return the images times ``factor``, float32 [n], within 0 and 1."""
    return images.mul(factor.view(-1, 1, 1, 1)).clamp_(0, 1)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Return the images away from their mean grey; ``factor``: float32 [n]."""
    return _blend(grey(images).mean((1, 2, 3), keepdim=True), images, factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Return the images away from their grey; ``factor``: float32 [n]."""
    return _blend(grey(images), images, factor)


def hue(images: Tensor, factor: Tensor) -> Tensor:
    """Return the images with their hue moved on; ``factor``: float32 [n], turns."""
    red, green, blue = images.unbind(1)
    return torch.stack(rotated(red, green, blue, factor), 1)


def grey(images: Tensor) -> Tensor:
    """Return floats [n, 1, H, W]."""
    red, green, blue = images.unbind(1)
    return red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).unsqueeze(1)


def blurred(images: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """Return the images as weighted sums along rows, then columns; mirrored at the border.

    One addition a weight, in float32: a convolution may round to fewer bits on a device.
    """
    for axis, weights in ((3, across), (2, down)):
        half = weights.shape[1] // 2
        wide = functional.pad(
            images, (half, half, 0, 0) if axis == 3 else (0, 0, half, half), "reflect"
        )
        length = images.shape[axis]
        images = torch.zeros_like(images)
        for place, weight in enumerate(weights.view(*weights.shape, 1, 1, 1).unbind(1)):
            images.addcmul_(wide.narrow(axis, place, length), weight)
    return images


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


def _blend(low: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    factor = factor.view(-1, 1, 1, 1)
    return images.mul(factor).add_(low * (1.0 - factor)).clamp_(0, 1)
