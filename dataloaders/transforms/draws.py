"""Draw for all samples of a batch at once what torch's generator, seeded sample by sample, gives.

    words (n x 4, of `philox.words`) ──> n Mersenne twisters ──> rand, uniform, randint

`seeding.seed_generators` seeds torch's generator before each sample with the same words. The values
here equal to the bit what torchvision's crops and flips then draw, number by number.

torch's generator is MT19937 with Knuth's initialisation by one word, as NumPy's legacy seeding is
(Matsumoto and Nishimura, 1998); how words become numbers is ATen's ``TransformationHelper.h``.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Draws", "FreeDraws", "Where", "between"]

Where: TypeAlias = "npt.NDArray[np.bool_] | None"
"""A mask of the samples that draw, or to which something is done; None: all."""

_Words: TypeAlias = npt.NDArray[np.uint32]
_Floats: TypeAlias = npt.NDArray[np.float32]

_WINDOW = 64


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
        self.position = np.zeros(len(self._seeds), np.int64)

    def __len__(self) -> int:
        return len(self._seeds)

    def ahead(self, count: int) -> _Words:
        """Return the next words of each stream, uint32 [n, count], without drawing them."""
        known = self._window.shape[1]
        lacking = int(self.position.max(initial=0)) + count - known
        if lacking > 0:
            more = self._following(known, max(_WINDOW, lacking))
            self._window = np.concatenate([self._window, more], axis=1)
        columns = self.position[:, None] + np.arange(count)
        return np.asarray(self._window[self._rows[:, None], columns])

    def skip(self, counts: npt.NDArray[np.int64]) -> None:
        """Advance the streams by ``counts`` words, [n]."""
        self.position = self.position + counts

    def rand(self) -> _Floats:
        """Return float32 [n] in [0, 1): ``torch.rand(1)``."""
        return _unit(self._words(None))

    def below(self, probability: float) -> npt.NDArray[np.bool_]:
        """Return bool [n]: ``torch.rand(1) < probability``."""
        return np.asarray(self.rand() < np.float32(probability))

    def randint(self, high: npt.NDArray[np.int64], where: Where = None) -> npt.NDArray[np.int64]:
        """Return int64 [n]: ``torch.randint(0, high, (1,))`` for those samples.

        ``high`` is [n]; at most 2**24, where all versions of torch agree. The other samples draw
        nothing, and their values mean nothing.
        """
        return np.asarray(self._words(where).astype(np.int64) % np.maximum(high, 1))

    def _words(self, where: Where) -> _Words:
        words: _Words = self.ahead(1)[:, 0]
        self.position = self.position + (1 if where is None else where)
        return words

    def _following(self, begin: int, count: int) -> _Words:
        """Return the words ``begin`` to ``begin + count`` of all streams, uint32 [n, count]."""
        bits = _TWISTER.bits
        found = np.empty((len(self), count), np.uint32)
        for row, seed in zip(found, self._seeds.tolist(), strict=True):
            bits._legacy_seeding(seed)
            if begin:
                bits.random_raw(begin, output=False)
            row[:] = bits.random_raw(count)
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

    def _following(self, begin: int, count: int) -> _Words:
        return self._generator.integers(0, 2**32, (len(self), count), np.uint32)


def between(words: _Words, low: float, high: float) -> _Floats:
    """Return what ``uniform_(low, high)`` makes of each word."""
    low32, high32 = np.float32(low), np.float32(high)
    width = np.float32(high32 - low32)
    if _fused():
        low64 = np.float64(low32)
        product = (words & np.uint32(0xFFFFFF)) * (np.float64(width) * 2.0**-24)  # exact
        found = _to_odd(product, low64).astype(np.float32)
    else:
        found = np.asarray(_unit(words) * width + low32, np.float32)
    if _turns_back():
        np.copyto(found, low32, where=found == high32)
    return found


def _unit(words: _Words) -> _Floats:
    """Return what ``torch.rand`` makes of each word: float32 in [0, 1)."""
    values = (words & np.uint32(0xFFFFFF)).astype(np.float32)
    return np.asarray(values * np.float32(2.0**-24), np.float32)


@functools.cache
def _fused() -> bool:
    """Return whether torch's ``uniform_`` multiplies and adds with one rounding.

    Its compiler does so if the processor can; so try it on values that tell.
    """
    low, value = np.float32(0.08), _unit(Draws([[0, 0, 0, 0]]).ahead(64)[0])
    width = np.float32(1.0) - low
    made = _made(0.08, 1.0)
    if np.array_equal(made, value * width + low):
        return False
    if np.array_equal(made, (value.astype(np.float64) * width + low).astype(np.float32)):
        return True
    raise AssertionError("torch.Tensor.uniform_ makes numbers of words in a way not known here")


@functools.cache
def _turns_back() -> bool:
    """Return whether ``uniform_`` gives the lower bound if rounding gave the upper one.

    Not all versions of torch do. Between these two about every second value is rounded up.
    """
    return not (_made(1.0, 1.0 + 2.0**-23) > 1.0).any()


def _made(low: float, high: float) -> _Floats:
    """Return 64 values of ``uniform_`` after seeding with 0."""
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(64, dtype=torch.float32, device="cpu")
    return np.asarray(values.uniform_(low, high, generator=generator).numpy())


def _to_odd(one: npt.NDArray[np.float64], other: np.float64) -> npt.NDArray[np.float64]:
    """Return ``one + other``, rounded such that rounding it again does no harm.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008: of the two numbers
    around an inexact sum the one whose last bit is set.
    """
    total = one + other
    part = total - one
    lost = (one - (total - part)) + (other - part)
    even = (total.view(np.int64) & 1) == 0
    return np.where((lost != 0) & even, np.nextafter(total, np.copysign(np.inf, lost)), total)


class _Twister(threading.local):
    """NumPy's generator, one a thread: making one takes as long as seeding it seventy times."""

    def __init__(self) -> None:
        self.bits: Any = np.random.MT19937(0)


_TWISTER = _Twister()
