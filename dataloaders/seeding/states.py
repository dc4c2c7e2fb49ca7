"""Save and restore the states of the process-wide random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def states_now() -> tuple[Any, Any, Any]:
    """Return the states of torch's, NumPy's and ``random``'s generators, cheap to send."""
    torchs = torch.default_generator.get_state().numpy().tobytes()
    return torchs, np.random.get_state(), random.getstate()


def restore(states: tuple[Any, Any, Any]) -> None:
    """Put back what `states_now` returned."""
    torchs = torch.frombuffer(bytearray(states[0]), dtype=torch.uint8)
    torch.default_generator.set_state(torchs)
    np.random.set_state(states[1])
    random.setstate(states[2])


@contextmanager
def random_states_kept(*generators: torch.Generator | None, cuda: bool = True) -> Iterator[None]:
    """Restore torch's, NumPy's and ``random``'s states on leaving the context.

    Args:
        generators: further generators to restore, such as a loader's own; None is skipped.
        cuda: also restore the CUDA devices' generators, if CUDA is in use (waits for the devices).
    """
    before = states_now()
    own = [(each, each.get_state()) for each in generators if each is not None]
    in_use = cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_cuda = torch.cuda.get_rng_state_all() if in_use else None
    try:
        yield
    finally:
        restore(before)
        for generator, state in own:
            generator.set_state(state)
        if on_cuda is not None:
            torch.cuda.set_rng_state_all(on_cuda)
