"""Batches gathered on the prefetch thread, without workers.

consumer's thread ──supply(): sampler──> queue of indices ──> gather on the thread ──> batch
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaders.backend import Ahead, Cancelled
from dataloaders.batches.tree import Batch


class GatherEpoch(Ahead):
    """One epoch of an iterator without workers, whose fetch runs no code of the user's.

    Attributes:
        base_seed: the seed for workers that torch drew at ``iter()``.
    """

    def __init__(self, iterator: _BaseDataLoaderIter) -> None:
        self._sampler = iterator._sampler_iter
        self._drawn = _Drawn()
        iterator._sampler_iter = self._drawn
        self._iterator = iterator
        self._cancelled = False
        self.base_seed = int(iterator._base_seed)

    def __next__(self) -> Batch:
        if self._cancelled:
            raise Cancelled
        return next(self._iterator)

    def __len__(self) -> int:
        return len(self._iterator)

    @property
    def iterator(self) -> _BaseDataLoaderIter:
        """Return torch's iterator, which has no workers."""
        return self._iterator

    def supply(self, batches: int) -> None:
        """Draw the indices of ``batches`` more batches; keep a sampler's error in its place."""
        for _ in range(batches):
            try:
                self._drawn.queue.put(next(self._sampler))
            except StopIteration:  # a new one: nobody may take it, and a traceback holds frames
                self._drawn.queue.put(_Raised(StopIteration()))
            except Exception as error:  # raised where the index is taken
                self._drawn.queue.put(_Raised(error))

    def cancel(self) -> None:
        """Make a waiting and every later ``next()`` raise `Cancelled`."""
        self._cancelled = True
        self._drawn.queue.put(_Raised(Cancelled()))


class _Raised:
    def __init__(self, error: Exception) -> None:
        self.error = error


class _Drawn:
    """The sampler's iterator as the thread sees it: waits for what is not drawn yet."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()

    def __iter__(self) -> _Drawn:
        return self

    def __next__(self) -> Any:
        index = self.queue.get()
        if type(index) is not _Raised:
            return index
        try:
            raise index.error
        finally:
            del index  # the error's traceback holds this frame, which must not hold the error
