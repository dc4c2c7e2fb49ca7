"""What prefetching holds open for one loader: the inner session, and a lane to each device.

epoch() ──> specification (the loader, with what changes for us) ──> inner session
        ──> lane: transfer (stream, pinned ring, slots) + courier (thread), kept across epochs
        ──> TakenAhead | TakenHere
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from dataloaders import specification
from dataloaders.backend import Backend, Session, Specification
from dataloaders.batches.tree import Batch
from dataloaders.transforms import Tail

from .courier import Courier, Trip
from .epoch import TakenAhead, TakenHere
from .tails import tail_of
from .transfer import Transfer

if TYPE_CHECKING:
    from . import Prefetch

__all__ = ["PrefetchSession", "device_of"]


class PrefetchSession(Session):
    """Streams, threads and buffers of one loader, across its epochs."""

    def __init__(self, options: Prefetch, inner: Backend, loader: Specification) -> None:
        self._options = options
        self._loader = weakref.ref(loader)
        self._tail: Tail | None = None
        self._tail_changes: dict[str, Any] = {}
        self._specification = _shadow(loader)
        self._backend = inner
        self._refresh(loader, device_of(options, loader))
        self._inner = inner.open(self._specification)
        self._lane: _Lane | None = None

    def epoch(self) -> Iterator[Batch]:
        """Batches of one epoch on the device; made ahead of use wherever that can be."""
        loader = self._loader()
        if loader is None:
            raise RuntimeError("this session's loader is gone: keep it while iterating")
        device = device_of(self._options, loader)
        self._refresh(loader, device)
        lane = self._free_lane(device, loader)
        lane.transfer.start(self._tail)
        source = self._inner.epoch_ahead()
        batches: TakenAhead | TakenHere
        if source is None:
            batches = TakenHere(self._inner.epoch(), lane.transfer, self._inner)
        else:
            trip = Trip(source, lane.transfer)
            batches = TakenAhead(source, trip, lane.transfer, self._inner)
            lane.courier.send(trip)
        self._show_workers(loader)
        lane.serves(batches)
        return batches

    def close(self) -> None:
        """End the running epoch, the thread and the inner session."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None
        self._inner.close()
        loader = self._loader()
        if loader is not None:
            self._show_workers(loader)

    def _show_workers(self, loader: Specification) -> None:
        """Keep persistent workers where torch does: Lightning and others shut them down there."""
        loader.__dict__["_iterator"] = self._specification.__dict__.get("_iterator")

    def _refresh(self, loader: Specification, device: torch.device | None) -> None:
        """Have the inner backend see the loader as it is now, with what changes for us."""
        # Persistent workers keep the dataset that they were started with.
        if not (loader.persistent_workers and vars(loader).get("_iterator") is not None):
            found = tail_of(self._options, loader, device)
            before = self._tail
            self._tail, self._tail_changes = found if isinstance(found, tuple) else (None, {})
            if self._tail is not None and self._tail is not before:
                self._tail.prepare(device or torch.device("cpu"))
        state = specification.state_of(loader)
        changes = self._options.changes(loader, device, self._backend)
        self._specification.__dict__.update(state, **changes, **self._tail_changes)

    def _free_lane(self, device: torch.device | None, loader: Specification) -> _Lane:
        """The kept lane, if no other iterator is using it; else one for this epoch alone."""
        lane = self._lane
        if lane is not None and lane.device == device:
            if not lane.busy:
                return lane
            if loader.persistent_workers and loader.num_workers > 0:
                lane.take_over()  # torch, too, gives the workers to the newest iterator
                return lane
            return _Lane(self._options.transfer(device), device)
        if lane is not None and not lane.busy:
            lane.close()
        self._lane = _Lane(self._options.transfer(device), device)
        return self._lane


class _Lane:
    """A transfer and its courier; they serve one iterator at a time."""

    def __init__(self, transfer: Transfer, device: torch.device | None) -> None:
        self.transfer = transfer
        self.device = device
        self.courier = Courier(transfer)
        self._batches: weakref.ref[TakenAhead | TakenHere] | None = None
        # The thread lives until its trips are made, even if this lane is dropped before.
        self._end = weakref.finalize(self, self.courier.end)

    @property
    def busy(self) -> bool:
        batches = None if self._batches is None else self._batches()
        return batches is not None and batches.running

    def serves(self, batches: TakenAhead | TakenHere) -> None:
        self._batches = weakref.ref(batches)

    def take_over(self) -> None:
        batches = None if self._batches is None else self._batches()
        if isinstance(batches, TakenAhead):
            batches.take_over()

    def close(self) -> None:
        self.take_over()
        self._end()


def device_of(options: Prefetch, loader: Specification) -> torch.device | None:
    """Where batches are delivered: the option, else the loader's, else the current CUDA device.

    None where nobody asked for a device and there is no CUDA device: batches stay where they are.
    """
    wanted: Any = options.device if options.device is not None else getattr(loader, "device", None)
    if wanted is None and not torch.cuda.is_available():
        return None
    return specification.device_of(wanted)


def _shadow(loader: Specification) -> Specification:
    """An object of the loader's class that does not hold the loader."""
    shadow: Specification = object.__new__(type(loader))
    return shadow
