"""What torch's default generator gives each sample of a batch, seeded sample by sample: at once.

    words (n x 4, of `randomness.words`) ──> n Mersenne twisters ──> rand, uniform, randint, ...
                                             n values a call, for those samples that draw

`seeding.seed_generators` seeds torch's and Python's generators around each sample from the same
words. What torchvision then draws, number by number, is drawn here for all samples of a batch:
the same values to the bit, in about 2 microseconds a sample and a few a call.

torch's generator is MT19937 with Knuth's initialisation by one word, as NumPy's legacy seeding is
(Matsumoto and Nishimura, 1998); how words become numbers is ATen's ``TransformationHelper.h``.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Draws", "Where"]

Where: TypeAlias = "npt.NDArray[np.bool_] | None"
"""For each sample whether it draws, or takes part; None: all do."""

_FIRST_LENGTH = 64


class Draws:
    """The streams of n samples, each at its own position.

    Each method gives an array with one value a sample. With ``where``, only those samples draw:
    the values of the others mean nothing, and their streams stay where they are.

    Args:
        words: [n, 4] whole numbers below 2**32, as `dataloaders.randomness.words` gives them and
            `dataloaders.seeding.seed_generators` takes them.
    """

    def __init__(self, words: npt.ArrayLike) -> None:
        self._words = np.asarray(words, np.uint64).reshape(-1, 4)
        self._rows = np.arange(len(self._words))
        self._position = np.zeros(len(self._words), np.int64)
        self._stream = np.empty((len(self._words), 0), np.uint32)
        self._pythons: dict[int, random.Random] = {}

    def __len__(self) -> int:
        return len(self._words)

    def words(self, where: Where = None) -> npt.NDArray[np.uint32]:
        """uint32 [n]: the next 32 bits of each stream, which all else is made of."""
        if len(self) and self._position.max() >= self._stream.shape[1]:
            self._extend()
        found = self._stream[self._rows, self._position]
        self._position += 1 if where is None else where
        return found

    def rand(self, where: Where = None) -> npt.NDArray[np.float32]:
        """float32 [n] in [0, 1): ``torch.rand(1)``."""
        values = (self.words(where) & np.uint32(0xFFFFFF)).astype(np.float32)
        return np.asarray(values * np.float32(2.0**-24), np.float32)

    def below(self, probability: float, where: Where = None) -> npt.NDArray[np.bool_]:
        """bool [n]: ``torch.rand(1) < probability``; false for those that do not draw."""
        drawn: npt.NDArray[np.bool_] = self.rand(where) < np.float32(probability)
        return drawn if where is None else drawn & where

    def uniform(self, low: Any, high: Any, where: Where = None) -> npt.NDArray[np.float32]:
        """float32 [n]: ``torch.empty(1).uniform_(low, high)``; the bounds: numbers or [n]."""
        low32 = np.asarray(low, np.float32)
        width = np.asarray(high, np.float32) - low32
        return np.asarray(self.rand(where) * width + low32, np.float32)

    def randint(self, low: Any, high: Any, where: Where = None) -> npt.NDArray[np.int64]:
        """int64 [n] from ``low`` to ``high - 1``: ``torch.randint(low, high, (1,))``.

        The bounds are numbers or [n]; at most 2**24 apart, where all versions of torch agree.
        """
        low64 = np.asarray(low, np.int64)
        width = np.maximum(np.asarray(high, np.int64) - low64, 1)
        return np.asarray(self.words(where).astype(np.int64) % width + low64)

    def randperm(self, size: int, where: Where = None) -> npt.NDArray[np.int64]:
        """int64 [n, size]: ``torch.randperm(size)``."""
        found = np.tile(np.arange(size), (len(self), 1))
        for place in range(size - 1):
            other = place + self.words(where).astype(np.int64) % (size - place)
            here, there = found[:, place].copy(), found[self._rows, other]
            found[:, place], found[self._rows, other] = there, here
        return found

    def python(self, sample: int) -> random.Random:
        """What stands for the module ``random`` around this sample; it goes on where it was."""
        if sample not in self._pythons:
            low, high = (int(word) for word in self._words[sample, 2:])
            self._pythons[sample] = random.Random(low | high << 32)
        return self._pythons[sample]

    def left(self, sample: int) -> tuple[int, random.Random | None]:
        """How many words this sample's stream has given; and its ``random``, if that was used."""
        return int(self._position[sample]), self._pythons.get(sample)

    def _extend(self) -> None:
        length = max(_FIRST_LENGTH, 2 * self._stream.shape[1])
        self._stream = np.empty((len(self), length), np.uint32)
        bits: Any = np.random.MT19937(0)
        for row, word in enumerate(self._words[:, 0].tolist()):
            bits._legacy_seeding(word)
            self._stream[row] = bits.random_raw(length)
