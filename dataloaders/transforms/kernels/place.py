"""Flips, crops, borders and erased boxes: pixels in other places, none computed.

crop    the same window for all: a view; windows of one size: one gather; else k views
pad     rows and columns by index, as NumPy pads the numbers of rows and columns
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .kernel import Array, Images, column, there

__all__ = ["Mode", "crop", "erase", "horizontal_flip", "pad", "vertical_flip"]

Mode: TypeAlias = Literal["constant", "edge", "reflect", "symmetric"]


def horizontal_flip(images: Tensor) -> Tensor:
    """uint8 [k, C, H, W]: left and right exchanged."""
    return images.flip(-1)


def vertical_flip(images: Tensor) -> Tensor:
    """uint8 [k, C, H, W]: top and bottom exchanged."""
    return images.flip(-2)


def crop(images: Images, top: Array, left: Array, height: Array, width: Array) -> Images:
    """The window of each image, zeros outside of it; new tensors or views.

    Args:
        images: uint8 [k, C, H, W], or a list of tensors.
        top, left, height, width: whole numbers [k]; may lie outside of the image.

    Returns:
        uint8 [k, C, height, width], or a list where the windows differ in size.
    """
    boxes = np.stack([np.asarray(side, np.int64) for side in (top, left, height, width)], 1)
    if not len(boxes):
        return images
    if isinstance(images, Tensor):
        inside = (
            (boxes[:, :2] >= 0).all()
            and (boxes[:, 0] + boxes[:, 2] <= images.shape[-2]).all()
            and (boxes[:, 1] + boxes[:, 3] <= images.shape[-1]).all()
        )
        if inside and (boxes == boxes[0]).all():
            y, x, h, w = boxes[0].tolist()
            return images[..., y : y + h, x : x + w]
        if (boxes[:, 2:] == boxes[0, 2:]).all() and images.device.type != "cpu":
            return _gathered(images, boxes, bool(inside))
    windows = [_window(image, box) for image, box in zip(images, boxes.tolist(), strict=True)]
    if all(window.shape == windows[0].shape for window in windows):
        return torch.stack(windows)
    return windows


def pad(
    images: Tensor,
    left: int,
    top: int,
    right: int,
    bottom: int,
    fill: Sequence[int] = (0,),
    mode: Mode = "constant",
) -> Tensor:
    """uint8 [k, C, top + H + bottom, left + W + right]: ``pad``; less than 0 cuts off.

    Args:
        images: uint8 [k, C, H, W].
        left, top, right, bottom: pixels.
        fill: bytes, one or one a channel; of "constant" only.
        mode: torchvision's name; all but "constant" are NumPy's.
    """
    height, width = images.shape[-2:]
    if mode == "constant":
        return _framed(images, left, top, right, bottom, fill)
    rows, columns = _padded(height, top, bottom, mode), _padded(width, left, right, mode)
    return images.index_select(-2, there(rows, images.device)).index_select(
        -1, there(columns, images.device)
    )


def erase(
    images: Tensor, top: Array, left: Array, height: Array, width: Array, levels: Tensor
) -> Tensor:
    """[k, C, H, W] of the type of ``images``: ``erase``: the box of each filled.

    Args:
        images: [k, C, H, W], of any type.
        top, left, height, width: whole numbers [k].
        levels: [1] or [C], on the host; rounded to the images' type.
    """
    rows = torch.arange(images.shape[-2], device=images.device).reshape(1, 1, -1, 1)
    columns = torch.arange(images.shape[-1], device=images.device).reshape(1, 1, 1, -1)
    y, x, h, w = (column(side, images, torch.int64) for side in (top, left, height, width))
    box = (rows >= y) & (rows < y + h) & (columns >= x) & (columns < x + w)
    values = there(levels, images.device, images.dtype)
    return torch.where(box, values.reshape(1, -1, 1, 1), images)


def _window(image: Tensor, box: Sequence[int]) -> Tensor:
    """[C, height, width]: a view where the window lies inside."""
    top, left, height, width = box
    height, width = max(height, 0), max(width, 0)
    y0, x0 = max(top, 0), max(left, 0)
    y1, x1 = min(top + height, image.shape[-2]), min(left + width, image.shape[-1])
    if (y0, x0, y1, x1) == (top, left, top + height, left + width):
        return image[..., y0:y1, x0:x1]
    out = image.new_zeros(image.shape[0], height, width)
    if y1 > y0 and x1 > x0:
        out[..., y0 - top : y1 - top, x0 - left : x1 - left] = image[..., y0:y1, x0:x1]
    return out


def _gathered(images: Tensor, boxes: Array, inside: bool) -> Tensor:
    """[k, C, h, w]: windows of one size, by index; one step for all of them."""
    height, width = boxes[0, 2:].tolist()
    starts = there(boxes[:, :2], images.device)
    rows = starts[:, :1] + torch.arange(height, device=images.device)
    columns = starts[:, 1:] + torch.arange(width, device=images.device)
    y, x = rows.clamp(0, images.shape[-2] - 1), columns.clamp(0, images.shape[-1] - 1)
    samples = torch.arange(len(images), device=images.device).reshape(-1, 1, 1, 1)
    channels = torch.arange(images.shape[1], device=images.device).reshape(1, -1, 1, 1)
    out = images[samples, channels, y[:, None, :, None], x[:, None, None, :]]
    if inside:
        return out
    kept = (y == rows)[:, None, :, None] & (x == columns)[:, None, None, :]
    return out.masked_fill_(~kept, 0)


def _framed(
    images: Tensor, left: int, top: int, right: int, bottom: int, fill: Sequence[int]
) -> Tensor:
    """[k, C, H', W']: the images on a canvas of ``fill``."""
    count, channels, height, width = images.shape
    size = (count, channels, max(0, top + height + bottom), max(0, left + width + right))
    if set(fill) == {0}:
        out = images.new_zeros(size)
    else:
        levels = there(np.clip(fill, 0, 255).astype(np.uint8), images.device).reshape(1, -1, 1, 1)
        out = levels.expand(size).contiguous()
    y0, x0, y1, x1 = max(0, -top), max(0, -left), height - max(0, -bottom), width - max(0, -right)
    if y1 > y0 and x1 > x0:
        y, x = max(0, top), max(0, left)
        out[..., y : y + y1 - y0, x : x + x1 - x0] = images[..., y0:y1, x0:x1]
    return out


def _padded(length: int, before: int, after: int, mode: Mode) -> Array:
    """int64: which row stands where."""
    rows = np.arange(length)[max(0, -before) : length - max(0, -after)]
    if mode == "constant":
        raise ValueError("a constant border is no row of the image")
    return np.pad(rows, (max(0, before), max(0, after)), mode=mode)
