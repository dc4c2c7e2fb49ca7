"""Choose workers, prefetching and pinning by a few measured trials.

one process ──> the step ──> workers ──> prefetch factor ──> pinning
                             doubled     if batches          with CUDA
                             while it    differ in
                             pays        time

The loader keeps its backend; the check predicts and tries other backends.

tuner.py    runs a tuning: room for workers, the trials, the result in sentences
search.py   decides from rates which settings to try and which to choose
trial.py    measures one setting: start-up, steady rate, CPU seconds
variant.py  makes loaders with other settings, on samplers of their own
result.py   holds what was tried, what was chosen and why
auto.py     resolves "auto": a choice learned before, else a rule
learned.py  keeps learned choices on disk
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloaders.tuning.result import Progress, Trial, Tuning
    from dataloaders.tuning.tuner import tune
    from dataloaders.tuning.variant import Settings

__all__ = ["Progress", "Settings", "Trial", "Tuning", "tune"]


def __getattr__(name: str) -> Any:
    # The loader imports `auto`, and the tuner imports the loader.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "tuner" if name == "tune" else "result"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
