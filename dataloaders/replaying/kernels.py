"""Pillow's arithmetic on a whole batch of bytes on any device: uint8 [n, H, W, 3], dense.

    lookup                     each level by a table: brightness, posterize, solarize, ...
    contrast, autocontrast, equalize    tables made of each image
    saturation, sharpness      away from the pixel's L, or from the mean of 9 pixels
    affine                     each pixel from somewhere else: rotate, shear, translate
    hue                        through HSV and back
    blur                       weighted sums along rows and columns

Each kernel takes the images and one number (or table, matrix, ...) for each of them, and returns
new images. But for the blur, all is Pillow's to the bit on any device: whole numbers, or float32
operations that IEEE 754 rounds in one way and that nothing fuses. Constants are made on the device:
no copy waits for a stream.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

Array = npt.NDArray[Any]


def upload(values: Array | Tensor, device: torch.device) -> Tensor:
    """Return ``values`` on ``device``; through pinned memory, so that no stream is waited for."""
    host = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    host = host.pin_memory() if device.type == "cuda" else host
    return host.to(device, non_blocking=True)


def lookup(images: Tensor, tables: Sequence[Array]) -> Tensor:
    """Return each level replaced by its table's; ``tables``: uint8 [1 or 3, 256] of each image."""
    return _looked_up(images, upload(np.stack(tables), images.device))


def contrast(images: Tensor, factors: Sequence[float]) -> Tensor:
    """Return the images blended with their mean L."""
    pixels = images.shape[1] * images.shape[2]
    total = _luma(images).sum((1, 2), dtype=torch.int64)
    mean = torch.div(2 * total + pixels, 2 * pixels, rounding_mode="floor")  # to nearest
    levels = torch.arange(256, device=images.device).expand(len(images), 1, -1)
    return _looked_up(images, _blend(mean.float().view(-1, 1, 1), levels, factors))


def autocontrast(images: Tensor, _: Any) -> Tensor:
    """Return each channel stretched from its darkest to its lightest level."""
    low = images.amin((1, 2)).double().unsqueeze(-1)
    span = images.amax((1, 2)).double().unsqueeze(-1) - low
    levels = torch.arange(256, device=images.device, dtype=torch.float64)
    # Tensor by tensor: of a Python number, torch multiplies by the reciprocal.
    scale = torch.full_like(span, 255.0).div(span.clamp(min=1))
    table = (levels * scale).add_(-low * scale).clamp_(0, 255)
    return _looked_up(images, torch.where(span == 0, levels, table).to(torch.uint8))


def equalize(images: Tensor, _: Any) -> Tensor:
    """Return the levels of each channel spread by how often they occur."""
    count, height, width, channels = images.shape
    one = torch.ones((), dtype=torch.int32, device=images.device)
    counts = torch.zeros(count * channels * 256, dtype=torch.int32, device=images.device)
    places = _places(images).reshape(-1)
    counts.index_add_(0, places, one.expand(len(places)))
    counts = counts.view(count, channels, 256)
    below = counts.cumsum(-1)
    total = height * width
    last = counts.gather(-1, (below >= total).to(torch.uint8).argmax(-1, keepdim=True))
    step = torch.div(total - last, 255, rounding_mode="floor")
    before = below - counts + torch.div(step, 2, rounding_mode="floor")
    table = torch.div(before, step.clamp(min=1), rounding_mode="floor").clamp_(max=255)
    levels = torch.arange(256, device=images.device)
    return _looked_up(images, torch.where(step == 0, levels, table).to(torch.uint8))


def saturation(images: Tensor, factors: Sequence[float]) -> Tensor:
    """Return the images blended with their L; grey for a factor of 0."""
    return _blend(_luma(images).unsqueeze(-1).float(), images, factors)


def sharpness(images: Tensor, factors: Sequence[float]) -> Tensor:
    """Return the images blended with smoothed ones; the outermost pixels stay, as in Pillow."""
    low = images.float()
    wide = images.to(torch.int16)
    rows = wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
    total = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + wide[:, 1:-1, 1:-1] * 4
    low[:, 1:-1, 1:-1] = total.float().mul_(1.0 / 13.0).round_()  # never near enough to a half
    return _blend(low, images, factors)


def reaches(matrix: Array, width: int, height: int) -> bool:
    """Whether `affine` does this as Pillow does.

    Pillow adds up pixel by pixel where it only scales, and in another way from 32768 pixels on.
    """
    scales = not matrix[[1, 3]].any() and (matrix[[0, 4]] != 1).any()
    corners = np.array([(0, 0, 1), (width, height, 1), (0, height, 1), (width, 0, 1)], np.float64)
    return not scales and bool((abs(corners @ matrix.reshape(2, 3).T) < 32768.0).all())


def affine(images: Tensor, warps: Sequence[tuple[Array, Array]]) -> Tensor:
    """Return the images warped by nearest neighbour, in their own size.

    Args:
        images: the images.
        warps: of each image Pillow's matrix, float64 [6], from a pixel that comes out to where it
            comes from; and the colour, uint8 [3], of pixels from outside.
    """
    matrices, fills = (np.stack(each) for each in zip(*warps, strict=True))
    count, height, width, channels = images.shape
    device = images.device
    start = matrices[:, 2::3] + matrices[:, 0::3] * 0.5 + matrices[:, 1::3] * 0.5
    fixed = np.concatenate([matrices[:, [0, 1, 3, 4]], start], 1) * 65536.0 + 0.5  # 16.16 bits
    whole = upload(np.floor(fixed).astype(np.int64).astype(np.int32), device)
    xx, xy, yx, yy, x0, y0 = whole.view(count, 6, 1, 1).unbind(1)
    columns = torch.arange(width, dtype=torch.int32, device=device)
    rows = torch.arange(height, dtype=torch.int32, device=device).unsqueeze(1)
    from_x = (x0 + rows * xy + columns * xx) >> 16
    from_y = (y0 + rows * yy + columns * yx) >> 16
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    first = torch.arange(0, count * height * width, height * width, device=device).view(-1, 1, 1)
    index = (from_y * width + from_x).masked_fill_(~inside, 0) + first
    found = images.view(-1, channels).index_select(0, index.view(-1)).view(images.shape)
    return torch.where(inside.unsqueeze(-1), found, upload(fills, device).view(count, 1, 1, -1))


def hue(images: Tensor, shifts: Sequence[int]) -> Tensor:
    """Return the images with their hue moved on by 0 to 255.

    Back from HSV by the closed form (Smith, 1978) in whole numbers; it gives what Pillow's
    ``hsv2rgb`` computes in floats for all 2**24 triples.
    """
    shift = upload(np.array(shifts, np.int32), images.device)
    hues, saturations = _hsv_tables(images.device)
    red, green, blue = images.to(torch.int32).unbind(-1)
    value = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = value - low
    middle = red + green + blue - value - low
    # Highest channel (red first, then green), and which of the others is the lower.
    red_top, green_top = red == value, green == value
    second = torch.where(green_top, red < blue, red > green)
    second = torch.where(red_top, green < blue, second)
    sector = second.to(torch.int32) + 2 * (~red_top).to(torch.int32) * (
        2 - green_top.to(torch.int32)
    )
    index = (sector * 256 + chroma) * 256 + value - middle
    turned = (_taken(hues, index) + shift.view(-1, 1, 1)) & 255
    shade = _taken(saturations, chroma * 256 + value) * value
    divisor = torch.full((), 65025.0, dtype=torch.float32, device=images.device)
    out = torch.empty_like(images)
    for channel, place in enumerate((5, 3, 1)):
        k = (turned * 6 + 255 * place) % 1530
        part = torch.minimum(k, 1020 - k).clamp_(0, 255)
        # Whole numbers below 2**24 over 65025: never near enough to a half for float32 to err.
        drop = shade.mul(part).float().div_(divisor).round_()
        out[..., channel] = value - drop
    return out


def tint(images: Tensor, factors: Sequence[float]) -> Tensor:
    """Return the images with their hue moved on by turns, in floats as torchvision's tensors."""
    factor = upload(np.array(factors, np.float32), images.device).view(-1, 1, 1)
    red, green, blue = images.float().unbind(-1)
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    span = chroma.masked_fill(chroma == 0, 1)
    other = torch.where(green == value, (blue - red) / span + 2, (red - green) / span + 4)
    turned = torch.where(red == value, (green - blue) / span, other) + factor * 6
    made = torch.empty_like(images)
    for channel, place in enumerate((5, 3, 1)):
        k = (turned + place) % 6
        level = value - chroma * torch.minimum(k, 4 - k).clamp_(0, 1)
        made[..., channel] = level.mul_(255.999 / 255)
    return made


def blur(images: Tensor, weights: Sequence[tuple[Array, Array]]) -> Tensor:
    """Return weighted sums along rows, then columns, of images that are mirrored at the border.

    One addition a weight, in float32: a convolution may round to fewer bits on a device.

    Args:
        images: the images.
        weights: of each image those across and those down, float32, odd in number.
    """
    made = images.permute(0, 3, 1, 2).float()
    for axis, each in ((3, 0), (2, 1)):
        half = max(len(pair[each]) for pair in weights) // 2
        table = np.stack([np.pad(pair[each], half - len(pair[each]) // 2) for pair in weights])
        border = (half, half, 0, 0) if axis == 3 else (0, 0, half, half)
        wide, length = functional.pad(made, border, "reflect"), made.shape[axis]
        made = torch.zeros_like(made)
        columns = upload(table, images.device).view(*table.shape, 1, 1, 1).unbind(1)
        for place, weight in enumerate(columns):
            made.addcmul_(wide.narrow(axis, place, length), weight)
    return made.round_().to(torch.uint8).permute(0, 2, 3, 1)


TURNS = {  # by Pillow's Transpose
    0: lambda images, _: images.flip(2),
    1: lambda images, _: images.flip(1),
    2: lambda images, _: images.rot90(1, (1, 2)),
    3: lambda images, _: images.flip((1, 2)),
    4: lambda images, _: images.rot90(3, (1, 2)),
}


# Of floats [n, 3, H, W], as torchvision makes them of one image.


def normalised(images: Tensor, numbers: Sequence[Array]) -> Tensor:
    """Return the images less their mean, over their deviation; float32 [2, 3] of each."""
    mean, std = upload(np.stack(numbers), images.device).view(-1, 2, 3, 1, 1).unbind(1)
    return images.sub_(mean).div_(std)


def erased(images: Tensor, boxes: Sequence[tuple[Any, ...]]) -> Tensor:
    """Return the images with a box of each replaced.

    Args:
        images: the images.
        boxes: of each image float32 values, their strides by channel, row and column, and the box:
            top, left, height, width.
    """
    values = upload(np.concatenate([each[0] for each in boxes]), images.device)
    begin = 0
    for image, (own, strides, (top, left, height, width)) in zip(images, boxes, strict=True):
        box = image[:, top : top + height, left : left + width]
        box.copy_(values.as_strided(box.shape, strides, begin))
        begin += len(own)
    return images


def _looked_up(images: Tensor, tables: Tensor) -> Tensor:
    flat = tables.expand(-1, images.shape[3], -1).reshape(-1)
    return flat.index_select(0, _places(images).reshape(-1)).view(images.shape)


def _places(images: Tensor) -> Tensor:
    """int32: the place of each level in flat tables, [n, C, 256]."""
    count, channels = len(images), images.shape[3]
    starts = torch.arange(0, count * channels * 256, 256, dtype=torch.int32, device=images.device)
    return images + starts.view(count, 1, 1, channels)


def _luma(images: Tensor) -> Tensor:
    """int32 [n, H, W]: Pillow's L."""
    red, green, blue = images.to(torch.int32).unbind(-1)
    return (red * 19595 + green * 38470 + blue * 7471 + (1 << 15)) >> 16


def _blend(low: Tensor, images: Tensor, factors: Sequence[float]) -> Tensor:
    """``low + factor * (images - low)`` in float32, cut off to bytes: Blend.c."""
    factor = upload(np.array(factors, np.float32), images.device)
    factor = factor.view(-1, *[1] * (images.ndim - 1))
    values = images.float().sub_(low).mul_(factor).add_(low)
    return values.clamp_(0, 255).to(torch.uint8)


def _taken(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.view(-1)).view(index.shape)


@functools.lru_cache(maxsize=16)
def _hsv_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """int32: H by (sector, chroma, max - middle), flat; S by (chroma, max), flat.

    Pillow's ``rgb2hsv_row`` computed beforehand, in its own mixture of float and double.
    """
    chroma, level = np.arange(256).reshape(-1, 1), np.arange(256).reshape(1, -1)
    part = level.astype(np.float32) / np.maximum(chroma, 1).astype(np.float32)
    wide, one = part.astype(np.float64), np.float32(1.0)
    # (max - channel) / chroma is 1 for the lowest channel and `part` for the middle one.
    found = [one - part, part - one, wide + 1.0, 3.0 - wide, wide + 3.0, 5.0 - wide]
    hues = np.zeros((6, 256, 256), np.int32)
    for sector, h in enumerate(found):
        h32 = np.fmod(h.astype(np.float32).astype(np.float64) / 6.0 + 1.0, 1.0).astype(np.float32)
        hues[sector] = np.clip((h32.astype(np.float64) * 255.0).astype(np.int64), 0, 255)
    hues[:, 0] = 0
    top = np.maximum(level, 1).astype(np.float32)
    shades = (chroma.astype(np.float32) / top).astype(np.float64) * 255.0
    saturations = np.clip(shades.astype(np.int64), 0, 255).astype(np.int32)
    # Not through pinned memory: kept, so copied before any stream can use them.
    one_table, other = (torch.from_numpy(t.reshape(-1)).to(device) for t in (hues, saturations))
    return one_table, other
