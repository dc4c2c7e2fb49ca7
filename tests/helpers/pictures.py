"""Pictures that are made here, the same ones each time."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


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


def saved(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """The content of a file of ``image``."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()
