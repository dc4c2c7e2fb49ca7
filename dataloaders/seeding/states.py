"""Restore the process-wide random states after a trial, a proof or a measurement."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["random_states_kept"]


@contextmanager
def random_states_kept(*generators: torch.Generator | None, cuda: bool = True) -> Iterator[None]:
    """Restore torch's, NumPy's and ``random``'s states on leaving the context.

    Args:
        generators: further generators to restore, such as a loader's own; None is skipped.
        cuda: also restore the CUDA devices' generators, if CUDA is in use (waits for the devices).
    """
    states = [(torch.default_generator, torch.default_generator.get_state())]
    states += [(own, own.get_state()) for own in generators if own is not None]
    in_use = cuda and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_cuda = torch.cuda.get_rng_state_all() if in_use else None
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        if on_cuda is not None:
            torch.cuda.set_rng_state_all(on_cuda)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
