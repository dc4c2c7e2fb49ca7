"""Photographs, and batches of them: as stock makes them, and as they are recorded."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

from .recorded import is_recorded, recording

__all__ = ["Photos", "both", "picture", "written"]


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth colours with noise: what JPEG's chroma is made for."""
    rng = np.random.default_rng((seed, height, width))
    y, x = np.mgrid[:height, :width]
    planes = [
        120 + 100 * np.sin(x / rng.uniform(4, 40) + y / rng.uniform(4, 40) + rng.uniform(0, 6))
        for _ in range(3)
    ]
    noisy = np.stack(planes, 2) + rng.normal(0, 6, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def written(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """Return a file of ``image``."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


class Photos(Dataset[Any]):
    """``make(image)`` of each file, opened by Pillow as RGB."""

    def __init__(self, files: Sequence[bytes], make: Callable[[Any], Any]) -> None:
        self.files = list(files)
        self.make = make

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: int) -> Any:
        return self.make(Image.open(io.BytesIO(self.files[key])).convert("RGB"))


def both(
    dataset: Dataset[Any], collate_fn: Callable[[Any], Any] = default_collate, seed: int = 0
) -> tuple[Any, Any]:
    """Return ``dataset`` as one batch of stock's, and as it is recorded, with equal draws."""
    loader = DataLoader(dataset, batch_size=len(dataset), collate_fn=collate_fn)  # type: ignore[arg-type]
    found = []
    for each in (loader, recording(loader)):
        torch.manual_seed(seed)
        random.seed(seed)
        found.append(next(iter(each)))
    stock, recorded = found
    assert is_recorded(recorded)
    return stock, recorded
