"""What a loop iterates: batches that were taken ahead, or that are taken when asked for.

TakenAhead   a courier's trip: ``next()`` hands out what is ready and permits one batch more
TakenHere    the user's own Python makes the batches: it runs here, on the loop's thread
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from dataloaders.backend import Ahead, Session
from dataloaders.batches.tree import Batch
from dataloaders.machine import waiting
from dataloaders.measuring.queues import counts_of

from .courier import Ended, Failed, Trip
from .ranges import stage
from .transfer import Transfer

__all__ = ["TakenAhead", "TakenHere"]


class TakenAhead:
    """One epoch of batches that a courier takes and sends ahead of use."""

    def __init__(self, source: Ahead, trip: Trip, transfer: Transfer, inner: Session) -> None:
        self._source: Ahead | None = source
        self._ended: object | None = None
        self._trip = trip
        self._transfer = transfer
        self._inner: Session | None = inner  # what it holds open must live as long as its batches
        self._taken_over = False
        # What the thread may take before the first hand-over, if none of it is in flight: drawn
        # when the first batch is asked for, as torch draws it where there are no workers.
        self._first = max(0, transfer.permits - source.in_flight)
        self._length: int | str
        try:
            self._length = len(source)  # type: ignore[arg-type]
        except Exception as error:  # torch's TypeError for most; samplers may raise what they like
            self._length = str(error)
        self._stop = weakref.finalize(self, trip.stop)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        source = self._source
        if source is None:
            if self._taken_over:
                raise RuntimeError(
                    "a newer iterator of this loader uses its persistent workers: iterate one at a "
                    "time, or leave out persistent_workers=True"
                )
            raise StopIteration
        failure: BaseException | None = None
        first, self._first = self._first, 0
        try:
            source.supply(first + 1)
        except Exception as error:  # a sampler's: torch, too, waits for the batch and drops it
            failure = error
        source.awaited()
        with stage("wait"):
            item = waiting.get(self._trip.ready)
        if isinstance(item, Ended):
            self._ended = source.iterator  # its workers are done, or their loader's
            self._leave()
            raise StopIteration
        try:
            if isinstance(item, Failed):  # the sampler's goes first: torch asks it first
                raise item.error if failure is None else failure
            batch = self._transfer.receive(item)
            if failure is not None:
                del batch
                raise failure
            source.handed_over()
            return batch
        finally:
            self._trip.permit()
            del item, source, failure  # a traceback must keep none of them alive

    def __len__(self) -> int:
        if isinstance(self._length, str):
            raise TypeError(self._length)
        return self._length

    def __getattr__(self, name: str) -> Any:
        # Torch's own names on an iterator (its workers above all), as of the one that is taken.
        if name.startswith("__") or name in ("_source", "_ended"):
            raise AttributeError(name)
        return getattr(self._ended if self._source is None else self._source.iterator, name)

    @property
    def running(self) -> bool:
        """Whether further batches may come."""
        return self._source is not None

    def take_over(self) -> None:
        """End it, since another iterator needs what it uses."""
        if self._source is not None:
            self._taken_over = True
            self._leave()

    @property
    def ahead(self) -> int:
        """Batches that may be on their way beyond those that the inner loader queues."""
        return self._transfer.permits

    def counts(self) -> tuple[int, int] | None:
        """How full it is; see `dataloaders.measuring.queues.counts_of`."""
        inner = counts_of(self._source)
        if inner is None:
            return None
        ready = self._trip.ready.qsize()
        # One that the thread waits for is among those the inner loader has outstanding.
        return ready + inner[0], ready + inner[1]

    def _leave(self) -> None:
        self._source = self._inner = None
        self._stop()


class TakenHere:
    """One epoch of batches that only the loop's own thread may take; copied as they come."""

    def __init__(self, batches: Iterator[Batch], transfer: Transfer, inner: Session) -> None:
        self._batches: Iterator[Batch] | None = batches
        self._transfer = transfer
        self._inner: Session | None = inner

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = self._inner = None
            raise
        return self._transfer.receive(self._transfer.send(batch))

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Torch's own counts (how many batches are ready), for whoever measures.
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    @property
    def running(self) -> bool:
        """Whether further batches may come."""
        return self._batches is not None
