"""Settings that can be tried from outside, around each step, on synthetic input.

round     plain │ autocast │ matmul-precision …     blocks, interleaved, as those of the check
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from dataloaders.findings.facts import Facts


def _autocast(facts: Facts) -> AbstractContextManager[Any]:
    # Entered anew for each step: its cache of casted weights ends with it.
    return torch.autocast(facts.device, dtype=facts.half)


def _autotuner(facts: Facts) -> AbstractContextManager[Any]:
    before = torch.backends.cudnn.benchmark
    return _set(lambda on: setattr(torch.backends.cudnn, "benchmark", on), True, before)


def _matmul_precision(facts: Facts) -> AbstractContextManager[Any]:
    before = torch.get_float32_matmul_precision()
    return _set(torch.set_float32_matmul_precision, "high", before)


@contextmanager
def _set(how: Callable[[Any], object], wanted: object, before: object) -> Iterator[None]:
    how(wanted)
    try:
        yield
    finally:
        how(before)


TOGGLES: dict[str, Callable[[Facts], AbstractContextManager[Any]]] = {
    "autocast": _autocast,
    "matmul-precision": _matmul_precision,
    "autotuner": _autotuner,
}
"""By the name of the finding whose gain each measures."""
