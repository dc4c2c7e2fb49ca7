"""Draw for a whole batch what torch's generator gives when it is seeded for each sample.

    words (n x 4, of `seeding.words`) ──> n Mersenne twisters ──> rand, randint

`seeding.seed_generators` seeds torch's generator with the same words before each sample. The
numbers here are, to the bit, those that torchvision's crops and flips then draw.

torch's generator is MT19937 with Knuth's initialisation by one word, and so is NumPy's legacy
seeding (Matsumoto and Nishimura, 1998). ATen's ``TransformationHelper.h`` makes numbers of words.
"""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Draws", "FreeDraws"]

_Words: TypeAlias = npt.NDArray[np.uint32]
_Mask: TypeAlias = npt.NDArray[np.bool_]

_AT_ONCE = 64  # words of each stream that are made at a time


class Draws:
    """The streams of n samples, each at its own position.

    Each method returns an array of one value a sample.

    Args:
        words: [n, 4] integers below 2**32, as `seeding.words.words` gives them and
            `seeding.seeded.seed_generators` takes them.
    """

    def __init__(self, words: npt.ArrayLike) -> None:
        self._seeds = np.asarray(words, np.uint64).reshape(-1, 4)[:, 0]
        self._known = np.empty((len(self._seeds), 0), np.uint32)
        self._position = np.zeros(len(self._seeds), np.int64)

    def rand(self) -> npt.NDArray[np.float32]:
        """Return float32 [n] in [0, 1): ``torch.rand(1)``."""
        values = (self._next(True) & np.uint32(0xFFFFFF)).astype(np.float32)
        return np.asarray(values * np.float32(2.0**-24), np.float32)

    def below(self, probability: float) -> _Mask:
        """Return bool [n]: ``torch.rand(1) < probability``."""
        return np.asarray(self.rand() < np.float32(probability))

    def randint(self, high: npt.NDArray[np.int64], where: _Mask) -> npt.NDArray[np.int64]:
        """Return int64 [n]: ``torch.randint(0, high, (1,))`` ``where`` that is True, else 0.

        ``high`` is [n], at most 2**24, where all versions of torch agree. Samples that get 0 draw
        nothing.
        """
        drawn = self._next(where).astype(np.int64) % np.maximum(high, 1)
        return np.where(where, drawn, 0)

    def _next(self, where: _Mask | bool) -> _Words:
        """Return the next word of each stream; streams that are not ``where`` stay there."""
        if self._position.max(initial=0) >= self._known.shape[1]:
            self._known = self._streams(self._known.shape[1] + _AT_ONCE)
        words: _Words = self._known[np.arange(len(self._seeds)), self._position]
        self._position = self._position + where
        return words

    def _streams(self, length: int) -> _Words:
        """Return the first ``length`` words of all streams, uint32 [n, length]."""
        bits = _TWISTER.bits
        made = np.empty((len(self._seeds), length), np.uint32)
        for row, seed in zip(made, self._seeds.tolist(), strict=True):
            bits._legacy_seeding(seed)
            row[:] = bits.random_raw(length)
        return made


class FreeDraws(Draws):
    """Numbers of the same distributions, for samples without seeds.

    Args:
        samples: how many.
        key: seeds the one generator that all of them draw from: two integers below 2**64.
    """

    def __init__(self, samples: int, key: tuple[int, int]) -> None:
        super().__init__(np.zeros((samples, 4), np.uint64))
        self._key = np.array(key, np.uint64)

    def _streams(self, length: int) -> _Words:
        generator = np.random.Generator(np.random.Philox(key=self._key))
        words: _Words = generator.integers(0, 2**32, (length, len(self._seeds)), np.uint32).T
        return words


class _Twister(threading.local):
    """One generator a thread: making one takes as long as seeding it seventy times."""

    def __init__(self) -> None:
        self.bits: Any = np.random.MT19937(0)


_TWISTER = _Twister()
