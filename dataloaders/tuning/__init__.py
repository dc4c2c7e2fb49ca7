"""Choose workers, prefetching and pinning by a few measured trials.

one process ──> the step ──> workers ──> prefetch factor ──> pinning
                             doubled     if batches          with CUDA
                             while it    differ in
                             pays        time

The loader keeps its backend; the check predicts and tries other backends.

tuner.py    tune(), and one run of it: room for workers, the trials, the result in sentences
search.py   which settings are tried, and which is chosen: decisions on given rates
trial.py    measures one setting: start-up, steady rate, CPU seconds, memory
variant.py  a loader like the given one with other settings, on samplers of its own
result.py   Settings, Trial, Tuning: what was tried, what was chosen and why
auto.py     the values that stand for "auto": learned before, else by a rule
learned.py  learned choices, on disk
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloaders.tuning.result import Progress, Settings, Trial, Tuning
    from dataloaders.tuning.tuner import tune

__all__ = ["Progress", "Settings", "Trial", "Tuning", "tune"]


def __getattr__(name: str) -> Any:
    # The loader imports `auto`, and the tuner imports the loader.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "tuner" if name == "tune" else "result"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
