"""Sharpness and blur: what a pixel becomes by its neighbours.

sharpness   round((8 neighbours + 5 x centre) / 13) ──blend by the factor──> bytes
blur        float32 ──reflected border──> one product a tap ──> rounded to bytes
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .kernel import Array, column, in_pieces, there
from .levels import blended

__all__ = ["BLUR_EXACT", "gaussian_blur", "sharpness"]

BLUR_EXACT = (
    "at most 1 level off, in few bytes: torchvision's own float32 sums, in the order that the "
    "convolution of the device adds them in"
)


def sharpness(images: Tensor, factor: Array) -> Tensor:
    """uint8 [k, C, H, W]: ``adjust_sharpness``; ``factor``: [k].

    Pillow smooths by thirteenths in float32 (ImageFilter.SMOOTH); no such sum comes near enough
    to a half to be rounded otherwise than here, in whole numbers. Its outermost rows and columns
    it leaves as they are, and so all of an image with less than three.
    """
    if min(images.shape[-2:]) < 3:
        return images

    def work(some: Tensor, f: Tensor) -> Tensor:
        wide = some.to(torch.int16)
        across = wide[..., :-2] + wide[..., 1:-1]
        across += wide[..., 2:]
        total = across[..., :-2, :] + across[..., 1:-1, :]
        total += across[..., 2:, :]
        centre = wide[..., 1:-1, 1:-1]
        total += centre * 4
        smooth = some.to(torch.float32)
        smooth[..., 1:-1, 1:-1] = total.to(torch.float32).mul_(1.0 / 13.0).round_()
        return blended(smooth, some, f)

    return in_pieces(work, images, column(np.asarray(factor, np.float64), images))


def gaussian_blur(
    images: Tensor, kernel_size: tuple[int, int], sigma: Array, v2: bool = True
) -> Tensor:
    """uint8 [k, C, H, W]: ``gaussian_blur``. Not to the bit, see `BLUR_EXACT`.

    Args:
        images: uint8 [k, C, H, W], each side longer than half of the kernel's.
        kernel_size: width and height of the kernel, odd.
        sigma: [k, 2], across and down; or [k], both.
        v2: whether the kernel is computed as torchvision's v2 does it.
    """
    sigma = np.asarray(sigma, np.float64)
    both = sigma if sigma.ndim == 2 else np.stack([sigma, sigma], 1)
    across, down = (
        there(_gauss(size, both[:, axis], v2), images.device)
        for axis, size in enumerate(kernel_size)
    )
    halves = [size // 2 for size in kernel_size]

    def work(some: Tensor, x: Tensor, y: Tensor) -> Tensor:
        count, channels, height, width = some.shape
        kernel = y.unsqueeze(-1) * x.unsqueeze(-2)
        # One group for each channel of each image: what torchvision computes for one image.
        weight = kernel.repeat_interleave(channels, 0).unsqueeze(1)
        # Rows of one channel after the other, also of one image in another order: for channels
        # beside each other torch asks cuDNN, which may multiply in TF32.
        values = some.reshape(1, count * channels, height, width).contiguous().to(torch.float32)
        if count * channels == 1:
            # One group alone is no depthwise convolution, and cuDNN may do it in TF32.
            weight, values = weight.repeat(2, 1, 1, 1), values.repeat(1, 2, 1, 1)
        padding = [halves[0], halves[0], halves[1], halves[1]]
        values = functional.pad(values, padding, mode="reflect")
        values = functional.conv2d(values, weight, groups=len(weight))[:, : count * channels]
        return values.round_().to(torch.uint8).reshape(some.shape)

    return in_pieces(work, images, across, down)


def _gauss(size: int, sigma: Array, v2: bool) -> Tensor:
    """float32 [k, size]: torchvision's ``_get_gaussian_kernel1d`` of each sigma."""
    scale = torch.from_numpy(sigma.astype(np.float32)).unsqueeze(-1)
    limit = (size - 1) / (2.0 * math.sqrt(2.0)) if v2 else (size - 1) * 0.5
    x = torch.linspace(-limit, limit, steps=size, dtype=torch.float32).div(scale).pow(2)
    if v2:
        return torch.softmax(x.neg(), dim=-1)
    weights = torch.exp(-0.5 * x)
    return weights / weights.sum(-1, keepdim=True)
