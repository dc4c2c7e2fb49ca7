"""Find out whether the input pipeline holds your training back; if it does, change one argument.

    sampler ──> fetch ──> decode ──> augment ──> collate ──> transfer ──> training step

    DataLoader        torch's DataLoader, with a backend= that makes the batches
    wrap              the same for a loader that already exists
    check_bottleneck  the same step on real and on synthetic input: is the input the bottleneck?
    bottleneck_check  the same for a loop as it stands: with bottleneck_check(loader) as check
    tune              choose workers, prefetching and pinning by a few measured trials

Importing this package loads nothing else; the loader needs torch and numpy, but not h5py, DALI,
torchvision or PIL.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from dataloaders.errors import DataLoadersError
from dataloaders.plan import Plan

if TYPE_CHECKING:
    from dataloaders.backend import Backend, Session
    from dataloaders.bottleneck import bottleneck_check, check_bottleneck
    from dataloaders.loader import DataLoader, wrap
    from dataloaders.tuning import tune

__all__ = [
    "Backend",
    "DataLoader",
    "DataLoadersError",
    "Plan",
    "Session",
    "bottleneck_check",
    "check_bottleneck",
    "tune",
    "wrap",
]

__version__ = "0.1.0"

# Imported on first use: a training script does not need all, and the command's help not even torch.
_LAZY = {
    "Backend": "dataloaders.backend",
    "Session": "dataloaders.backend",
    "DataLoader": "dataloaders.loader",
    "wrap": "dataloaders.loader",
    "bottleneck_check": "dataloaders.bottleneck",
    "check_bottleneck": "dataloaders.bottleneck",
    "tune": "dataloaders.tuning",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:  # dataloaders.registry.load()
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
