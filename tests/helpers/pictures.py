"""Pictures that are made here, the same ones each time."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

KINDS = ("photo", "noise", "flat", "two levels", "extremes")


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Image.Image:
    """A PIL image of independent values: mode L, LA, RGB or RGBA."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(values[..., 0] if channels == 1 else values)


def smooth(number: int, height: int | None = None, width: int | None = None) -> Image.Image:
    """A smooth picture of RGB, another one for each number."""
    random = np.random.default_rng(number)
    height = height or 20 + 7 * (number % 5)
    width = width or 24 + 5 * (number % 4)
    coarse = random.integers(0, 256, (max(1, height // 4), max(1, width // 4), 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height))


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A PIL image of slopes, edges and noise: with dark, light, grey and coloured parts.

    Of odd width: pale, so that no level is black or white.
    """
    generator = np.random.default_rng((seed, height, width))
    y, x = np.mgrid[0:height, 0:width]
    slopes = np.stack([x * 255 / width, y * 200 / height + 20, (x + y) * 255 / (width + height)])
    noise = generator.normal(0, 25, (3, height, width))
    pixels = np.clip(slopes + noise, 0, 255)
    pixels[:, : height // 4, : width // 3] = 0
    pixels[:, height // 4 : height // 2, : width // 3] = generator.integers(0, 256, 3)[
        :, None, None
    ]
    pixels[1:, height // 2 :, -width // 4 :] = pixels[0, height // 2 :, -width // 4 :]
    if width % 2:  # not all levels from 0 to 255
        pixels = 20 + pixels * 0.7
    return Image.fromarray(pixels.astype(np.uint8).transpose(1, 2, 0), "RGB").convert(mode)


def pixels(kind: str, channels: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """uint8 [C, H, W] of one of `KINDS`."""
    generator = np.random.default_rng((seed, channels, height, width))
    shape = (height, width, channels)
    if kind == "photo":
        y, x = np.mgrid[0:height, 0:width]
        phase = generator.uniform(0, 6, channels)
        waves = np.sin(x[..., None] / 9 + y[..., None] / 23 + phase) * 100
        waves[height // 3 :, width // 2 :] += 60
        values = 127 + waves + generator.normal(0, 9, shape)
    elif kind == "noise":
        values = generator.integers(0, 256, shape)
    elif kind == "flat":
        values = np.broadcast_to(generator.integers(0, 256, channels), shape)
    elif kind == "two levels":
        values = generator.integers(0, 256) + generator.integers(0, 2, shape)
    else:
        values = generator.choice([0, 1, 127, 128, 254, 255], shape)
    bytes_ = np.clip(values, 0, 255).astype(np.uint8).transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(bytes_))
