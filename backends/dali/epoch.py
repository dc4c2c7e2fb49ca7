"""Iterate an epoch: the loop's thread finishes batches whose images are made elsewhere.

next(): Tasks ──> Trip.inbox ═══ line ═══> Trip.ready ──Item──> Assembly ──> batch
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from dataloaders.batches.tree import Batch, to_device
from dataloaders.machine import waiting

from .collate import Assembly
from .courier import Trip
from .task import Ended, Failed, Item, Made
from .tasks import Tasks

__all__ = ["DaliEpoch"]


class DaliEpoch:
    """One epoch of batches.

    Args:
        tasks: what is to be made.
        trip: the trip that makes it.
        assembly: builds the batches.
        device: where they are delivered.
        pins: whether batches on the host are in pinned memory.
        length: the number of batches in this epoch, if known.
        holds: what has to live as long as this iterator.
    """

    def __init__(
        self,
        tasks: Tasks,
        trip: Trip,
        assembly: Assembly,
        *,
        device: torch.device,
        pins: bool,
        length: int | None,
        holds: Any,
    ) -> None:
        self._tasks = tasks
        self._due = tasks.due
        self._trip: Trip | None = trip
        self._assembly = assembly
        self._device = device
        self._pins = pins
        self._length = length
        self._holds = holds
        self._is_closed = False
        self._pid = os.getpid()
        self._stop = weakref.finalize(self, _stop, tasks, trip)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        trip = self._trip
        if trip is None:
            if self._is_closed:
                raise RuntimeError(
                    "the loader of this iterator was closed, or has another backend, or a newer "
                    "iterator of it uses its persistent workers: iterate one at a time"
                )
            raise StopIteration
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this iterator was made before a fork, and its threads are in the parent process; "
                "make one here: iter(loader)"
            )
        due, self._due = self._due, 1
        self._tasks.draw(due)
        item: Item = waiting.get(trip.ready)
        try:
            if not isinstance(item, Ended):
                self._tasks.received()
            return self._batch(item)
        finally:
            self._tasks.permit()
            del item, trip  # a traceback must not keep any of them alive

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the length of this epoch of {type(self).__name__} is not known")
        return self._length

    @property
    def running(self) -> bool:
        """Whether more batches may come."""
        return self._trip is not None

    def counts(self) -> tuple[int, int] | None:
        """Return how full it is; see `dataloaders.measuring.queues.counts_of`."""
        return None if self._trip is None else self._trip.counts()

    def closed(self) -> None:
        """End the epoch: no batch is made any more, even if some are due."""
        self._is_closed = True
        self._end()

    def draw_now(self) -> None:
        """Draw what is due at the first batch."""
        due, self._due = self._due, 0
        self._tasks.draw(due)

    def _end(self) -> None:
        self._trip = self._holds = None
        self._stop()

    def _batch(self, item: Item) -> Batch:
        if isinstance(item, Ended):
            self._end()
            raise StopIteration
        if isinstance(item, Failed):
            error = item.error
            del item  # a raised error must not hold its own batch
            try:
                raise error
            finally:
                del error  # nor itself, through this frame: the epoch would live until collected
        if isinstance(item, Made):
            if item.ready is not None:
                _wait_for(item)
            batch = self._assembly.batch(item)
        else:
            batch = self._assembly.redone(item)
        if self._device.type != "cpu":
            return to_device(batch, self._device)
        return pin_memory(batch) if self._pins else batch  # type: ignore[no-untyped-call]


def _stop(tasks: Tasks, trip: Trip) -> None:
    tasks.stop()
    trip.stop()


def _wait_for(made: Made) -> None:
    """Make the current stream wait for the images, and their memory for its work with them."""
    images = made.images if isinstance(made.images, list) else [made.images]
    stream = torch.cuda.current_stream(images[0].device)
    stream.wait_event(made.ready)
    for image in images:
        image.record_stream(stream)
