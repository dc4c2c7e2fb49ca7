"""Names for the stages of prefetching, in torch.profiler and in Nsight Systems.

``dataloaders: take``, ``copy`` and ``normalise`` are on the prefetch thread, ``wait`` is on the
consumer's. Unless somebody profiles, nothing is recorded and next to no time is spent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.autograd import profiler

__all__ = ["stage"]

_NOTHING = nullcontext()


def stage(name: str) -> AbstractContextManager[None]:
    """Mark what runs inside as ``dataloaders: name``."""
    if profiler._is_profiler_enabled or _cuda_is_used():
        return _range(f"dataloaders: {name}")
    return _NOTHING


@contextmanager
def _range(name: str) -> Iterator[None]:
    nvtx = _cuda_is_used()
    if nvtx:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        if profiler._is_profiler_enabled:
            with profiler.record_function(name):
                yield
        else:
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def _cuda_is_used() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
