"""The channels of a PIL image one after the other, as a cache keeps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PLANES", "has_planes", "planes_of", "put_planes"]

PLANES = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "HSV": 3}
"""Modes that consist of bytes, and their channels.

PIL takes them apart twice as fast as a transposed copy by NumPy.
"""


def has_planes(image: Any) -> bool:
    """Whether there are planes of this PIL image: its mode consists of bytes, and it has some."""
    return image.mode in PLANES and image.width > 0 and image.height > 0


def planes_of(image: Any) -> npt.NDArray[np.uint8]:
    """Return the planes of an image that `has_planes`, uint8 [channels, height, width]."""
    planes = np.empty((PLANES[image.mode], image.height, image.width), np.uint8)
    put_planes(image, planes)
    return planes


def put_planes(image: Any, planes: npt.NDArray[np.uint8]) -> None:
    """Fill ``planes``, uint8 [channels, height, width], with those of an image that `has_planes`.

    Raises:
        ValueError: ``planes`` are of another shape.
    """
    for plane, band in zip(planes, image.split(), strict=True):
        plane[...] = np.frombuffer(band.tobytes(), np.uint8).reshape(image.height, image.width)
