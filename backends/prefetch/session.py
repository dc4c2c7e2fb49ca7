"""What prefetching keeps open for one loader: the inner session, and a pipeline to the device.

epoch() ──> specification (the loader, with changed attributes) ──> inner session
        ──> pipeline: transfer (its stream) + prefetch thread, kept across epochs
        ──> PrefetchedEpoch | SynchronousEpoch
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dataloaders import specification
from dataloaders.backend import Backend, Remainder, Session, Specification
from dataloaders.batches.tree import Batch
from dataloaders.errors import BackendWarning

from .device import has_streams
from .epoch import PrefetchedEpoch, SynchronousEpoch
from .remainders import Recorded, puts_off, records, remainder_of
from .thread import Epoch, PrefetchThread
from .transfer import Transfer

if TYPE_CHECKING:
    from . import Prefetch


class PrefetchSession(Session):
    """Streams, threads and buffers of one loader, across its epochs."""

    def __init__(self, options: Prefetch, inner: Backend, loader: Specification) -> None:
        self._options = options
        self._loader = weakref.ref(loader)
        self._remainder: Remainder | None = None
        self._changes: dict[str, Any] = {}
        self._specification = _same_class(loader)
        self._backend = inner
        self._recorded = Recorded()
        self._put_off = False
        self._refresh(loader, device_of(options, loader))
        if records(inner):
            inner = replace(inner, view=self._recorded)  # type: ignore[type-var]
        self._put_off = self._remainder is not None and puts_off(inner)
        if self._put_off:
            inner = replace(inner, puts_off=True)  # type: ignore[type-var]
        self._inner = inner.open(self._specification)
        self._pipeline: _Pipeline | None = None
        self._warned = False

    def epoch(self) -> Iterator[Batch]:
        """Return the batches of one epoch on the device, made ahead of use wherever that can be."""
        loader = self._loader()
        if loader is None:
            raise RuntimeError("this session's loader is gone: keep it while iterating")
        device = device_of(self._options, loader)
        self._warn_of_default(loader, device)
        self._refresh(loader, device)
        pipeline = self._free_pipeline(device, loader)
        source = self._inner.epoch_ahead()
        batches: PrefetchedEpoch | SynchronousEpoch
        if source is None:
            pipeline.wait()
            pipeline.transfer.start(self._remainder)
            batches = SynchronousEpoch(self._inner.epoch(), pipeline.transfer, self._inner)
        else:
            epoch = Epoch(source, pipeline.transfer, self._remainder)
            batches = PrefetchedEpoch(source, epoch, pipeline.transfer, self._inner, loader.timeout)
            pipeline.run(epoch)
        self._show_workers(loader)
        pipeline.serve(batches)
        return batches

    def close(self) -> None:
        """End the running epoch, the thread and the inner session."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._inner.close()
        loader = self._loader()
        if loader is not None:
            self._show_workers(loader)

    def _show_workers(self, loader: Specification) -> None:
        """Keep persistent workers where torch does: Lightning and others shut them down there."""
        loader.__dict__["_iterator"] = self._specification.__dict__.get("_iterator")

    def _refresh(self, loader: Specification, device: torch.device | None) -> None:
        """Update the specification to the loader as it is now, with the attributes that change."""
        # Persistent workers keep the dataset that they were started with.
        if not (loader.persistent_workers and vars(loader).get("_iterator") is not None):
            left = remainder_of(self._options, self._backend, loader, device)
            if not self._put_off:  # such a session's batches need it for ever
                self._remainder = left if isinstance(left, Remainder) else None
            self._recorded.on = self._remainder is not None
            self._changes = {} if self._remainder is None else self._remainder.changes(loader)
        state = specification.state_of(loader)
        changes = self._options.changes(loader, device)
        self._specification.__dict__.update({**state, **changes, **self._changes})

    def _free_pipeline(self, device: torch.device | None, loader: Specification) -> _Pipeline:
        """Return the kept pipeline, if no other iterator uses it; else one for this epoch alone."""
        kept = self._pipeline
        if kept is not None and kept.device == device:
            if not kept.busy:
                return kept
            if loader.persistent_workers and loader.num_workers > 0:
                kept.supersede()  # torch, too, gives the workers to the newest iterator
                return kept
            return _Pipeline(self._options.transfer(device), device)
        if kept is not None and not kept.busy:
            kept.close()
        self._pipeline = _Pipeline(self._options.transfer(device), device)
        return self._pipeline

    def _warn_of_default(self, loader: Specification, device: torch.device | None) -> None:
        """Warn once if every process of this machine would deliver on the same device."""
        rank = os.environ.get("LOCAL_RANK", "0")
        if self._warned or _wanted(self._options, loader) is not None or rank == "0":
            return
        if device is not None and device.index == 0 and torch.cuda.device_count() > 1:
            self._warned = True
            warnings.warn(
                f"prefetch: LOCAL_RANK is {rank}, and batches are delivered on {device}, the "
                f"current device: call torch.cuda.set_device({rank}) before iterating, or pass "
                f"device='cuda:{rank}'",
                BackendWarning,
                stacklevel=4,
            )


class _Pipeline:
    """A transfer and its thread; they serve one iterator at a time."""

    def __init__(self, transfer: Transfer, device: torch.device | None) -> None:
        self.transfer = transfer
        self.device = device
        self._thread = PrefetchThread(transfer)
        self._idle: threading.Event | None = None
        self._batches: weakref.ref[PrefetchedEpoch | SynchronousEpoch] | None = None
        # The thread lives until its epochs have run, even if this pipeline is dropped before.
        self._end = weakref.finalize(self, self._thread.end)

    @property
    def busy(self) -> bool:
        """Whether an iterator that may ask for more batches uses this pipeline."""
        batches = None if self._batches is None else self._batches()
        return batches is not None and batches.running

    def run(self, epoch: Epoch) -> None:
        """Have the thread run ``epoch``."""
        self._idle = epoch.done
        self._thread.begin(epoch)

    def wait(self) -> None:
        """Wait until the thread has sent its last batch."""
        if self._idle is not None:
            self._idle.wait()

    def serve(self, batches: PrefetchedEpoch | SynchronousEpoch) -> None:
        """Note the iterator that uses this pipeline."""
        self._batches = weakref.ref(batches)

    def supersede(self) -> None:
        """End the iterator that uses this pipeline."""
        batches = None if self._batches is None else self._batches()
        if isinstance(batches, PrefetchedEpoch):
            batches.supersede()

    def close(self) -> None:
        """End the thread and the iterator that uses this pipeline."""
        self.supersede()
        self._end()


def device_of(options: Prefetch, loader: Specification) -> torch.device | None:
    """Return where batches are delivered: the option, the loader's device or the current one.

    None where nobody asked for a device and none has streams: batches stay where they are.
    """
    wanted = _wanted(options, loader)
    if wanted is None:
        wanted = torch.accelerator.current_accelerator(check_available=True)
        if not has_streams(wanted):
            return None
    device = specification.device_of(wanted)
    if has_streams(device) and device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return device


def _wanted(options: Prefetch, loader: Specification) -> Any:
    return options.device if options.device is not None else getattr(loader, "device", None)


def _same_class(loader: Specification) -> Specification:
    """Return an object of the loader's class that does not hold the loader."""
    shadow: Specification = object.__new__(type(loader))
    return shadow
