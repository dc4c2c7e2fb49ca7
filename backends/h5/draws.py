"""Draw for a whole batch what torchvision's crops and flips draw, sample by sample.

    words (n x 4, of `seeding.words`) ──> n generators of torch ──> randint, below: one value each
    without seeds                     ──> one generator of NumPy ─┘

`seeding.seed_generators` seeds torch's generator with the same words before each sample, so that
these are the numbers that torchvision then draws.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Draws", "FreeDraws"]

_Ints: TypeAlias = npt.NDArray[np.int64]
_Mask: TypeAlias = npt.NDArray[np.bool_]


class Draws:
    """The streams of n samples, each at its own position.

    Args:
        words: [n, 4] integers below 2**32, as `seeding.words.words` gives them and
            `seeding.seeded.seed_generators` takes them.
    """

    def __init__(self, words: npt.ArrayLike) -> None:
        self._seeds = np.asarray(words, np.int64).reshape(-1, 4)[:, 0].tolist()

    @cached_property
    def _generators(self) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in self._seeds]

    def below(self, probability: float) -> _Mask:
        """Return bool [n]: ``torch.rand(1) < probability``."""
        drawn = torch.empty(len(self._seeds), device="cpu")
        for place, generator in zip(drawn.unsqueeze(1).unbind(), self._generators, strict=True):
            place.uniform_(generator=generator)  # as rand does, and several times as fast
        return (drawn < probability).numpy()

    def randint(self, high: _Ints, where: _Mask) -> _Ints:
        """Return int64 [n]: ``torch.randint(0, high, (1,))`` ``where`` that is True, else 0.

        ``high`` is [n]. Samples that get 0 draw nothing.
        """
        drawn = torch.zeros(len(self._seeds), dtype=torch.int64, device="cpu")
        places, most = drawn.unsqueeze(1).unbind(), high.tolist()
        for number in np.flatnonzero(where).tolist():
            places[number].random_(most[number], generator=self._generators[number])
        return drawn.numpy()


class FreeDraws(Draws):
    """Numbers of the same distributions, for samples without seeds.

    Args:
        samples: how many.
        key: seeds the one generator that all of them draw from: two integers below 2**64.
    """

    def __init__(self, samples: int, key: tuple[int, int]) -> None:
        self._samples = samples
        self._generator = np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))

    def below(self, probability: float) -> _Mask:
        """See `Draws`."""
        return self._generator.random(self._samples, np.float32) < probability

    def randint(self, high: _Ints, where: _Mask) -> _Ints:
        """See `Draws`."""
        return np.where(where, self._generator.integers(0, np.maximum(high, 1)), 0)
