"""Make the floats of a batch at once, where its samples are made one by one.

    workers   samples up to ToTensor or ToDtype ──collate_fn──> Trailing: bytes, the steps that
                                                  are left ──DeviceTail──> floats of the batch

Transforms are recorded as prefetch's tail records them, but in a cache's samples. That this gives
the same batches is proved on rows of the cache, if no member of the tails is the user's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from dataloaders.backend import Specification
from dataloaders.batches.memory import HostPool
from dataloaders.batches.tree import Batch
from dataloaders.cache import CachedDataset
from dataloaders.recording.worker import recorded, recording_changes
from dataloaders.replaying.tail import DeviceTail
from dataloaders.specification import view_of
from dataloaders.transforms.read import Kind, read, trailing

from .images import empty

__all__ = ["finished", "finishing", "has_floats"]


def has_floats(cached: CachedDataset) -> bool:
    """Return whether torchvision's transforms alone make floats of bytes in ``cached``'s tails."""
    tails = [read(tail) for _, tail in cached.tails]
    own = any(member.kind is Kind.OPAQUE for tail in tails for member in tail)
    return not own and any(map(trailing, tails))


def finished(dataset: Any) -> Batch:
    """Return the batch of all samples of ``dataset``."""
    recording, collate_fn, _ = recorded(dataset, default_collate, "tail")
    return _Finished(collate_fn)(recording.__getitems__(range(len(dataset))))


def finishing(loader: Specification) -> Specification:
    """Return a view of ``loader``, which may be seeded, whose workers make floats at once."""
    changes = recording_changes(loader, "tail")
    return view_of(loader, **{**changes, "collate_fn": _Finished(changes["collate_fn"])})


class _Finished:
    """A collate_fn that finishes the batches of another one, which records."""

    def __init__(self, collate_fn: Callable[[Any], Batch]) -> None:
        self._collate_fn, pool = collate_fn, HostPool()
        self._tail = DeviceTail(empty_like=lambda pixels, dtype: empty(pool, pixels.shape, dtype))

    def __call__(self, taken: Any) -> Batch:
        """Return the batch of what the recording dataset gave."""
        return self._tail.apply(self._collate_fn(taken))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._collate_fn,)  # for spawned workers: a pool has a lock
