"""Pixels that Pillow decoded, as a file that DALI reads without loss.

    GIF, TIFF, CMYK, 16 bits, ... ──the dataset's own loader──> RGB ──as_file──> P6 PPM ──> DALI

An uncompressed file costs DALI a copy, and lets it go through the same graph as all others, regions
included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["as_file", "pixels_into"]

_BAND_PIXELS = 1 << 18
"""What Pillow gives out at once: its own way to all bytes of a large image copies it twice."""


def as_file(image: Any) -> npt.NDArray[np.uint8]:
    """uint8 [bytes]: a PPM file of ``image``, a PIL image of mode RGB.

    20 million pixels take about 20 ms.
    """
    width, height = image.size
    header = np.frombuffer(b"P6\n%d %d\n255\n" % (width, height), np.uint8)
    file = np.empty(len(header) + 3 * width * height, np.uint8)
    file[: len(header)] = header
    pixels_into(file[len(header) :], image)
    return file


def pixels_into(flat: npt.NDArray[np.uint8], image: Any) -> None:
    """Put the pixels of ``image``, a PIL image of mode RGB or L, into ``flat``, row by row."""
    width, height = image.size
    rows, place = max(1, _BAND_PIXELS // max(1, width)), 0
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(height, top + rows))).tobytes()
        flat[place : place + len(band)] = np.frombuffer(band, np.uint8)
        place += len(band)
