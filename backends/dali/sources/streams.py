"""Where torch's and Python's generators have come to, told so that a batch's draws can begin there.

seeded ──the dataset's own draws──> here ──> (seed, words given) ──> Draws.skip
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from dataloaders.errors import BackendUnavailable

__all__ = ["all_states", "moved", "put_back", "same_states", "states"]

_BLOCK = 624  # words of a Mersenne twister's state
_MOST_BLOCKS = 1 << 12


def states() -> tuple[Any, ...]:
    """Those that operators draw from."""
    return torch.default_generator.get_state(), random.getstate()


def all_states() -> tuple[Any, ...]:
    """Those, and NumPy's."""
    return *states(), np.random.get_state()


def put_back(states: tuple[Any, ...]) -> None:
    """Have the generators go on from what `all_states` gave."""
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def same_states(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether nothing was drawn between two calls of `all_states`."""
    numpys = zip(one[2], other[2], strict=True)
    return (
        torch.equal(one[0], other[0])
        and one[1] == other[1]
        and all(np.array_equal(a, b) for a, b in numpys)
    )


def moved(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[tuple[int, int] | None, Any]:
    """Where torch's and Python's generators have come to; None for what has not moved."""
    stream = None
    if not torch.equal(before[0], after[0]) and (
        _is_fresh(before[0]) or _seed(before[0]) != _seed(after[0])
    ):
        stream = _stream(after[0])
    return stream, None if before[1] == after[1] else after[1]


def _is_fresh(state: torch.Tensor) -> bool:
    """Whether torch's generator was seeded and has given nothing, as it is under ``seed=``."""
    numbers = state.numpy()
    return bool(numbers[8] == 1 and not numbers[16:24].any())


def _seed(state: torch.Tensor) -> int:
    return int(state.numpy()[:4].view(np.uint32)[0])


def _stream(state: torch.Tensor) -> tuple[int, int]:
    """What torch's generator in this state was seeded with, and how many words it has given.

    The state is ATen's ``CPUGeneratorImplStateLegacy``: the seed, how many words of the block are
    left (1: none), a flag, how many are given, and the block.

    Raises:
        BackendUnavailable: it has not come there from its seed.
    """
    numbers, seed = state.numpy(), _seed(state)
    given = int(numbers[16:24].view(np.uint64)[0])
    block = numbers[24 : 24 + 8 * _BLOCK].view(np.uint64).astype(np.uint32)
    bits: Any = np.random.MT19937(0)
    bits._legacy_seeding(seed)
    for number in range(_MOST_BLOCKS):
        if np.array_equal(bits.state["state"]["key"], block):
            return seed, (number - 1) * _BLOCK + given if number else 0
        bits.random_raw(_BLOCK if number else 1, output=False)  # which makes the next block
    raise BackendUnavailable(
        "the dataset's own code set the state of torch's generator to one that is not known; seed "
        "it instead, or use a generator of its own"
    )
