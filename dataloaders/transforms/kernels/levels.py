"""Brightness, contrast, saturation, grey, and what is the same for every pixel of one level.

    Blend.c      low + factor * (image - low) in float32, cut off: brightness, contrast, saturation
    Convert.c    (19595 R + 38470 G + 7471 B + 2**15) >> 16: what Pillow takes for grey
    ImageOps.py  autocontrast and equalize: a table of 256 levels for each channel of each image

All of it is Pillow's to the bit on any device: each step is one float32 or float64 operation that
IEEE 754 rounds in one way only, and no two are fused. Pillow's own builds fuse none on x86-64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .kernel import Array, column, in_pieces, there

__all__ = [
    "autocontrast",
    "blended",
    "brightness",
    "contrast",
    "equalize",
    "grayscale",
    "invert",
    "luma",
    "permuted",
    "posterize",
    "saturation",
    "solarize",
]


def blended(low: Tensor | None, images: Tensor, factor: Tensor) -> Tensor:
    """``low + factor * (images - low)``, cut off to bytes, as ``ImagingBlend`` does it.

    Args:
        low: float32, to be broadcast over ``images``; None: zeros.
        images: uint8 [k, C, H, W].
        factor: float32 [k, 1, 1, 1].
    """
    values = images.to(torch.float32)
    if low is None:
        values.mul_(factor)
    else:
        values.sub_(low).mul_(factor).add_(low)
    return values.clamp_(0, 255).to(torch.uint8)


def luma(images: Tensor) -> Tensor:
    """float32 [k, 1, H, W]: Pillow's ``L`` of each pixel, a whole number."""
    if images.shape[1] == 1:
        return images.to(torch.float32)
    # Sums stay below 2**24, where float32 holds every whole number.
    red, green, blue = (images[:, channel : channel + 1].to(torch.float32) for channel in range(3))
    grey = red.mul_(19595).add_(green.mul_(38470)).add_(blue.mul_(7471)).add_(1 << 15)
    return grey.mul_(2.0**-16).floor_()


def brightness(images: Tensor, factor: Array) -> Tensor:
    """uint8 [k, C, H, W]: ``adjust_brightness``; ``factor``: [k]."""
    return in_pieces(lambda x, f: blended(None, x, f), images, _factor(factor, images))


def contrast(images: Tensor, factor: Array) -> Tensor:
    """uint8 [k, C, H, W]: ``adjust_contrast``, towards the image's mean of L; ``factor``: [k]."""

    def work(some: Tensor, f: Tensor) -> Tensor:
        pixels = some.shape[-2] * some.shape[-1]
        total = luma(some).sum((1, 2, 3), dtype=torch.float64).to(torch.int64)
        # int(total / pixels + 0.5), in whole numbers.
        mean = torch.div(2 * total + pixels, max(1, 2 * pixels), rounding_mode="floor")
        return blended(mean.to(torch.float32).reshape(-1, 1, 1, 1), some, f)

    return in_pieces(work, images, _factor(factor, images))


def saturation(images: Tensor, factor: Array) -> Tensor:
    """uint8 [k, C, H, W]: ``adjust_saturation``; ``factor``: [k]. A grey image stays as it is."""
    if images.shape[1] == 1:
        return images
    return in_pieces(lambda x, f: blended(luma(x), x, f), images, _factor(factor, images))


def grayscale(images: Tensor, channels: int) -> Tensor:
    """uint8 [k, channels, H, W]: ``to_grayscale``; ``channels``: 1 or 3, then all alike."""
    if images.shape[1] == channels == 1:
        return images

    def work(some: Tensor) -> Tensor:
        return luma(some).to(torch.uint8).expand(-1, channels, -1, -1)

    return in_pieces(work, images, shape=(channels, *images.shape[2:])).contiguous()


def permuted(images: Tensor, permutation: Array) -> Tensor:
    """[k, C, H, W]: channel ``permutation[i, c]`` of image i in place c; [k, n], -1 for nothing."""
    order = np.asarray(permutation, np.int64)
    order = order[:, (order >= 0).any(0)]
    if order.shape[1] != images.shape[1] or (order < 0).any():
        raise ValueError(
            f"Length of permutation does not match number of channels: "
            f"{order.shape[1]} != {images.shape[1]}"
        )
    channels = there(order, images.device)
    samples = torch.arange(len(images), device=images.device).unsqueeze(1)
    return images[samples, channels]


def invert(images: Tensor) -> Tensor:
    """uint8 [k, C, H, W]: ``invert``, 255 - level."""
    return images.bitwise_not()


def posterize(images: Tensor, bits: Array) -> Tensor:
    """uint8 [k, C, H, W]: ``posterize``; ``bits``: [k] whole numbers from 1 to 8.

    Raises:
        ValueError: for other bits, as Pillow does.
    """
    bits = np.asarray(bits, np.int64)
    if ((bits < 1) | (bits > 8)).any():
        raise ValueError("bits must be between or equal to 1 and 8")
    return images & column(256 - (1 << (8 - bits)), images, torch.uint8)


def solarize(images: Tensor, threshold: Array) -> Tensor:
    """uint8 [k, C, H, W]: ``solarize``, 255 - level from ``threshold`` on; [k], any numbers."""
    # For whole levels "below t" is "below t rounded up"; 256, which no byte holds, inverts none.
    first = np.clip(np.ceil(np.asarray(threshold, np.float64)), 0, 256).astype(np.int64)

    def work(some: Tensor, f: Tensor, inverted: Tensor) -> Tensor:
        return some.ge(f).to(torch.uint8).mul_(inverted).bitwise_xor_(some)

    start = column(np.minimum(first, 255), images, torch.uint8)
    return in_pieces(work, images, start, column((first < 256) * 255, images, torch.uint8))


def autocontrast(images: Tensor) -> Tensor:
    """uint8 [k, C, H, W]: ``autocontrast``: each channel from its darkest to its lightest level."""
    low = images.amin((-2, -1)).to(torch.float64).unsqueeze(-1)
    high = images.amax((-2, -1)).to(torch.float64).unsqueeze(-1)
    levels = torch.arange(256, dtype=torch.float64, device=images.device)
    flat = high <= low
    # Tensor by tensor: a Python number would be multiplied by a reciprocal.
    scale = torch.div(torch.full_like(low, 255.0), torch.where(flat, 1.0, high - low))
    table = (levels * scale).add_(-low * scale).clamp_(0, 255).to(torch.uint8)
    return _looked_up(images, torch.where(flat, levels.to(torch.uint8), table))


def equalize(images: Tensor) -> Tensor:
    """uint8 [k, C, H, W]: ``equalize``: levels of each channel spread by how often they occur."""
    counts = _histogram(images)
    total = images.shape[-2] * images.shape[-1]
    # The count of the highest level that occurs: where the sum so far is first complete.
    below = counts.cumsum(-1)
    last = counts.gather(-1, (below >= total).to(torch.uint8).argmax(-1, keepdim=True))
    step = torch.div(total - last, 255, rounding_mode="floor")
    # n starts at step // 2 and grows by the count of each level after it was used.
    before = below - counts + torch.div(step, 2, rounding_mode="floor")
    table = torch.div(before, step.clamp(min=1), rounding_mode="floor").clamp_(max=255)
    levels = torch.arange(256, device=images.device)
    return _looked_up(images, torch.where(step == 0, levels, table).to(torch.uint8))


def _factor(factor: Array, images: Tensor) -> Tensor:
    """float32 [k, 1, 1, 1]: Pillow's C takes the factor as a ``float``."""
    return column(np.asarray(factor, np.float64).astype(np.float32), images)


def _looked_up(images: Tensor, tables: Tensor) -> Tensor:
    """Each level replaced by its table's; ``tables``: uint8 [k, C, 256]."""
    channels = images.shape[1]
    offsets = torch.arange(0, 256 * channels, 256, dtype=torch.int32, device=images.device)

    def work(some: Tensor, own: Tensor) -> Tensor:
        starts = torch.arange(0, own.numel(), 256 * channels, dtype=torch.int32, device=own.device)
        starts = starts.reshape(-1, 1, 1, 1) + offsets.reshape(1, -1, 1, 1)
        indices = torch.add(some, starts).reshape(-1)
        return own.reshape(-1).index_select(0, indices).reshape(some.shape)

    return in_pieces(work, images, tables)


def _histogram(images: Tensor) -> Tensor:
    """int64 [k, C, 256]: how often each level occurs in each channel."""
    rows = images.shape[0] * images.shape[1]
    counts = torch.zeros(rows, 256, dtype=torch.int64, device=images.device)
    flat = images.reshape(rows, -1)
    if images.device.type == "cpu":
        # Five times as quick as by index. On CUDA it would wait for the device, row by row.
        for row, count in zip(flat, counts, strict=True):
            count.copy_(torch.bincount(row, minlength=256))
    else:
        _count_by_index(flat, counts)
    return counts.reshape(*images.shape[:2], 256)


def _count_by_index(flat: Tensor, counts: Tensor) -> None:
    """Add to ``counts``, int64 [n, 256], the levels of each row of ``flat``, uint8 [n, m]."""
    # By row, so that the int64 indices of a batch never exist at once.
    step = max(1, (1 << 24) // max(1, flat.shape[1]))
    for begin in range(0, len(flat), step):
        some = flat[begin : begin + step].to(torch.int64)
        counts[begin : begin + step].scatter_add_(1, some, torch.ones_like(some))
