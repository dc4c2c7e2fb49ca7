"""The few CUDA calls that prefetching makes, in one place.

Tests put an object with the same methods here that records the calls and plays a device whose
streams run in any order that their events allow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from dataloaders.machine.resources import usable_cores
from dataloaders.machine.threads import limit_torch_threads, use_thread_local_capture

__all__ = ["Cuda", "Event", "Stream", "dense_parts"]

Stream: TypeAlias = Any
Event: TypeAlias = Any


class Cuda:
    """Streams, events and memory of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> Stream:
        """A new stream beside all others."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        """The stream on which the calling thread queues its work now."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """What is queued inside is queued on ``stream``."""
        return torch.cuda.stream(stream)

    def record(self, stream: Stream) -> Event:
        """An event behind everything that is queued on ``stream`` so far."""
        # Blocking: who waits for it sleeps, and spins no core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def stream_waits(self, stream: Stream, event: Event) -> None:
        """Let what is queued on ``stream`` from now on wait for ``event``; returns at once."""
        stream.wait_event(event)

    def thread_waits(self, event: Event) -> None:
        """Return when ``event`` has happened."""
        event.synchronize()

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory, uint8."""
        # The device is named: the user may have set another one as torch's default.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_pinned(self, leaf: torch.Tensor) -> bool:
        """Whether ``leaf`` lies in page-locked memory already."""
        return leaf.is_pinned()

    def empty_like(self, leaf: torch.Tensor) -> torch.Tensor:
        """Device memory of the current stream for ``leaf``, with the strides of ``leaf.to()``."""
        return torch.empty_like(leaf, device=self.device, requires_grad=False)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream; returns before it is done if ``source`` is pinned."""
        target.copy_(source, non_blocking=True)

    def used_on(self, leaf: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of ``leaf``, once it is freed, until ``stream`` is done with it."""
        for part in dense_parts(leaf):
            part.record_stream(stream)

    def enter_thread(self) -> None:
        """Make the calling thread, which is new, work on this device."""
        torch.cuda.set_device(self.device)
        use_thread_local_capture()
        # Threads for the copy into pinned memory, which one core does at far less than the bus
        # takes; never so many that the workers starve.
        limit_torch_threads(max(1, min(4, usable_cores() // 4)))


def dense_parts(leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold the memory of ``leaf``: itself, or those of a sparse or nested one.

    torch records a stream's use of dense tensors and of jagged ones, not of sparse ones.
    """
    if leaf.layout is torch.sparse_coo:
        return leaf._indices(), leaf._values()
    if leaf.layout in (torch.sparse_csr, torch.sparse_bsr):
        return leaf.crow_indices(), leaf.col_indices(), leaf.values()
    if leaf.layout in (torch.sparse_csc, torch.sparse_bsc):
        return leaf.ccol_indices(), leaf.row_indices(), leaf.values()
    if leaf.is_nested and leaf.layout is torch.strided:
        return (leaf.values(),)
    return (leaf,)
