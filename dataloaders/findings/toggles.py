"""Settings that can be tried from outside, around each step, on synthetic input.

round     plain │ autocast │ matmul-precision …     blocks, interleaved, as those of the check
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from dataloaders.findings.facts import Facts


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
    # Entered anew for each step: its cache of casted weights ends with it.
    "autocast": lambda facts: torch.autocast(facts.device, dtype=facts.half),
    "matmul-precision": _matmul_precision,
    "autotuner": _autotuner,
}
"""By the name of the finding whose gain each measures."""
