"""What a loop iterates: keys drawn and batches finished on its own thread, images made elsewhere.

next(): sampler ──keys, words──> Task ──readers──> Trip ═══ line ═══> Item ──Assembly──> batch
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from dataloaders import waiting
from dataloaders.batch import Batch, to_device
from dataloaders.randomness import words
from dataloaders.whole_batches import SeededRows, WholeBatches

from .collate import Assembly, noted
from .courier import Trip
from .task import Ended, Failed, Item, Made, Task

__all__ = ["DaliEpoch", "Keys"]


class Keys(WholeBatches):
    """A collate_fn that hands on the keys, or the `SeededRows`, of a batch."""

    def __call__(self, rows: Any) -> Any:
        """See `WholeBatches`."""
        return rows


class DaliEpoch:
    """One epoch of batches.

    Args:
        order: torch's iterator over the keys of the batches.
        base_seed: that torch drew for this epoch; words come from it where there is no ``seed=``.
        read: begins to read the images of some keys.
        depth: batches that are under way, at most.
        trip: on which they are made.
        holds: what has to live as long as this iterator.
    """

    def __init__(
        self,
        order: Iterator[Any],
        *,
        base_seed: int,
        read: Callable[[Sequence[Any]], Future[Any]],
        depth: int,
        trip: Trip,
        assembly: Assembly,
        device: torch.device,
        length: int | None,
        holds: Any,
    ) -> None:
        self._order: Iterator[Any] | None = order
        self._seed = base_seed
        self._read = read
        self._due = depth
        self._is_closed = False
        self._trip: Trip | None = trip
        self._assembly = assembly
        self._device = device
        self._length = length
        self._holds = holds
        self._batches = self._samples = 0
        self._under_way = 0
        self._pid = os.getpid()
        self._stop = weakref.finalize(self, trip.stop)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        trip = self._trip
        if trip is None:
            if self._is_closed:
                raise RuntimeError("the loader of this iterator was closed, or has another backend")
            raise StopIteration
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this iterator was made before a fork, and its threads are in the parent process; "
                "make one here: iter(loader)"
            )
        due, self._due = self._due, 1
        self.draw(due)
        item: Item = waiting.get(trip.ready)
        self._under_way -= 1
        try:
            return self._batch(item)
        finally:
            del item, trip  # a traceback must keep none of them alive

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the length of this epoch of {type(self).__name__} is not known")
        return self._length

    @property
    def running(self) -> bool:
        """Whether further batches may come."""
        return self._trip is not None

    def counts(self) -> tuple[int, int]:
        """How full it is; see `dataloaders.flow.counts_of`."""
        trip = self._trip
        ready = 0 if trip is None else trip.ready.qsize()
        return ready, max(ready, self._under_way)

    def end(self) -> None:
        """No batch is made any more."""
        self._trip = self._order = self._holds = None
        self._stop()

    def closed(self) -> None:
        """No batch is made any more, though some were to come."""
        self._is_closed = True
        self.end()

    def draw_now(self) -> None:
        """Draw what is due at the first batch."""
        due, self._due = self._due, 0
        self.draw(due)

    def draw(self, batches: int) -> None:
        """Draw the keys of so many batches more, and begin to read them."""
        for _ in range(batches):
            if self._order is None or self._trip is None:
                return
            try:
                rows = next(self._order)
            except StopIteration:
                self._order = None
                self._trip.inbox.put(None)
                return
            except Exception as error:  # the sampler's: raised where its batch would have come
                self._trip.inbox.put(Failed(error))
                self._under_way += 1
                return
            self._under_way += 1
            self._trip.inbox.put(self._task(rows))

    def _task(self, rows: Any) -> Task:
        self._batches += 1
        if isinstance(rows, SeededRows):
            return Task(self._batches, rows.keys, rows.words, rows, self._read(rows.keys))
        places = np.arange(self._samples, self._samples + len(rows))
        self._samples += len(rows)
        return Task(self._batches, rows, words(self._seed, 0, places), None, self._read(rows))

    def _batch(self, item: Item) -> Batch:
        if isinstance(item, Ended):
            self.end()
            raise StopIteration
        if isinstance(item, Failed):
            error = noted(item.error, item.task, item.sample)
            del item  # what is raised must not hold its own batch
            raise error
        if isinstance(item, Made):
            if item.ready is not None:
                _wait_for(item)
            batch = self._assembly.batch(item)
        else:
            batch = self._assembly.redone(item)
        return batch if self._device.type == "cpu" else to_device(batch, self._device)


def _wait_for(made: Made) -> None:
    """Have the current stream wait for the images, and their memory for what it does with them."""
    images = made.images if isinstance(made.images, list) else [made.images]
    stream = torch.cuda.current_stream(images[0].device)
    stream.wait_event(made.ready)
    for image in images:
        image.record_stream(stream)
