"""Make the few calls of an accelerator that prefetching needs, in one place.

Tests use another object with these methods, which simulates a device whose streams run in any order
that their events allow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from dataloaders.machine.resources import usable_cores
from dataloaders.machine.threads import limit_torch_threads, use_thread_local_capture

Stream: TypeAlias = Any
Event: TypeAlias = Any

_MOST_COPY_THREADS = 4


def has_streams(device: torch.device) -> bool:
    """Whether ``device`` takes copies on a stream of their own, beside the step's."""
    return device.type in ("cuda", "xpu")


class Device:
    """Streams, events and memory of one accelerator, by the names that CUDA and XPU share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)

    def stream(self) -> Stream:
        """Return a new stream beside all others."""
        return self._module.Stream(self.device)

    def current_stream(self) -> Stream:
        """Return the stream on which the calling thread queues its work now."""
        return self._module.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue what is queued inside on ``stream``."""
        context: AbstractContextManager[None] = self._module.stream(stream)
        return context

    def record(self, stream: Stream) -> Event:
        """Return an event that happens after everything queued on ``stream`` so far."""
        # On CUDA, waiting for a blocking event lets the thread sleep, and not keep a core busy.
        blocking = {"blocking": True} if self.device.type == "cuda" else {}
        event = self._module.Event(**blocking)
        event.record(stream)
        return event

    def stream_waits(self, stream: Stream, event: Event) -> None:
        """Let what is queued on ``stream`` from now on wait for ``event``; return at once."""
        stream.wait_event(event)

    def thread_waits(self, event: Event) -> None:
        """Return when ``event`` has happened."""
        event.synchronize()

    def pinned_like(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return page-locked host memory for ``leaf``, with the strides of ``leaf.to()``.

        It comes from torch's pool, which rounds sizes up to a power of two, and returns there
        after every copy that was queued from it.
        """
        # The device is named: the user may have set another one as torch's default.
        return torch.empty_like(leaf, device="cpu", pin_memory=True, requires_grad=False)

    def is_pinned(self, leaf: torch.Tensor) -> bool:
        """Whether ``leaf`` lies in page-locked memory already."""
        return leaf.is_pinned()

    def empty_like(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return device memory of the current stream, with the strides of ``leaf.to()``."""
        return torch.empty_like(leaf, device=self.device, requires_grad=False)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream; return before it is done if ``source`` is pinned."""
        target.copy_(source, non_blocking=True)

    def used_on(self, leaf: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of ``leaf``, once it is freed, until ``stream`` is done with it."""
        leaf.record_stream(stream)

    def enter_thread(self) -> None:
        """Make the calling thread, which is new, work on this device."""
        self._module.set_device(self.device)
        use_thread_local_capture()
        # One thread copies into pinned memory far more slowly than the bus transfers. The workers
        # need the other cores.
        limit_torch_threads(max(1, min(_MOST_COPY_THREADS, usable_cores() // 4)))
