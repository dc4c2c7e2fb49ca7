"""What torch's default generator gives each sample of a batch, seeded sample by sample: at once.

    words (n x 4, of `philox.words`) ──> n Mersenne twisters ──> rand, uniform, randint, ...
                                             n values a call, for those samples that draw

`seeding.seed_generators` seeds torch's generator around each sample from the same words. What
torchvision's crops and flips then draw, number by number, is drawn here for all samples of a
batch: the same values to the bit, in about 2 microseconds a sample and a few a call.

torch's generator is MT19937 with Knuth's initialisation by one word, as NumPy's legacy seeding is
(Matsumoto and Nishimura, 1998); how words become numbers is ATen's ``TransformationHelper.h``.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Draws", "FreeDraws", "Normal", "Uniform", "Where"]

Where: TypeAlias = "npt.NDArray[np.bool_] | None"
"""For each sample whether it draws, or takes part; None: all do."""

_WINDOW = 64


class Draws:
    """The streams of n samples, each at its own position.

    Each method gives an array with one value a sample. With ``where``, only those samples draw:
    the values of the others mean nothing, and their streams stay where they are.

    Args:
        words: [n, 4] whole numbers below 2**32, as `seeding.philox.words` gives them and
            `seeding.seeded.seed_generators` takes them.
    """

    def __init__(self, words: npt.ArrayLike) -> None:
        self._words = np.asarray(words, np.uint64).reshape(-1, 4)
        self._rows = np.arange(len(self._words))
        # Of each stream a window is at hand; `_column` is where in its window the stream is, and
        # no column is beyond `_furthest`. While all are in one place, that is `_together`.
        self._window = np.empty((len(self._words), 0), np.uint32)
        self._begin = np.zeros(len(self._words), np.int64)
        self._apart = np.zeros(len(self._words), np.int64)
        self._together: int | None = 0
        self._furthest = 0

    def __len__(self) -> int:
        return len(self._words)

    @property
    def position(self) -> npt.NDArray[np.int64]:
        """int64 [n]: how many words each stream has given."""
        return self._begin + self._column

    def words(self, where: Where = None) -> npt.NDArray[np.uint32]:
        """uint32 [n], perhaps read-only: the next 32 bits of each stream, of which all is made."""
        self._at_hand(1)
        found: npt.NDArray[np.uint32]
        if self._together is None:
            found = self._window[self._rows, self._apart]
        else:
            found = self._window[:, self._together]
        if where is None and self._together is not None:
            self._together += 1
        else:
            self._column = self._column + (1 if where is None else where)
        self._furthest += 1
        return found

    def ahead(self, count: int) -> npt.NDArray[np.uint32]:
        """uint32 [n, count], perhaps read-only: the next words of each stream, which stays."""
        self._at_hand(count)
        found: npt.NDArray[np.uint32]
        if self._together is None:
            columns = self._apart[:, None] + np.arange(count)
            found = self._window[self._rows[:, None], columns]
        else:
            found = self._window[:, self._together : self._together + count]
        return found

    def skip(self, count: Any, where: Where = None) -> None:
        """Move the streams on by ``count`` words, a number or [n]."""
        if where is not None:
            count = np.where(where, count, 0)
        self._column = self._column + count
        self._furthest = int(self._column.max(initial=0))

    def rand(self, where: Where = None) -> npt.NDArray[np.float32]:
        """float32 [n] in [0, 1): ``torch.rand(1)``."""
        return unit(self.words(where))

    def below(self, probability: float, where: Where = None) -> npt.NDArray[np.bool_]:
        """bool [n]: ``torch.rand(1) < probability``; false for those that do not draw."""
        drawn: npt.NDArray[np.bool_] = self.rand(where) < np.float32(probability)
        return drawn if where is None else drawn & where

    def randint(self, low: Any, high: Any, where: Where = None) -> npt.NDArray[np.int64]:
        """int64 [n] from ``low`` to ``high - 1``: ``torch.randint(low, high, (1,))``.

        The bounds are numbers or [n]; at most 2**24 apart, where all versions of torch agree.
        """
        low64 = np.asarray(low, np.int64)
        width = np.maximum(np.asarray(high, np.int64) - low64, 1)
        return np.asarray(self.words(where).astype(np.int64) % width + low64)

    @property
    def _column(self) -> npt.NDArray[np.int64]:
        if self._together is not None:
            return np.full(len(self), self._together, np.int64)
        return self._apart

    @_column.setter
    def _column(self, column: npt.NDArray[np.int64]) -> None:
        self._apart, self._together = column, None

    def _at_hand(self, count: int) -> None:
        """See to it that each window has the next ``count`` words."""
        width = self._window.shape[1]
        if self._furthest + count <= width:
            return
        if not width and self._together == 0:  # the first one: all begin where their streams do
            self._window = self._following(self._rows, max(_WINDOW, count))
            self._window.flags.writeable = False
            return
        # The bound was a rough one: samples that did not draw count as if they had.
        column = self._column
        self._furthest = int(column.max(initial=0))
        if self._furthest + count <= width:
            return
        if width < count:
            window = np.empty((len(self), max(_WINDOW, count)), np.uint32)
            late = self._rows
        else:
            # A new one: `words` and `ahead` have given away parts of the old.
            window = self._window.copy()
            late = np.flatnonzero(column + count > width)
        self._begin[late] += column[late]
        column[late] = 0
        window[late] = self._following(late, window.shape[1])
        window.flags.writeable = False
        self._window = window
        self._furthest = int(column.max(initial=0))
        if len(late) == len(self):
            self._together = 0
        else:
            self._column = column

    def _following(self, samples: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.uint32]:
        """uint32 [samples, count]: the words of these streams from `_begin` on."""
        seeds, begins = self._words[samples, 0].tolist(), self._begin[samples].tolist()
        return _streams(seeds, begins, count)


class FreeDraws(Draws):
    """Numbers of the same distributions from one generator, for samples that have no seeds.

    Args:
        samples: how many.
        generator: what all of them draw from.
    """

    def __init__(self, samples: int, generator: np.random.Generator) -> None:
        super().__init__(generator.integers(0, 2**32, (samples, 4)))
        self._generator = generator

    def _following(self, samples: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.uint32]:
        return self._generator.integers(0, 2**32, (len(samples), count), np.uint32)


@dataclass(frozen=True, eq=False)
class Normal:
    """``torch.empty(shape).normal_()`` at one place of one stream.

    Attributes:
        seed: what the generator is seeded with.
        steps: how many words are passed over, and how many normal values drawn; in turn. The last
            values are the ones: of those before, torch has kept half a pair.
        shape: of the tensor.
        made: the values, where they had to be made at once.
    """

    seed: int
    steps: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    made: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """float32 of that shape."""
        if self.made is not None:
            return self.made
        generator = torch.Generator().manual_seed(self.seed)
        return _repeat(generator, self.steps).reshape(self.shape)


@dataclass(frozen=True)
class Uniform:
    """``torch.rand(shape)`` at one place of one stream.

    Attributes:
        seed: what the generator is seeded with.
        position: how many words it has given before.
        shape: of the tensor.
    """

    seed: int
    position: int
    shape: tuple[int, ...]

    def values(self) -> torch.Tensor:
        """float32 of that shape."""
        generator = torch.Generator()
        _place(generator, self.seed, self.position)
        return torch.empty(self.shape).uniform_(generator=generator)


def unit(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """float32 in [0, 1): what ``torch.rand`` makes of each word."""
    values = (words & np.uint32(0xFFFFFF)).astype(np.float32)
    return np.asarray(values * np.float32(2.0**-24), np.float32)


def between(words: npt.NDArray[np.uint32], low: Any, high: Any) -> npt.NDArray[np.float32]:
    """float32: what ``uniform_(low, high)`` makes of each word; the bounds: numbers or arrays."""
    if isinstance(low, float) and isinstance(high, float):
        return _bounds(low, high).made_of(words)
    return _Bounds(low, high).made_of(words)


class _Bounds:
    """What is the same for all words between these bounds."""

    def __init__(self, low: Any, high: Any) -> None:
        self._low, self._high = np.asarray(low, np.float32), np.asarray(high, np.float32)
        self._width = self._high - self._low
        self._low64 = np.asarray(self._low, np.float64)
        self._step = np.asarray(self._width, np.float64) * 2.0**-24
        self._fused = _fused()
        self._exact = self._fused and _exact(self._low64, self._width)
        self.turns_back = _turns_back()

    def made_of(self, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
        """float32: a number for each word."""
        if self._fused:
            # Exact: 24 bits times 24 bits.
            total = (words & np.uint32(0xFFFFFF)) * self._step
            if self._exact:
                total += self._low64
            else:
                total = _to_odd(total + self._low64, total, self._low64)
            found: npt.NDArray[np.float32] = total.astype(np.float32)
        else:
            found = np.asarray(unit(words) * self._width + self._low, np.float32)
        if self.turns_back:
            np.copyto(found, self._low, where=found == self._high)
        return found

    def reaches_its_end(self) -> bool:
        """Whether rounding gives the upper bound for the largest number below 1."""
        bounds = copy.copy(self)
        bounds.turns_back = False
        largest = bounds.made_of(np.array([0xFFFFFF], np.uint32))
        return bool(largest[0] == self._high)


@functools.lru_cache(maxsize=256)
def _bounds(low: float, high: float) -> _Bounds:
    bounds = _Bounds(low, high)
    # Rounding keeps the order: if the largest does not get there, none does.
    bounds.turns_back = bounds.turns_back and bounds.reaches_its_end()
    return bounds


@functools.cache
def _fused() -> bool:
    """Whether torch's ``uniform_`` multiplies and adds in one, with one rounding.

    Its compiler chose that where the processor has it; so ask, of values where it matters.
    """
    made, value = _made(0.08, 1.0)
    low = np.float32(0.08)
    width = np.float32(1.0) - low
    if np.array_equal(made, value * width + low):
        return False
    if np.array_equal(made, (value.astype(np.float64) * width + low).astype(np.float32)):
        return True
    raise AssertionError("torch.Tensor.uniform_ makes numbers of words in a way not known here")


@functools.cache
def _turns_back() -> bool:
    """Whether ``uniform_`` gives the lower bound where rounding gave the upper; not all torch do.

    Between these two about every second value is rounded up.
    """
    made, _ = _made(1.0, 1.0 + 2.0**-23)
    return not (made > 1.0).any()


def _made(low: float, high: float) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """64 values of ``uniform_``, and those between 0 and 1 of the same words."""
    generator = torch.Generator()
    generator.manual_seed(0)
    made: npt.NDArray[np.float32] = (
        torch.empty(64, dtype=torch.float32, device="cpu")
        .uniform_(low, high, generator=generator)
        .numpy()
    )
    return made, unit(_streams([0], [0], len(made))[0])


def _exact(low: npt.NDArray[np.float64], width: npt.NDArray[np.float32]) -> bool:
    """Whether 53 bits hold any sum of ``low`` and of ``width`` times 24 bits: of usual bounds."""
    size = np.abs(low)
    return bool(np.all((size == 0) | ((size <= 16 * width) & (size * 2.0**20 >= width))))


def _to_odd(
    total: npt.NDArray[np.float64], one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """``one + other``, whose nearest is ``total``, so rounded that rounding again does no harm.

    Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008: of the two numbers
    around an inexact sum the one whose last bit is set.
    """
    part = total - one
    lost = (one - (total - part)) + (other - part)
    even = (total.view(np.int64) & 1) == 0
    return np.where((lost != 0) & even, np.nextafter(total, np.copysign(np.inf, lost)), total)


class _Twister(threading.local):
    """NumPy's generator, one a thread: making one takes as long as seeding it seventy times."""

    def __init__(self) -> None:
        self.bits: Any = np.random.MT19937(0)


_TWISTER = _Twister()


def _streams(seeds: list[int], begins: list[int], count: int) -> npt.NDArray[np.uint32]:
    """uint32 [n, count]: the words of each stream from its beginning on."""
    if not seeds:
        return np.empty((0, count), np.uint32)
    bits = _TWISTER.bits
    seed, words = bits._legacy_seeding, bits.random_raw
    found = []
    for word, begin in zip(seeds, begins, strict=True):
        seed(word)
        if begin:
            words(begin, output=False)
        found.append(words(count))
    return np.concatenate(found).astype(np.uint32).reshape(len(seeds), count)


def _those(where: Where, size: int) -> Sequence[int]:
    return range(size) if where is None else np.flatnonzero(where).tolist()


def _place(generator: torch.Generator, seed: int, position: int) -> None:
    """``generator`` as it is when it was seeded so and has given ``position`` words."""
    generator.manual_seed(seed)
    _pass_over(generator, position)


def _pass_over(generator: torch.Generator, words: int) -> None:
    if words:
        torch.empty(words).uniform_(generator=generator)  # one word a value


def _repeat(generator: torch.Generator, steps: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The last of some normal values; the others are drawn for what torch keeps of them."""
    made = torch.empty(0)
    for words, count in steps:
        _pass_over(generator, words)
        made = torch.empty(count).normal_(generator=generator)
    return made


def _taken(generator: torch.Generator, seed: int, position: int) -> int:
    """How many words ``generator`` has given since it stood at ``position`` of this stream.

    Raises:
        RuntimeError: they are too many to look for.
    """
    state = generator.get_state()
    following = torch.empty(_TELLING).uniform_(generator=generator).numpy()
    generator.set_state(state)
    count = 2 * _WINDOW
    while count <= _FARTHEST:
        stream = unit(_streams([seed], [position], count)[0])
        for place in np.flatnonzero(stream == following[0]).tolist():
            if np.array_equal(stream[place : place + _TELLING], following):
                return int(place)
        count *= 4
    raise RuntimeError(f"more than {_FARTHEST // 4} words were drawn for one sample at once")


@functools.cache
def _words_of_a_choice(size: int) -> int:
    """How many words torch takes to choose among so many: found out, for builds differ in it."""
    generator = torch.Generator()
    _place(generator, 0, 0)
    torch.multinomial(torch.ones(size), 1, generator=generator)
    next_ones = torch.empty(8).uniform_(generator=generator).numpy()
    stream = unit(_streams([0], [0], 4 * size + 64)[0])
    for taken in range(len(stream) - len(next_ones)):
        if np.array_equal(stream[taken : taken + len(next_ones)], next_ones):
            return taken
    raise AssertionError(f"torch.multinomial among {size} takes words in a way not known here")
