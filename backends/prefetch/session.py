"""Keep open for one loader: the inner session, and a pipeline to the device.

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
from typing import TYPE_CHECKING, Any

import torch

from dataloaders import specification
from dataloaders.backend import Backend, Remainder, Session, Specification
from dataloaders.batches.tree import Batch
from dataloaders.errors import BackendWarning

from .epoch import PrefetchedEpoch, SynchronousEpoch
from .remainders import divided
from .thread import Epoch, PrefetchThread
from .transfer import Transfer

if TYPE_CHECKING:
    from . import Prefetch


class PrefetchSession(Session):
    """Streams, threads and buffers of one loader, across its epochs."""

    def __init__(self, options: Prefetch, inner: Backend, loader: Specification) -> None:
        self._options = options
        self._loader = weakref.ref(loader)
        device = specification.device_of(loader, options.device)
        inner, left = divided(options, inner, loader, device)
        self._remainder = left if isinstance(left, Remainder) else None
        self._changes: dict[str, Any] = {}
        # An object of the loader's class that does not hold the loader.
        self._specification: Specification = object.__new__(type(loader))
        self._refresh(loader, device)
        self._inner = inner.open(self._specification)
        self._pipeline: _Pipeline | None = None
        self._beginning = threading.RLock()  # a loop in another thread begins after this one
        self._warned = False

    def epoch(self) -> Iterator[Batch]:
        """Return the batches of one epoch on the device, made ahead of use wherever that can be."""
        loader = self._loader()
        if loader is None:
            raise RuntimeError("this session's loader is gone: keep it while iterating")
        device = specification.device_of(loader, self._options.device)
        self._warn_of_default(loader, device)
        with self._beginning:
            self._refresh(loader, device)
            pipeline = self._free_pipeline(device)
            batches = self._begun(pipeline, loader.timeout)
            specification.show_workers(loader, self._specification)
            pipeline.batches = weakref.ref(batches)
        return batches

    def _begun(self, pipeline: _Pipeline, timeout: float) -> PrefetchedEpoch | SynchronousEpoch:
        source = self._inner.epoch_ahead()
        if source is None:
            pipeline.transfer.start()
            return SynchronousEpoch(self._inner.epoch(), pipeline.transfer, self._inner)
        epoch = Epoch(source, pipeline.transfer)
        batches = PrefetchedEpoch(source, epoch, pipeline.transfer, self._inner, timeout)
        pipeline.thread.begin(epoch)
        return batches

    def close(self) -> None:
        """End the thread, once a running epoch is over, and the inner session."""
        self._pipeline = None
        self._inner.close()
        specification.show_workers(self._loader(), self._specification)

    def _refresh(self, loader: Specification, device: torch.device) -> None:
        """Update the specification to the loader as it is now, with the attributes that change."""
        # Persistent workers keep the dataset that they were started with.
        started = loader.persistent_workers and vars(loader).get("_iterator") is not None
        if self._remainder is not None and not started:
            self._changes = self._remainder.changes(loader)
        state = specification.state_of(loader)
        changes = self._options.changes(loader, device)
        self._specification.__dict__.update({**state, **changes, **self._changes})

    def _free_pipeline(self, device: torch.device) -> _Pipeline:
        """Return the kept pipeline if no other iterator uses it; else one for this epoch alone."""
        kept = self._pipeline
        if kept is not None and kept.device == device and not kept.busy:
            return kept
        transfer = self._options.transfer(device)
        transfer.remainder = self._remainder
        pipeline = _Pipeline(transfer, device)
        if kept is None or kept.device != device:
            self._pipeline = pipeline
        return pipeline

    def _warn_of_default(self, loader: Specification, device: torch.device) -> None:
        """Warn once if every rank on this machine would deliver on the same device."""
        rank = os.environ.get("LOCAL_RANK", "0")
        given = self._options.device is not None or specification.given_device(loader) is not None
        if self._warned or given or rank == "0":
            return
        if device.index == 0 and torch.cuda.device_count() > 1:
            self._warned = True
            warnings.warn(
                f"prefetch: LOCAL_RANK is {rank}, and batches are delivered on {device}, the "
                f"current device: call torch.cuda.set_device({rank}) before iterating, or pass "
                f"device='cuda:{rank}'",
                BackendWarning,
                stacklevel=4,
            )


class _Pipeline:
    """A transfer and its thread; they serve one iterator at a time.

    Attributes:
        batches: the iterator that they serve, or served last.
    """

    def __init__(self, transfer: Transfer, device: torch.device) -> None:
        self.transfer = transfer
        self.device = device
        self.thread = PrefetchThread(transfer)
        self.batches: weakref.ref[PrefetchedEpoch | SynchronousEpoch] | None = None
        # The thread lives until its epochs have run, even if this pipeline is dropped before.
        weakref.finalize(self, self.thread.end)

    @property
    def busy(self) -> bool:
        """Whether an iterator that may ask for more batches uses this pipeline."""
        batches = None if self.batches is None else self.batches()
        return batches is not None and batches.running
