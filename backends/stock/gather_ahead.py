"""Gather batches on the prefetch thread, without workers.

consumer's thread ──supply(): sampler──> queue of indices ──> batch, made on the thread
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaders.backend import Ahead, Cancelled
from dataloaders.batches.tree import Batch


class GatherEpoch(Ahead):
    """One epoch of an iterator without workers, whose fetch runs no user code.

    Attributes:
        iterator: torch's iterator, which has no workers.
    """

    def __init__(self, iterator: _BaseDataLoaderIter) -> None:
        self.iterator = iterator
        self._sampler = iterator._sampler_iter
        self._drawn: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        self._cancelled = False

    def __next__(self) -> Batch:
        index, error = (None, None) if self._cancelled else self._drawn.get()
        if self._cancelled:
            raise Cancelled
        if error is None:
            self.iterator._sampler_iter = iter((index,))
            return next(self.iterator)
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, which must not hold the error

    def supply(self, batches: int) -> None:
        """Draw the indices of ``batches`` more batches; queue a sampler's error in their place."""
        for _ in range(batches):
            try:
                self._drawn.put((_kept(next(self._sampler)), None))
            except StopIteration:  # a new one, since a traceback holds frames
                self._drawn.put((None, StopIteration()))
            except Exception as error:  # raised where the index is taken
                self._drawn.put((None, error))

    def cancel(self) -> None:
        """Make a waiting and every later ``next()`` raise `Cancelled`."""
        self._cancelled = True
        self._drawn.put((None, None))


def _kept(index: Any) -> Any:
    """Return ``index``, a copy of a list, array or tensor that the sampler may write into later."""
    copy = getattr(index, "clone", None) or getattr(index, "copy", None)
    return index if copy is None else copy()
