"""The hue of each pixel moved on, through Pillow's HSV in bytes and back.

    R, G, B ──> V = max, S by (chroma, V), H by (sector, chroma, max - middle)     tables
    H + shift mod 256 ──> k = (6 H + 255 n) mod 1530, a = clamp(min(k, 1020 - k), 0, 255)
    R, G, B = V - round(V S a / 65025) with n = 5, 3, 1

The second half is the usual closed form (Smith, 1978) in whole numbers; it gives what
``hsv2rgb`` in Pillow's Convert.c computes in floats for all 2**24 triples. The first half is
``rgb2hsv_row`` computed beforehand, in the same mixture of float and double.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from .kernel import Array, column, in_pieces

__all__ = ["hue", "rgb_of"]


def hue(images: Tensor, factor: Array) -> Tensor:
    """uint8 [k, C, H, W]: ``adjust_hue``; a grey image stays as it is.

    Args:
        images: uint8 [k, 1 or 3, H, W].
        factor: [k], from -0.5 to 0.5: a half is half of the circle.

    Raises:
        ValueError: for another factor, as torchvision does.
    """
    factor = np.asarray(factor, np.float64)
    for wrong in factor[~((factor >= -0.5) & (factor <= 0.5))].tolist():
        raise ValueError(f"hue_factor ({wrong}) is not in [-0.5, 0.5].")
    if images.shape[1] == 1:
        return images
    shift = (factor * 255).astype(np.int32) & 255
    hues, saturations = _tables(images.device)

    def work(some: Tensor, moved: Tensor) -> Tensor:
        red, green, blue = (some[:, channel : channel + 1].to(torch.int32) for channel in range(3))
        value = torch.maximum(torch.maximum(red, green), blue)
        low = torch.minimum(torch.minimum(red, green), blue)
        chroma = value - low
        middle = (red + green + blue).sub_(value).sub_(low)
        # Which channel is highest (red first, then green), and which of the others is lowest:
        # where the two are equal, both sectors give the same.
        green_top = green == value
        red_top = red == value
        second = torch.where(green_top, red < blue, red > green)
        second = torch.where(red_top, green < blue, second)
        sector = (~green_top).to(torch.int32).add_(1).mul_(2).masked_fill_(red_top, 0).add_(second)
        index = sector.mul_(256).add_(chroma).mul_(256).add_(value).sub_(middle)
        turned = _taken(hues, index).to(torch.int32).add_(moved).bitwise_and_(255)
        shade = _taken(saturations, chroma.mul_(256).add_(value)).to(torch.float32)
        value = value.to(torch.float32)
        return rgb_of(turned.to(torch.int16), shade, value)

    return in_pieces(work, images, column(shift, images, torch.int32))


def rgb_of(hues: Tensor, saturations: Tensor, values: Tensor) -> Tensor:
    """uint8 [k, 3, H, W]: what Pillow makes of HSV.

    Args:
        hues: int16 [k, 1, H, W], 0 to 255.
        saturations, values: float32 [k, 1, H, W], 0 to 255.
    """
    shade = saturations * values
    sixth = hues * 6
    divisor = torch.full((), 65025.0, device=hues.device)
    found = []
    for place in (5, 3, 1):
        k = sixth + 255 * place
        k = torch.where(k >= 1530, k - 1530, k)
        a = torch.minimum(k, 1020 - k).clamp_(0, 255)
        # Whole numbers below 2**24 over 65025: never near enough to a half for float32 to err.
        drop = torch.mul(shade, a).div_(divisor).round_()
        found.append((values - drop).to(torch.uint8))
    return torch.cat(found, 1)


def _taken(table: Tensor, indices: Tensor) -> Tensor:
    return table.index_select(0, indices.reshape(-1)).reshape(indices.shape)


@functools.lru_cache(maxsize=16)
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """uint8: H by (sector, chroma, max - middle), flat; S by (chroma, max), flat.

    Sector: twice the highest channel, 1 more if of the other two the one that comes first (green
    before blue, red before blue, green before red) is the lower.
    """
    chroma = np.arange(256).reshape(-1, 1)
    level = np.arange(256).reshape(1, -1)
    span = np.maximum(chroma, 1).astype(np.float32)
    part = level.astype(np.float32) / span
    wide = part.astype(np.float64)
    # (max - channel) / chroma is 1 for the lowest channel and `part` for the middle one.
    found = [
        np.float32(1.0) - part,
        part - np.float32(1.0),
        2.0 + wide - 1.0,
        2.0 + 1.0 - wide,
        4.0 + wide - 1.0,
        4.0 + 1.0 - wide,
    ]
    hues = np.zeros((6, 256, 256), np.uint8)
    for sector, h in enumerate(found):
        h32 = np.fmod(h.astype(np.float32).astype(np.float64) / 6.0 + 1.0, 1.0).astype(np.float32)
        hues[sector] = np.clip((h32.astype(np.float64) * 255.0).astype(np.int64), 0, 255)
    hues[:, 0] = 0
    top = np.maximum(level, 1).astype(np.float32)
    s = (chroma.astype(np.float32) / top).astype(np.float64) * 255.0
    saturations = np.clip(s.astype(np.int64), 0, 255).astype(np.uint8)
    # Kept, and so copied before anything else can use them, on whichever stream.
    tables = (torch.from_numpy(table.reshape(-1)) for table in (hues, saturations))
    one, other = (table.to(device) for table in tables)
    return one, other
