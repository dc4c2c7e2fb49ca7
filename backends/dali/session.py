"""Hold open what DALI needs for one loader: the order of its samples, a graph, threads.

epoch() ──> order: stock over the loader with keys in place of samples
        ──> lane: Line (graph, threads after it) + Courier (thread) + readers, kept
        ──> DaliEpoch
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler

from dataloaders import registry
from dataloaders.backend import Session, Specification
from dataloaders.batches.tree import Batch
from dataloaders.batches.whole import RowNumbers
from dataloaders.errors import BackendUnavailable
from dataloaders.plan import Plan
from dataloaders.specification import state_of, view_of

from .collate import Assembly
from .courier import Courier, Trip
from .epoch import DaliEpoch
from .job import Job
from .line import Line
from .read_ahead import ReadAhead
from .sources import Source
from .sources.opaque import Opaque
from .tasks import Keys, Pack, Recorded, ShowDataset, Tasks, TasksBeside, TasksHere, Writer

if TYPE_CHECKING:
    from . import Dali

__all__ = ["DaliSession"]


class DaliSession(Session):
    """The graph, threads and order of one loader, across its epochs."""

    def __init__(self, options: Dali, loader: Specification) -> None:
        self._options = options
        self._loader = weakref.ref(loader)
        self._view: Specification | None = None
        self._order: Session | None = None
        self._dataset: Any = None  # what is iterated in place of the loader's
        self._epochs = 0
        self._live: weakref.ref[DaliEpoch] | None = None
        self._lane: _Lane | None = None

    def epoch(self) -> Iterator[Batch]:
        """Return an iterator over the batches of one epoch, which are made ahead of use."""
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the loader of this session is gone: keep it while iterating")
        job = self._options.job(loader)
        if isinstance(job, str):
            raise BackendUnavailable(str(Plan(self._options.name, obstacle=job)))
        live = None if self._live is None else self._live()
        if job.persistent and job.num_workers and live is not None and live.running:
            live.closed()  # torch, too, gives persistent workers to the newest iterator
        lane = self._free_lane()
        order = self._ordered(loader, job)
        trip = Trip(job)
        tasks, length = self._tasks(order, lane, trip)
        assembly = Assembly(
            loader.dataset,
            job.source,
            loader.collate_fn,
            batched=loader.batch_sampler is not None,
            wraps=bool(job.work.wraps),
        )
        holds = (lane, self._view, order)
        pins = loader.pin_memory and torch.accelerator.is_available()
        batches = DaliEpoch(
            tasks, trip, assembly, device=job.device, pins=pins, length=length, holds=holds
        )
        lane.serve(batches, trip)
        self._live = weakref.ref(batches)
        if loader.num_workers > 0 and not job.num_workers:
            batches.draw_now()  # as torch does with workers
        return batches

    def close(self) -> None:
        """End the running epoch, its threads and its graph."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()
        if self._order is not None:
            self._order.close()
        self._order = self._view = None

    def _tasks(self, order: Session, lane: _Lane, trip: Trip) -> tuple[Tasks, int | None]:
        """Return one epoch's tasks, and their number if known."""
        job = trip.job
        ahead = order.epoch_ahead() if job.num_workers else None
        batches: Any = order.epoch() if ahead is None else ahead
        # Persistent workers keep the seed of their first epoch.
        epoch = self._epochs if job.num_workers and job.persistent else 0
        self._epochs += 1
        read = _nothing if isinstance(job.source, Opaque) else lane.reader(job)
        writer = Writer(read, (_base_seed(batches), epoch))
        if ahead is None:
            return TasksHere(batches, writer, trip.inbox, job.depth), _length(batches)
        return TasksBeside(ahead, writer, trip.inbox, job.depth), _length(batches)

    def _ordered(self, loader: Specification, job: Job) -> Session:
        """Return torch's order: stock, over a view of the loader that yields keys or recordings."""
        changes: dict[str, Any] = {"pin_memory": False}
        if isinstance(job.source, Opaque):
            job.source.refresh()
            known = self._dataset
            if not isinstance(known, Recorded) or known.recording is not job.source.dataset:
                self._dataset = Recorded(job.source)
            changes["collate_fn"] = Pack()
            if loader.worker_init_fn is not None:
                changes["worker_init_fn"] = ShowDataset(loader.worker_init_fn)
        else:
            self._dataset = RowNumbers(loader.dataset)
            changes.update(
                collate_fn=Keys(),
                num_workers=0,
                prefetch_factor=None,
                persistent_workers=False,
                timeout=0,
                worker_init_fn=None,
            )
        if loader.batch_sampler is None:  # batch_size=None: batches of one, taken apart later
            changes["batch_sampler"] = BatchSampler(loader.sampler, 1, False)
        changes["dataset"] = self._dataset
        if self._view is not None and self._view.dataset is self._dataset:
            changes["_iterator"] = self._view._iterator  # persistent workers
        if self._order is None or self._view is None:
            self._view = view_of(loader, **changes)
            self._order = registry.load("stock")(gather=False).open(self._view)  # type: ignore[call-arg]
        else:  # the epoch, and what the user has changed since
            self._view.__dict__.update({**state_of(loader), "_iterator": None, **changes})
        return self._order

    def _free_lane(self) -> _Lane:
        """Return the kept lane, if no other iterator uses it; else one for this epoch alone."""
        if self._lane is None:
            self._lane = _Lane()
        return _Lane() if self._lane.busy else self._lane


class _Lane:
    """A line, its courier and its readers; they serve one iterator at a time."""

    def __init__(self) -> None:
        self._courier = Courier(Line())
        self._reader: tuple[Source, int, ReadAhead] | None = None
        self._batches: weakref.ref[DaliEpoch] | None = None
        # The thread lives until its trips are made, even if this lane is dropped before.
        self._end = weakref.finalize(self, self._courier.end)

    @property
    def busy(self) -> bool:
        batches = self._given()
        return batches is not None and batches.running

    def reader(self, job: Job) -> ReadAhead:
        """Return the reader of the images of keys; kept while the source stays the same."""
        assert isinstance(job.source, Source)
        known = self._reader
        if known is not None and known[0] is job.source and known[1] == job.readers:
            return known[2]
        if known is not None:
            known[2].close()
        reader = ReadAhead(job.source, threads=job.readers)
        self._reader = job.source, job.readers, reader
        return reader

    def serve(self, batches: DaliEpoch, trip: Trip) -> None:
        self._batches = weakref.ref(batches)
        self._courier.send(trip)

    def close(self) -> None:
        batches = self._given()
        if batches is not None and batches.running:
            batches.closed()
        self._end()
        if self._reader is not None:
            self._reader[2].close()

    def _given(self) -> DaliEpoch | None:
        return None if self._batches is None else self._batches()


def _base_seed(batches: Any) -> int:
    found = getattr(batches, "base_seed", None)
    return int(batches._base_seed if found is None else found)


def _nothing(keys: Any) -> Any:
    raise AssertionError("recordings need no reader")


def _length(order: Any) -> int | None:
    try:
        return len(order)
    except Exception:  # torch's TypeError for most; samplers may raise anything
        return None
