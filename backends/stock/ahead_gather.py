"""Batches made at once, without workers: on a thread of ours, where the sampler does not run.

consumer's thread ──supply(): sampler──> Indices ──> fetch on a thread ──> batch
"""

from __future__ import annotations

from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaders.backend import Ahead, Cancelled
from dataloaders.batches.tree import Batch

from .ahead_indices import Dry, Indices

__all__ = ["GatherEpoch"]

_POLL_S = 0.1


class GatherEpoch(Ahead):
    """One epoch of an iterator without workers, whose fetch runs no code of the user's."""

    def __init__(self, iterator: _BaseDataLoaderIter) -> None:
        self._indices = Indices(iterator._sampler_iter)
        self._taken = _Taken(self._indices)
        iterator._sampler_iter = self._taken
        self._iterator = iterator
        self.base_seed = int(iterator._base_seed)  # as torch drew it at iter()

    def __next__(self) -> Batch:
        if self._taken.cancelled:
            raise Cancelled
        return next(self._iterator)

    def __len__(self) -> int:
        return len(self._iterator)

    @property
    def iterator(self) -> _BaseDataLoaderIter:
        """torch's, without workers; see `Ahead`."""
        return self._iterator

    def supply(self, batches: int) -> None:
        """Draw indices; see `Ahead`."""
        self._indices.supply_more(batches)

    def cancel(self) -> None:
        """No batch is made any more."""
        self._taken.cancelled = True


class _Taken:
    """The sampler's iterator, as the thread sees it: waits for what is not drawn yet."""

    def __init__(self, indices: Indices) -> None:
        self._indices = indices
        self.cancelled = False

    def __iter__(self) -> _Taken:
        return self

    def __next__(self) -> Any:
        while not self.cancelled:
            try:
                return self._indices.take()
            except Dry:
                self._indices.wait(_POLL_S)
        raise Cancelled
