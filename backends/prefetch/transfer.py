"""How a host batch gets to the device, and how the consumer's stream learns that it is there.

    send()     on the thread          pinned slot ──> copies on the side stream ──> event "copied"
    receive()  on the consumer's      its current stream waits for that event; an event behind
               thread                 what it queued so far says that an older batch is done with

A batch is *finished* when the consumer's work on it is done. At most `alive` batches are on the
device at once: the oldest is finished before another one is sent. Device memory is freed by the
allocator in the order of every stream that used it (``record_stream``), so that a batch may be
kept for ever; with ``reuse`` it lies in one of a few static slots instead.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch

from dataloaders.batches.memory import HostPool
from dataloaders.batches.tree import Batch, describe, leaves, map_children, nbytes, to_device
from dataloaders.transforms import Tail

from .cuda import Cuda, Event, Stream
from .ranges import stage
from .slots import Slot
from .staging import PinnedRing, room_for

__all__ = ["CudaTransfer", "PlainTransfer", "Sent", "Transfer"]

_SMALL = 1 << 20
_TRIALS = 6


class Sent:
    """A batch on its way.

    Attributes:
        batch: on the device, once ``copied`` has happened.
        copied: the event behind its copies; None where nothing is queued.
        finished: events after which nobody reads it any more; None while that is not known.
    """

    __slots__ = ("batch", "copied", "finished", "handed_over", "slot")

    def __init__(self, batch: Batch, copied: Event | None = None, slot: Slot | None = None) -> None:
        self.batch = batch
        self.copied = copied
        self.slot = slot
        self.finished: tuple[Event, ...] | None = None
        self.handed_over = False


class Transfer(ABC):
    """One loader's way to its device, in the order: start, then send and receive in turns.

    Attributes:
        permits: batches that may be sent and not yet received.
    """

    permits: int

    @abstractmethod
    def start(self, tail: Tail | None = None) -> None:
        """A new epoch begins; what was sent and never received is dropped.

        ``tail`` is what remains of the dataset's transforms to be done with its batches.
        """

    @abstractmethod
    def send(self, batch: Batch) -> Sent:
        """Begin to move ``batch``; on any one thread."""

    @abstractmethod
    def receive(self, sent: Sent) -> Batch:
        """The batch, ready for what the calling thread's current stream does next."""

    @abstractmethod
    def enter_thread(self) -> None:
        """Called once on the thread that will send."""


class PlainTransfer(Transfer):
    """For the CPU and for devices without streams of ours: nothing runs ahead of the hand-over."""

    def __init__(self, device: torch.device | None, permits: int) -> None:
        self.permits = permits
        self._device = device
        self._tail: Tail | None = None
        self._pool = HostPool()

    def start(self, tail: Tail | None = None) -> None:
        """Nothing is held."""
        self._tail = tail

    def enter_thread(self) -> None:
        """No device is touched there."""

    def send(self, batch: Batch) -> Sent:
        """The batch, its images normalised in host memory if there is a tail."""
        if self._tail is not None:
            with stage("normalise"):
                batch = self._tail.apply(batch, empty_like=self._pool.empty_like)
        return Sent(batch)

    def receive(self, sent: Sent) -> Batch:
        """The batch, copied if it has to be elsewhere."""
        batch, sent.batch = sent.batch, None  # the thread may still hold what it sent
        return batch if self._device is None else to_device(batch, self._device)


class CudaTransfer(Transfer):
    """Copies on a side stream of its own, as far ahead as ``permits``.

    Attributes:
        pins: whether pageable batches pass through pinned memory; None while it is measured.
    """

    def __init__(
        self,
        cuda: Cuda,
        *,
        ahead: int,
        reuse: bool = False,
        pins: bool | None = None,
    ) -> None:
        self.pins = pins
        self._cuda = cuda
        self._ahead = ahead
        self._reuse = reuse
        self._tail: Tail | None = None
        # Static slots: ``ahead`` batches stay valid, so that fewer can be on their way.
        self.permits = min(ahead, 2) if reuse else ahead
        self._valid = ahead if reuse else 1
        self._alive = ahead + (self.permits if reuse else 2)
        self._stream = cuda.stream()
        self._ring = PinnedRing(cuda)
        self._outstanding: deque[Sent] = deque()
        self._handed_over: deque[Sent] = deque()
        self._free_slots: list[Slot] = []
        # Those on which a batch that is still valid may have been used, and the current one.
        self._recent_streams: deque[Stream] = deque(maxlen=1 + self._valid)
        self._trials: dict[bool, list[float]] = {True: [], False: []}

    def start(self, tail: Tail | None = None) -> None:
        """On the consumer's thread, while nothing is being sent."""
        self._tail = tail
        for sent in [sent for sent in self._outstanding if not sent.handed_over]:
            self._outstanding.remove(sent)
            if sent.slot is not None:  # the next copy into it is behind the last one: one stream
                self._free_slots.append(sent.slot)

    def enter_thread(self) -> None:
        """Give the thread this device, and threads for its copies into pinned memory."""
        self._cuda.enter_thread()

    def send(self, batch: Batch) -> Sent:
        """Queue the copies of ``batch``.

        Raises:
            torch.OutOfMemoryError: the device has no room; says how large a batch is.
        """
        slot = self._make_room()
        try:
            with self._cuda.on(self._stream), stage("copy"):
                sent = (
                    self._measured(batch, slot)
                    if self.pins is None
                    else self._copied(batch, slot, self.pins)
                )
        except BaseException as error:
            if slot is not None:  # the next copy into it is behind the last one: one stream
                self._free_slots.insert(0, slot)
            if isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(self._no_room(batch, error)) from error
            raise
        self._outstanding.append(sent)
        return sent

    def receive(self, sent: Sent) -> Batch:
        """Let the current stream wait for the copies, and for nothing else on the side stream."""
        stream = self._cuda.current_stream()
        # Behind all that the consumer queued until now: older batches are done with.
        self._recent_streams.append(stream)
        distinct: list[Stream] = []
        for recent in self._recent_streams:
            if recent not in distinct:
                distinct.append(recent)
        events = tuple(self._cuda.record(recent) for recent in distinct)
        sent.handed_over = True
        self._handed_over.append(sent)
        while len(self._handed_over) > self._valid:
            self._handed_over.popleft().finished = events
        self._cuda.stream_waits(stream, sent.copied)
        batch, sent.batch = sent.batch, None
        for leaf in leaves(batch):
            if self._is_ours(leaf):
                self._cuda.used_on(leaf, stream)
        # Tensors that the dataset itself put on a device: in the order of the consumer's stream.
        return self._moved_rest(batch)

    def _make_room(self) -> Slot | None:
        """Wait until few enough batches are alive; the slot for the next one (with reuse)."""
        while len(self._outstanding) >= self._alive:
            oldest = self._outstanding.popleft()
            # Received, and a later one too: no more than ``permits`` are ever unreceived.
            assert oldest.finished is not None
            for event in oldest.finished:
                self._cuda.thread_waits(event)
            if oldest.slot is not None:
                self._free_slots.append(oldest.slot)
        if not self._reuse:
            return None
        return self._free_slots.pop(0) if self._free_slots else Slot(self._cuda)

    def _measured(self, batch: Batch, slot: Slot | None) -> Sent:
        """As `_copied`, pinned and not in turns, until it is known which is quicker here."""
        pins = len(self._trials[True]) <= len(self._trials[False])
        begin = time.perf_counter()
        sent = self._copied(batch, slot, pins)
        if nbytes(batch) < _SMALL:
            return sent
        self._cuda.thread_waits(sent.copied)
        self._trials[pins].append(time.perf_counter() - begin)
        if len(self._trials[False]) == _TRIALS:
            # Not the first of each: it pins the memory, and warms up what a first copy needs.
            quickest = {pins: min(seconds[1:]) for pins, seconds in self._trials.items()}
            self.pins = quickest[True] <= quickest[False]
        return sent

    def _copied(self, batch: Batch, slot: Slot | None, pins: bool) -> Sent:
        staged = [leaf for leaf in _plain_leaves(batch) if self._stages(leaf)] if pins else []
        if staged:
            self._ring.next(sum(room_for(leaf) for leaf in staged))
        in_slot = slot is not None and self._tail is None
        if in_slot and slot is not None:
            slot.start()

        def copied(child: Any) -> Any:
            if isinstance(child, torch.Tensor):
                return copied_leaf(child)
            if callable(getattr(child, "to", None)):
                return self._custom(child, pins)
            return map_children(child, copied)

        def copied_leaf(leaf: torch.Tensor) -> torch.Tensor:
            if not _is_plain(leaf):
                return leaf.to(self._cuda.device) if leaf.device.type == "cpu" else leaf
            source = self._ring.place(leaf) if pins and self._stages(leaf) else leaf
            if in_slot and slot is not None:
                return slot.place(source)
            target = self._cuda.empty_like(leaf)
            self._cuda.copy(target, source)
            return target

        moved = copied(batch)
        if self._tail is not None:
            with stage("normalise"):
                moved = self._tail.apply(moved)
            if slot is not None:
                moved = slot.place_all(moved)
        event = self._cuda.record(self._stream)
        if staged:
            self._ring.copied(event)
        return Sent(moved, event, slot)

    def _custom(self, batch: Any, pins: bool) -> Any:
        """By the type's own methods: only it knows which of its tensors must stay."""
        if pins and callable(getattr(batch, "pin_memory", None)):
            batch = batch.pin_memory()
        return to_device(batch, self._cuda.device)

    def _stages(self, leaf: torch.Tensor) -> bool:
        return leaf.numel() > 0 and not self._cuda.is_pinned(leaf)

    def _is_ours(self, leaf: torch.Tensor) -> bool:
        return leaf.device == self._cuda.device

    def _moved_rest(self, batch: Batch) -> Batch:
        if all(self._is_ours(leaf) or leaf.device.type == "cpu" for leaf in leaves(batch)):
            return batch
        return to_device(batch, self._cuda.device)

    def _no_room(self, batch: Batch, error: BaseException) -> str:
        size = nbytes(batch) / 1e6
        return (
            f"no room on {self._cuda.device} for the next batch of {size:.1f} MB "
            f"({describe(batch)}), with up to {self._alive} alive at once (ahead={self._ahead}): "
            f"lower ahead, as in backend=Prefetch(ahead=1), or the batch size. {error}"
        )


def _plain_leaves(batch: Batch) -> list[torch.Tensor]:
    """The tensors that are copied by us: not those inside custom types."""
    found: list[torch.Tensor] = []

    def look(child: Any) -> Any:
        if isinstance(child, torch.Tensor):
            if _is_plain(child):
                found.append(child)
        elif not callable(getattr(child, "to", None)):
            map_children(child, look)
        return child

    look(batch)
    return found


def _is_plain(leaf: torch.Tensor) -> bool:
    """A dense tensor in host memory, whose elements can be copied as bytes."""
    return (
        leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and type(leaf) is torch.Tensor
        and not leaf.is_nested
        and not leaf.is_quantized
        and not leaf.requires_grad
        and not leaf.is_conj()
        and not leaf.is_neg()
    )
