"""Workers, prefetching and pinning, by a few measured trials.

one process ──> what a batch costs, and how much of that is CPU work
    │           (with a step: what the step needs)
    ▼
predicted knee ──> its neighbours ──> prefetch factor ──> pinning ──> Tuning
                   until < 3 % to gain   if batches      with CUDA
                                         vary in time

a step that computes on the cores the workers need: fewer threads for it, and workers again

a backend's own options (threads and depth of dali): each from the present one, coarse to fine

run.py       tune(): its arguments, checked, and its promises
search.py    which settings are tried, in which order, and when that ends
model.py     what a few measurements say about settings that were not tried
capacity.py  how many workers memory and shared memory have room for
attempts.py  the trials of one run, within the time there is, and what they saw
trial.py     one setting, measured: start-up, steady rate, memory
usage.py     CPU seconds and memory of this process and its workers
device.py    the accelerator, waited for without bringing it up
variant.py   a loader like the given one with other settings, on samplers of its own
climb.py     one option's numbers, coarse to fine
choice.py    which of the tried settings suffices
words.py     the sentences of a result
auto.py      what "auto" becomes: what was learned before, else a rule
learned.py   what tuning learned, on disk
result.py    Settings, Trial, Tuning: what was tried, what was chosen and why
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataloaders.tuning.result import Progress, Settings, Trial, Tuning
    from dataloaders.tuning.run import tune

__all__ = ["Progress", "Settings", "Trial", "Tuning", "tune"]


def __getattr__(name: str) -> Any:
    # A loader asks what was learned: it must not load psutil for that.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "run" if name == "tune" else "result"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
