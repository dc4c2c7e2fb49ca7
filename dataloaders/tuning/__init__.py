"""Workers, prefetching and pinning, by a few measured trials.

one process ──> the step ──> workers ──> prefetch factor ──> pinning
                             doubled     if batches          with CUDA
                             while it    differ in
                             pays        time

The loader keeps its backend; which backend gains is for the check to predict and to try.

tuner.py    tune(), and one run of it: room for workers, the trials, what is said of them
search.py   what is tried and chosen: decisions on given rates
trial.py    one setting, measured: start-up, steady rate, CPU seconds, memory
variant.py  a loader like the given one with other settings, on samplers of its own
result.py   Settings, Trial, Tuning: what was tried, what was chosen and why
auto.py     what "auto" becomes: what was learned before, else a rule
learned.py  what tuning learned, on disk
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloaders.tuning.result import Progress, Settings, Trial, Tuning
    from dataloaders.tuning.tuner import tune

__all__ = ["Progress", "Settings", "Trial", "Tuning", "tune"]


def __getattr__(name: str) -> Any:
    # A loader asks what was learned, and tuning imports the loader.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "tuner" if name == "tune" else "result"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
