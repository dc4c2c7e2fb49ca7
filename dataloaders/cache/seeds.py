"""The process-wide generators as a function of a sample's number.

A row is then the same in whatever process it is made, and whenever: also where a dataset draws
random numbers and is cached all the same.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["draws_since", "seed_for", "states"]

_TURN = 1_000_003

States = tuple[bytes, tuple[Any, ...], object]


def seed_for(index: int, turn: int = 0) -> None:
    """Seed torch's, NumPy's and ``random``'s generators for one reading of sample ``index``."""
    number = turn * _TURN + index + 1
    torch.default_generator.manual_seed(number)  # torch.manual_seed seeds every CUDA device too
    np.random.seed(number % 2**32)
    random.seed(number)


def states() -> States:
    """The states of the three generators, to be compared."""
    of_numpy: Any = np.random.get_state()
    return (
        torch.default_generator.get_state().numpy().tobytes(),
        (of_numpy[1].tobytes(), *of_numpy[2:]),
        random.getstate(),
    )


def draws_since(before: States) -> bool:
    """Whether one of them has been drawn from since."""
    return states() != before
