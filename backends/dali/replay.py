"""What the prefetch thread does with a batch that workers recorded.

RecordedBatch ──HostReplay or DeviceReplay──> batch
a file that cannot be decoded ──> Unfinished ──loop's thread──> the dataset makes the batch itself,
                                               in a process like the worker that recorded it
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from dataloaders.backend import Remainder, Specification
from dataloaders.batches.tree import Batch, map_tensors
from dataloaders.errors import BackendUnavailable, BackendWarning
from dataloaders.observing import Unobserved, observe
from dataloaders.recording.program import Again, RecordedBatch
from dataloaders.recording.worker import ask_again, recording_changes
from dataloaders.replaying import ReplayError
from dataloaders.replaying.host import HostReplay, finished
from dataloaders.replaying.proof import Proof
from dataloaders.specification import device_of, view_of

from .explain import proof_of

if TYPE_CHECKING:
    from . import Dali

_USUAL_BATCH = 256
_MOST_IN_A_ROW = 3
"""Batches in a row that the dataset makes itself before this counts as an error of the backend."""


@dataclass
class Unfinished:
    """A batch that could not be replayed: ``recorded``, and why."""

    recorded: RecordedBatch
    cause: ReplayError


class Replayed(Remainder):
    """Decode and transform the images of recorded batches; one object serves one loader."""

    def __init__(self, options: Dali, loader: Specification) -> None:
        self._options = options
        self._threads = options.threads_for(loader)
        self._device = device_of(loader)
        self._replay: Any = None
        self._lock = threading.Lock()
        self._asked: Specification | None = None
        self._pins = False
        self._in_a_row = 0
        self._proof: Proof | None = None
        self._form = options.dtype, options.memory_format

    def changes(self, loader: Specification) -> dict[str, Any]:
        """See `Remainder`; `recorded` decides what is recorded."""
        found = proof_of(loader)
        if found is not self._proof and found.differs:
            warnings.warn(
                f"dali: the dataset's own code makes all pixels: {found.obstacle}",
                BackendWarning,
                stacklevel=6,
            )
        self._proof = found
        on_host = self._device.type == "cpu"  # no other memory can be pinned
        self._pins = on_host and loader.pin_memory and torch.accelerator.is_available()
        # As many tasks as torch draws at iter(), where its sampler's errors are raised.
        return {"pin_memory": False, "prefetch_factor": loader.prefetch_factor}

    def recorded(self, loader: Specification) -> Specification:
        """Return a view of ``loader``, which may be seeded, whose workers record."""
        self._asked = view_of(loader)
        if self._proof is None or self._proof.obstacle is not None:
            return loader
        return view_of(loader, **recording_changes(loader))

    def apply(self, batch: Batch, move: Callable[[Batch], Batch]) -> Batch:
        """See `Remainder`."""
        if isinstance(batch, RecordedBatch):
            try:
                batch = self._replayed(batch)
            except ReplayError as error:
                return Unfinished(batch, error)
        batch = self._finished(move(batch))
        return pin_memory(batch) if self._pins else batch  # type: ignore[no-untyped-call]

    def received(self, batch: Batch) -> Batch:
        """See `Remainder`.

        Raises:
            Exception: the dataset's own; of a stream, what could not be replayed.
            BackendUnavailable: several batches in a row could not be replayed, and the dataset
                could make them.
        """
        if not isinstance(batch, Unfinished):
            self._in_a_row = 0
            return batch
        if batch.recorded.again is None:  # a stream cannot be asked again
            raise batch.cause.__cause__ or batch.cause
        made = self._finished(self._asked_again(batch.recorded.again, batch.cause))
        self._in_a_row += 1
        cause = f"{batch.cause}"[:300]
        if self._in_a_row >= _MOST_IN_A_ROW:
            raise BackendUnavailable(
                f"dali could not make {self._in_a_row} batches in a row, and the dataset itself "
                f"can ({cause}); use backend='prefetch', and report this error"
            ) from batch.cause
        warnings.warn(
            f"dali could not make a batch ({cause}); the dataset itself made it",
            BackendWarning,
            stacklevel=4,
        )
        return made

    def _finished(self, batch: Batch) -> Batch:
        """Return ``batch`` in the dtype and memory order of the options."""
        if self._form == (None, torch.preserve_format):
            return batch
        return map_tensors(batch, lambda tensor: finished(tensor, *self._form))

    def _asked_again(self, again: Again, cause: ReplayError) -> Batch:
        """Return a batch made by the dataset itself, where the loader runs its code."""
        loader = self._asked
        assert loader is not None
        make = partial(ask_again, again, loader.collate_fn, loader._auto_collation)
        if loader.num_workers == 0:
            return make(loader.dataset)
        try:
            return observe(loader, make, timeout_s=loader.timeout or math.inf)
        except Unobserved as error:
            raise BackendUnavailable(
                f"dali could not make a batch ({cause}), and the dataset cannot be asked: {error}"
            ) from cause

    def _replayed(self, batch: RecordedBatch) -> Batch:
        with self._lock:  # a loader may have two live iterators, each with a thread
            if self._replay is None:
                self._replay = self._made()
            return self._replay.apply(batch)

    def _made(self) -> Any:
        from .decode import WindowDecoder

        options = self._options
        exact = "resize" not in options.fast
        host = HostReplay(WindowDecoder(), self._threads, exact)
        weakref.finalize(self, host.close)  # its threads end with this object
        if self._device.type != "cuda":
            return host
        from dataloaders.replaying.device import DeviceReplay

        from .graph import Graph

        size = getattr(self._asked, "batch_size", None) or _USUAL_BATCH
        engine = options.hw_decoder_load
        graph = Graph(size, self._device, threads=self._threads, engine=engine)
        weakref.finalize(self, graph.close)
        return DeviceReplay(graph, host, self._device)
