"""What chains are drawn for: images as mixed as a photo, their sizes, and seeds of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from dataloaders.seeding.philox import words
from dataloaders.transforms.actions import Sizes

FORMS = ("PIL", "PIL grey", "tensor", "tensor grey", "tensor floats", "tensor tv")
"""In which an image may come to a transform."""


def images_of(
    form: str, sizes: Sequence[tuple[int, int]] = ((23, 17), (8, 40), (31, 32))
) -> list[Any]:
    """An image of each of ``sizes``, (height, width), in one of `FORMS`."""
    mode = "L" if "grey" in form else "RGB"
    return in_form(form, [picture(*size, mode) for size in sizes])


def in_form(form: str, images: list[Any]) -> list[Any]:
    """PIL images as a transform is given them that takes ``form``, but for its colours."""
    if "tensor" in form:
        images = [functional.pil_to_tensor(image) for image in images]
    if "floats" in form:
        images = [image / 255 for image in images]
    if "tv" in form:
        images = [tv_tensors.Image(image) for image in images]
    return images


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


def seeds_of(samples: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """uint32 [samples, 4]: what seeds the samples 0, 1, ... of an epoch."""
    return words(seed, 0, np.arange(samples))


def sizes_of(images: Sequence[Any]) -> Sizes:
    """The sizes of ``images``."""
    shapes = [functional.get_dimensions(image) for image in images]
    channels, heights, widths = np.array(shapes).reshape(-1, 3).T
    tensors = [isinstance(image, torch.Tensor) for image in images]
    return Sizes(heights, widths, channels, tensors)
