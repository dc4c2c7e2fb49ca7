"""Samples that are worth compressing, with columns of every sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image


def rows_of(count: int) -> list[Any]:
    """Samples that compress, with columns of every sort: bytes, floats, one shape and many."""
    ramp = np.arange(4000)
    return [
        {
            "image": Image.fromarray((ramp[:2700] // 30 + row).astype(np.uint8).reshape(30, 30, 3)),
            "photo": Image.fromarray(
                (ramp[: 300 * (5 + row % 4)] // 90 + row).astype(np.uint8).reshape(-1, 20, 3)
            ),
            "features": torch.arange(100.0) + row,
            "big endian": (ramp[:150] * row).astype(">i4"),
            "waves": np.exp(1j * np.round(ramp[: row % 50] / 7, 2)),
            "words": f"row {row} " * (row % 40),
            "flags": ramp[:200] % (row + 2) == 0,
            "some": None if row % 3 else ramp[:300].astype(np.uint16),
            "either": (ramp[: 90 + row % 2] % 99).astype(np.uint8) if row % 5 else f"{row} " * 40,
            "noise": np.random.default_rng(row).bytes(700),
            "label": row,
        }
        for row in range(count)
    ]


class Pictures:
    """Images that compress, of one size or of several."""

    def __init__(self, transform: Any = None, count: int = 60, sizes: Any = ((40, 48),)) -> None:
        self.transform, self.count, self.sizes = transform, count, sizes

    def __len__(self) -> int:
        return self.count

    def image(self, index: int) -> Any:
        height, width = self.sizes[index % len(self.sizes)]
        places = np.arange(height * width * 3).reshape(height, width, 3) // 50 + index * 31
        return Image.fromarray((places % 251).astype(np.uint8))

    def __getitem__(self, index: int) -> Any:
        image = self.image(index)
        if self.transform is not None:
            image = self.transform(image)
        return {"image": image, "vector": torch.full((300,), index / 7), "label": index}


pictures = Pictures()
