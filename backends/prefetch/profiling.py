"""Names for the stages of prefetching in torch.profiler: ``dataloaders: take``, ``copy``, ..."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

_NOTHING = nullcontext()


def stage(name: str) -> AbstractContextManager[Any]:
    """Mark what runs inside, if somebody profiles."""
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"dataloaders: {name}")
    return _NOTHING
