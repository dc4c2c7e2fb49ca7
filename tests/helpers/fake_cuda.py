"""A CUDA device simulated on the CPU, which reorders all that a real one may reorder.

Work queued on a stream runs later, stream by stream in an order that a seed decides and that only
events restrict; copies read and write their memory when they run. Freed memory is handed out again
as torch's allocator does: at once to the stream it was allocated on, unless another stream used it
(``record_stream``) and has not come so far.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from backends.prefetch import Prefetch
from backends.prefetch.transfer import StreamTransfer

POISON = 0xA5


@dataclass(frozen=True)
class PlayedPrefetch(Prefetch):
    """Prefetch to a simulated device."""

    cuda: Any = field(default_factory=lambda: FakeCuda(0))

    def transfer(self, device: Any = None) -> StreamTransfer:
        return StreamTransfer(self.cuda, ahead=self.ahead, pins=self.pin_memory)


class FakeStream:
    """Operations in their order; one that has to wait returns False."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()


class Block:
    """Device memory of the allocator; a tensor in it is a view that may die before it."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.full((max(1, nbytes),), POISON, dtype=torch.uint8)
        self.stream: FakeStream | None = None
        self.used_on: set[FakeStream] = set()
        self.pending: list[threading.Event] = []
        self.free = False


class FakeCuda:
    """The methods of ``backends.prefetch.device.Device``, and those that a test drives it by."""

    def __init__(self, seed: int) -> None:
        self.device = torch.device("cpu")
        self.default = FakeStream()
        self.streams = [self.default]
        self.blocks: list[Block] = []
        self._lock = threading.RLock()
        self._here = threading.local()
        self.pinned: list[torch.Tensor] = []
        self._random = random.Random(seed)

    # What prefetching calls

    def stream(self) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return getattr(self._here, "stream", self.default)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def record(self, stream: FakeStream) -> threading.Event:
        event = threading.Event()
        stream.queue.append(event.set)
        return event

    def stream_waits(self, stream: FakeStream, event: threading.Event) -> None:
        stream.queue.append(event.is_set)

    def thread_waits(self, event: threading.Event) -> None:
        while not event.is_set():
            with self._lock:
                assert event.is_set() or self.progress(1), "a deadlock: no stream can go on"

    def pinned_like(self, leaf: torch.Tensor) -> torch.Tensor:
        nbytes = leaf.numel() * leaf.element_size()
        self.pinned.append(torch.full((nbytes,), POISON, dtype=torch.uint8))
        strides = torch.empty_like(leaf, device="meta").stride()
        return self.pinned[-1].view(leaf.dtype).as_strided(leaf.shape, strides)

    def is_pinned(self, leaf: torch.Tensor) -> bool:
        return any(_within(leaf, memory) for memory in self.pinned)

    def empty_like(self, leaf: torch.Tensor) -> torch.Tensor:
        nbytes = leaf.numel() * leaf.element_size()
        with self._lock:
            block = self._block(nbytes)
            block.stream, block.free, block.used_on = self.current_stream(), False, set()
        strides = torch.empty_like(leaf, device="meta").stride()
        tensor = block.memory[:nbytes].view(leaf.dtype).as_strided(leaf.shape, strides)
        weakref.finalize(tensor, self._freed, block)
        return tensor

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not source.numel():
            return
        # Through memory, not through the tensors: a queued copy keeps nothing alive.
        into = _raw(self._owner(target), target)
        if self.is_pinned(source) or self._is_on_device(source):
            memory = self._owner(source)
            later = _raw(memory, source)
            self.current_stream().queue.append(lambda: into.copy_(later))
        else:
            now = source.clone()
            self.current_stream().queue.append(lambda: into.copy_(now))

    def used_on(self, leaf: torch.Tensor, stream: FakeStream) -> None:
        for block in self.blocks:
            if _within(leaf, block.memory):
                block.used_on.add(stream)

    def enter_thread(self) -> None:
        pass

    # What a test drives it by

    def kernel(self, leaf: torch.Tensor, read: list[torch.Tensor]) -> None:
        """Queue work on the current stream that reads ``leaf`` when it runs."""
        raw = _raw(self._owner(leaf), leaf)
        self.current_stream().queue.append(lambda: read.append(raw.clone()))

    def progress(self, most: int) -> bool:
        """Run up to ``most`` queued operations of streams that can go on; whether any ran."""
        ran = False
        with self._lock:
            for _ in range(most):
                streams = [stream for stream in self.streams if stream.queue]
                self._random.shuffle(streams)
                for stream in streams:
                    if stream.queue[0]() is not False:
                        stream.queue.popleft()
                        ran = True
                        break
                else:
                    break
        return ran

    def drain(self) -> None:
        """Run everything that is queued."""
        while any(stream.queue for stream in self.streams):
            assert self.progress(1), "a deadlock: no stream can go on"

    def bytes_allocated(self) -> int:
        """Device memory that was ever taken from the system: freed blocks are used again first."""
        return sum(block.memory.numel() for block in self.blocks)

    def _block(self, nbytes: int) -> Block:
        for block in self.blocks:
            fits = block.free and block.memory.numel() == max(1, nbytes)
            is_idle = all(event.is_set() for event in block.pending)
            if fits and is_idle and block.stream is self.current_stream():
                return block
        self.blocks.append(Block(nbytes))
        return self.blocks[-1]

    def _freed(self, block: Block) -> None:
        others = [stream for stream in block.used_on if stream is not block.stream]
        block.pending = [self.record(stream) for stream in others]
        block.free = True

    def _is_on_device(self, leaf: torch.Tensor) -> bool:
        return any(_within(leaf, block.memory) for block in self.blocks)

    def _owner(self, leaf: torch.Tensor) -> torch.Tensor:
        for memory in (*self.pinned, *(block.memory for block in self.blocks)):
            if _within(leaf, memory):
                return memory
        raise AssertionError("this tensor lies neither on the device nor in pinned memory")


def _within(leaf: torch.Tensor, memory: torch.Tensor) -> bool:
    return memory.data_ptr() <= leaf.data_ptr() < memory.data_ptr() + memory.numel()


def _raw(memory: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """The same elements as ``leaf``, as a tensor that does not keep it alive."""
    offset = leaf.data_ptr() - memory.data_ptr()
    size = leaf.numel() * leaf.element_size()
    return memory[offset : offset + size].view(leaf.dtype).as_strided(leaf.shape, leaf.stride())
