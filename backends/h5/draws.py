"""Draw for a whole batch what torch's generator gives when it is seeded for each sample.

    words (n x 4, of `philox.words`) ──> n Mersenne twisters ──> rand, randint

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

_AT_ONCE = 64  # words of a stream that are made at a time


class Draws:
    """The streams of n samples, each at its own position.

    Each method returns an array of one value a sample.

    Args:
        words: [n, 4] integers below 2**32, as `seeding.philox.words` gives them and
            `seeding.seeded.seed_generators` takes them.
    """

    def __init__(self, words: npt.ArrayLike) -> None:
        self._seeds = np.asarray(words, np.uint64).reshape(-1, 4)[:, 0]
        self._rows = np.arange(len(self._seeds))
        self._window = np.empty((len(self._seeds), 0), np.uint32)
        self._position = np.zeros(len(self._seeds), np.int64)

    def rand(self) -> npt.NDArray[np.float32]:
        """Return float32 [n] in [0, 1): ``torch.rand(1)``."""
        values = (self._words(True) & np.uint32(0xFFFFFF)).astype(np.float32)
        return np.asarray(values * np.float32(2.0**-24), np.float32)

    def below(self, probability: float) -> _Mask:
        """Return bool [n]: ``torch.rand(1) < probability``."""
        return np.asarray(self.rand() < np.float32(probability))

    def randint(self, high: npt.NDArray[np.int64], where: _Mask) -> npt.NDArray[np.int64]:
        """Return int64 [n]: ``torch.randint(0, high, (1,))`` ``where`` that is True, else 0.

        ``high`` is [n], at most 2**24, where all versions of torch agree. Samples that get 0 draw
        nothing.
        """
        drawn = self._words(where).astype(np.int64) % np.maximum(high, 1)
        return np.where(where, drawn, 0)

    def _words(self, where: _Mask | bool) -> _Words:
        known = self._window.shape[1]
        if self._position.max(initial=0) >= known:
            self._window = np.concatenate([self._window, self._following(known)], axis=1)
        words: _Words = self._window[self._rows, self._position]
        self._position = self._position + where
        return words

    def _following(self, begin: int) -> _Words:
        """Return the words from number ``begin`` on of all streams, uint32 [n, `_AT_ONCE`]."""
        bits = _TWISTER.bits
        found = np.empty((len(self._seeds), _AT_ONCE), np.uint32)
        for row, seed in zip(found, self._seeds.tolist(), strict=True):
            bits._legacy_seeding(seed)
            if begin:
                bits.random_raw(begin, output=False)
            row[:] = bits.random_raw(_AT_ONCE)
        return found


class FreeDraws(Draws):
    """Numbers of the same distributions from one generator, for samples without seeds.

    Args:
        samples: how many.
        generator: all of them draw from it.
    """

    def __init__(self, samples: int, generator: np.random.Generator) -> None:
        super().__init__(np.zeros((samples, 4), np.uint64))
        self._generator = generator

    def _following(self, begin: int) -> _Words:
        shape = (len(self._seeds), _AT_ONCE)
        return self._generator.integers(0, 2**32, shape, np.uint32)


class _Twister(threading.local):
    """One generator a thread: making one takes as long as seeding it seventy times."""

    def __init__(self) -> None:
        self.bits: Any = np.random.MT19937(0)


_TWISTER = _Twister()
