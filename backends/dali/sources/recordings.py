"""Samples whose images have not gone through their chain, one by one and packed as a batch.

Recorded, Recorded, ... ──of, in a worker──> Recordings ──> images, Draws, samples
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from dataloaders.transforms.draws import Draws

__all__ = ["Placeholder", "Recorded", "Recordings"]


class Placeholder:
    """What stands in a sample for the image that a graph is yet to make."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Placeholder()"


class Recorded(NamedTuple):
    """One sample whose image has not gone through the chain.

    Attributes:
        sample: with a `Placeholder` for the image.
        pixels: uint8 [height, width, channels].
        stream: what torch's generator was seeded with last, and how many words it had given, if
            the dataset moved it before the chain; else None. (Nor is it known, nor needed, where
            the dataset draws from a generator that was not seeded for this sample.)
        python: the state of the module ``random``, if the dataset moved it; else None.
    """

    sample: Any
    pixels: npt.NDArray[np.uint8]
    stream: tuple[int, int] | None
    python: Any


class Recordings(NamedTuple):
    """The samples of one batch, fit to be sent by a worker.

    Attributes:
        samples: n of them, each with a `Placeholder` for its image.
        pixels: uint8, those of all images, one behind the other; in shared memory from a worker.
        shapes: (height, width, channels) of each.
        streams, pythons: by place in the batch; see `Recorded`.
    """

    samples: list[Any]
    pixels: torch.Tensor
    shapes: list[tuple[int, ...]]
    streams: dict[int, tuple[int, int]]
    pythons: dict[int, Any]

    @classmethod
    def of(cls, samples: Sequence[Recorded]) -> Recordings:
        """These, packed; to be called where they were made, as a collate_fn is."""
        ends = np.cumsum([0, *(each.pixels.size for each in samples)]).tolist()
        flat = torch.empty(0, dtype=torch.uint8)
        if (
            ends[-1] and get_worker_info() is not None
        ):  # straight into what is sent, as torch collates there
            whole = flat._typed_storage()  # type: ignore[no-untyped-call]
            flat = flat.new(whole._new_shared(ends[-1], device=flat.device))
        flat = flat.resize_(ends[-1])
        array = flat.numpy()
        for each, first, last in zip(samples, ends, ends[1:], strict=False):
            array[first:last] = each.pixels.reshape(-1)
        numbered = list(enumerate(samples))
        return cls(
            [each.sample for each in samples],
            flat,
            [each.pixels.shape for each in samples],
            {n: each.stream for n, each in numbered if each.stream is not None},
            {n: each.python for n, each in numbered if each.python is not None},
        )

    @property
    def images(self) -> list[npt.NDArray[np.uint8]]:
        """uint8 [height, width, channels] each: views of ``pixels``."""
        found, place, flat = [], 0, self.pixels.numpy()
        for shape in self.shapes:
            size = int(np.prod(shape))
            found.append(flat[place : place + size].reshape(shape))
            place += size
        return found

    def draws(self, words: npt.ArrayLike) -> Draws:
        """The streams as the chain finds them, of samples that were seeded with these words."""
        words, skipped = np.array(words, np.uint64), np.zeros(len(self.samples), np.int64)
        for number, (seed, given) in self.streams.items():
            words[number, 0], skipped[number] = seed, given
        draws = Draws(words)
        if self.streams:
            draws.skip(skipped)
        for number, state in self.pythons.items():
            draws.python(number).setstate(state)
        return draws
