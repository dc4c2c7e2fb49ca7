"""Batches of images of every sort, and what torchvision makes of each as a PIL image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from dataloaders.transforms.actions import Action, Primitive

from .compare import assert_same
from .pictures import pixels

Batch = Tensor | list[Tensor]


def batch(count: int, kind: str, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    """uint8 [count, C, H, W]."""
    return torch.stack(
        [pixels(kind, channels, height, width, 100 * seed + sample) for sample in range(count)]
    )


def pil(image: Tensor) -> Image.Image:
    """A PIL image of mode L or RGB."""
    bytes_ = image.cpu().permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(bytes_[..., 0] if bytes_.shape[2] == 1 else bytes_)


def bytes_of(image: Any) -> Tensor:
    """uint8 [C, H, W] of a PIL image."""
    found = torch.from_numpy(np.array(image))
    return found.unsqueeze(0) if found.ndim == 2 else found.permute(2, 0, 1)


def by_torchvision(
    primitive: Primitive, images: Batch, numbers: Mapping[str, npt.NDArray[Any]]
) -> list[Tensor]:
    """What ``primitive`` makes of each as a PIL image: torchvision's and Pillow's own code."""
    action = Action(primitive, numbers)
    return [bytes_of(action.apply(sample, pil(image))) for sample, image in enumerate(images)]


def assert_images(got: Batch, expected: Sequence[Tensor]) -> None:
    """Assert that images, on any device and maybe in one tensor, are the same to the byte."""
    assert_same(list(got), list(expected), "image", strides=False, device=False)
