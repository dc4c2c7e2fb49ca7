"""What chains are drawn for: images as mixed as a photo, their sizes, and seeds of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from dataloaders.seeding.philox import words
from dataloaders.transforms.actions import Sizes

from .pictures import picture

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


def seeds_of(samples: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """uint32 [samples, 4]: what seeds the samples 0, 1, ... of an epoch."""
    return words(seed, 0, np.arange(samples))


def sizes_of(images: Sequence[Any]) -> Sizes:
    """The sizes of ``images``."""
    shapes = [functional.get_dimensions(image) for image in images]
    channels, heights, widths = np.array(shapes).reshape(-1, 3).T
    tensors = [isinstance(image, torch.Tensor) for image in images]
    return Sizes(heights, widths, channels, tensors)
