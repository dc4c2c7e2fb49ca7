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

KINDS = ("photo", "noise", "flat", "two levels", "extremes")

Batch = Tensor | list[Tensor]


def pixels(kind: str, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
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


def assert_same(got: Batch, expected: Sequence[Tensor]) -> None:
    """Every byte; ``got`` may be on any device."""
    assert len(got) == len(expected)
    for sample, (one, other) in enumerate(zip(got, expected, strict=True)):
        one = one.cpu()
        assert one.dtype == other.dtype
        assert one.shape == other.shape, f"sample {sample}: {one.shape} is not {other.shape}"
        off = (one.int() - other.int()).abs()
        assert not off.any(), f"sample {sample}: {off.max()} levels off at {off.nonzero()[:3]}"
