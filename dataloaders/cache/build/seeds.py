"""The process-wide generators: seeded by a sample's number, and whether a sample drew from them."""

from __future__ import annotations

import random

import numpy as np
import torch

_TURN = 1_000_003


def seed_for(index: int, turn: int = 0) -> int:
    """Seed torch's, NumPy's and ``random``'s generators for one reading of sample ``index``.

    A row that draws is then the same in every process and at any time. Returns the seed.
    """
    number = turn * _TURN + index + 1
    torch.default_generator.manual_seed(number)  # torch.manual_seed seeds every CUDA device too
    np.random.seed(number % 2**32)
    random.seed(number)
    return number


class DrawDetector:
    """Seeds the generators as `seed_for` does, and detects draws from them and seedings.

    NumPy's and ``random``'s generators each have a copy with the same state. A check draws two
    floats from both, 106 bits: equal states give equal bits, and other states do so with a
    probability of 2**-106. torch's state is compared whole. A check takes about 5 us for each row;
    reading NumPy's and ``random``'s whole states would take more than 50 us.
    """

    def __init__(self, index: int) -> None:
        number = seed_for(index)
        self._torch = _torch_state()
        self._numpy = np.random.RandomState(number % 2**32).random_sample
        self._python = random.Random(number).random

    def moved(self) -> tuple[str, ...]:
        """Return the names of the generators that were drawn from or seeded; empty: none was."""
        ours, numpys = np.random.random_sample, self._numpy
        same = {
            "torch": _torch_state() == self._torch,
            "NumPy": (ours(), ours()) == (numpys(), numpys()),
            "Python's random": (random.random(), random.random())
            == (self._python(), self._python()),
        }
        return tuple(name for name, is_same in same.items() if not is_same)


def _torch_state() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()
