"""Rectangles of random area and shape, tried up to ten times: RandomResizedCrop, RandomErasing.

words ahead  a0 r0 a1 r1 a2 r2 ...      area and shape of each attempt
                   └ the first that fits: top and left are the two words after it
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.transforms.draws import Draws, Where, between

from .options import range_of

__all__ = ["Rectangles", "Tried"]

ATTEMPTS = 10
_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


class Rectangles:
    """What ``transform.scale`` and ``transform.ratio`` allow.

    Attributes:
        ratio: as given.
    """

    def __init__(self, transform: Any) -> None:
        self._scale = range_of(transform.scale, "scale", 0.0)
        range_of(transform.ratio, "ratio", 0.0, above=True)
        self.ratio: Any = tuple(transform.ratio)
        # In float32, as torchvision takes it.
        self._log_ratio = torch.log(torch.tensor(transform.ratio)).numpy().tolist()

    def tried(self, draws: Draws, area: _Ints) -> Tried:
        """All attempts on images of ``area`` pixels, int64 [n]; no word is taken yet."""
        words = draws.ahead(2 * ATTEMPTS + 2)
        scale = between(words[:, 0 : 2 * ATTEMPTS : 2], *self._scale)
        logarithm = between(words[:, 1 : 2 * ATTEMPTS : 2], *self._log_ratio)
        shape = torch.exp(torch.from_numpy(logarithm)).numpy().astype(np.float64)
        target = area.astype(np.float64)[:, None] * scale
        return Tried(words, _side(target * shape), _side(target / shape))


class Tried:
    """The attempts on each of n images.

    Attributes:
        long: the square root of area times shape, int64 [n, attempts].
        short: that of area divided by shape.
    """

    def __init__(self, words: npt.NDArray[np.uint32], long: _Ints, short: _Ints) -> None:
        self._words = words
        self._rows = np.arange(len(words))
        self._found = np.zeros(len(words), np.bool_)
        self._next = np.zeros(len(words), np.int64)
        self.long = long
        self.short = short

    def first(self, fits: _Bools, *sides: _Ints) -> tuple[_Bools, list[_Ints]]:
        """Whether one fits, bool [n], and of the first that does these sides, [n] each."""
        attempt = fits.argmax(axis=1)
        self._found = fits[self._rows, attempt]
        self._next = np.where(self._found, 2 * attempt + 2, 2 * ATTEMPTS)
        return self._found, [side[self._rows, attempt] for side in sides]

    @property
    def attempted(self) -> _Ints:
        """How many words the attempts took, int64 [n]."""
        return self._next

    def below(self, offset: int, bound: _Ints) -> _Ints:
        """``torch.randint(0, bound, (1,))`` by the word of this offset after the attempts."""
        columns = np.minimum(self._next + offset, self._words.shape[1] - 1)
        word = self._words[self._rows, columns].astype(np.int64)
        return np.asarray(word % np.maximum(bound, 1))

    def take(self, draws: Draws, where: Where) -> None:
        """Take the words of the attempts, and the two after them where one fits."""
        draws.skip(self._next + 2 * self._found, where)


def _side(squared: npt.NDArray[np.float64]) -> _Ints:
    return np.rint(np.sqrt(squared)).astype(np.int64)
