"""How many workers this machine has room for, and what to say when that is too few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset

from dataloaders.machine import resources
from dataloaders.tuning import auto
from dataloaders.tuning.model import Model

__all__ = ["DEFAULT_PREFETCH", "Capacity", "capacity", "own_shortage"]

DEFAULT_PREFETCH = 2


@dataclass(frozen=True)
class Capacity:
    """What can be tried.

    Attributes:
        workers: the most; 0 if there is no room for one.
        prefetch: the factor to start with: 2, or 1 where shared memory is short.
        shortage: what the machine lacks of what the loader seems to need, and the remedy; or None.
        note: another reason for the limit; or None.
    """

    workers: int
    prefetch: int
    shortage: str | None = None
    note: str | None = None


def capacity(
    loader: torch.utils.data.DataLoader[Any],
    model: Model,
    batch_bytes: int,
    max_workers: int | None,
) -> Capacity:
    """The room for ``loader``'s workers: the user's limit, memory, and shared memory."""
    most, note = max_workers, None
    if most is None:
        most = auto.most_workers(model.cores)
        if isinstance(loader.dataset, IterableDataset):
            most = max(1, loader.num_workers)
            note = (
                f"the dataset is iterable: no more than {most} workers were tried, since one "
                "that does not share its samples out yields them several times; give "
                "max_workers= if it does"
            )
    wanted, shortage, prefetch = model.knee(most), None, DEFAULT_PREFETCH
    most = min(most, auto.memory_cap())
    if most < wanted:
        shortage = (
            f"{wanted} workers should help and available memory bears {most}: free memory, or "
            "keep the dataset in tensors or arrays, which workers share, and not in Python "
            "objects, which each of them comes to copy"
        )
    fit = auto.shm_cap(batch_bytes, prefetch)
    if fit is not None and fit < wanted:
        shortage = resources.shm_shortage(wanted, prefetch, batch_bytes) or shortage
        prefetch = 1
        fit = auto.shm_cap(batch_bytes, prefetch)
    return Capacity(most if fit is None else min(most, fit), prefetch, shortage, note)


def own_shortage(loader: torch.utils.data.DataLoader[Any], batch_bytes: int) -> str | None:
    """Why the loader's own settings must fail for want of shared memory, or None."""
    shortage = resources.shm_shortage(
        loader.num_workers, loader.prefetch_factor or DEFAULT_PREFETCH, batch_bytes
    )
    return None if shortage is None else f"the loader as it is will fail: {shortage}"
