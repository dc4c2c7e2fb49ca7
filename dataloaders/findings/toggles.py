"""Settings that can be tried from outside, around each step, on synthetic input.

round     plain │ autocast │ matmul-precision …     blocks, interleaved, as those of the check
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from dataloaders.batches.tree import Batch
from dataloaders.findings.facts import Facts
from dataloaders.measuring.intervals import Interval, interval_of, picked

__all__ = ["TOGGLES", "gain_of", "within"]

_Result = TypeVar("_Result")


def _autocast(facts: Facts) -> AbstractContextManager[Any]:
    # Entered anew for each step: its cache of casted weights ends with it.
    return torch.autocast(facts.device, dtype=facts.half)


@contextmanager
def _autotuner(facts: Facts) -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _matmul_precision(facts: Facts) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


TOGGLES: dict[str, Callable[[Facts], AbstractContextManager[Any]]] = {
    "autocast": _autocast,
    "matmul-precision": _matmul_precision,
    "autotuner": _autotuner,
}
"""By the name of the finding whose gain each measures."""


def within(
    block: Generator[Batch, None, _Result], name: str | None, facts: Facts
) -> Generator[Batch, None, _Result]:
    """Yield the batches of ``block``, each step inside the toggle called ``name``; None: plain."""
    while True:
        try:
            batch = next(block)
        except StopIteration as end:
            result: _Result = end.value
            return result
        with TOGGLES[name](facts) if name else nullcontext():
            yield batch


def gain_of(plain: list[float], toggled: list[float]) -> Interval:
    """Return the seconds a batch that a toggle saves, from blocks side by side."""
    saved = np.array(plain) - np.array(toggled)
    return interval_of(float(saved.mean()), picked(saved, 0).mean(axis=1), len(saved))
