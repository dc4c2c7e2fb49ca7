"""Copy host batches to the device, and let the consumer's stream wait for them.

    send()     on the prefetch thread    pinned memory ──> copies on the side stream ──> event
    receive()  on the consumer's thread  its current stream waits for that event; another event,
                                         after what was queued so far, marks older batches finished

A batch is *finished* once the consumer's work on it is done. At most ``_alive`` batches are on the
device: before another one is sent, the oldest has to be finished. The allocator reuses memory only
after the work of every stream that used it (``record_stream``), so a batch may be kept for ever.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch.profiler import record_function

from dataloaders.backend import Remainder
from dataloaders.batches.tree import (
    Batch,
    describe,
    leaves,
    map_children,
    nbytes,
    to_device,
)
from dataloaders.errors import CapacityWarning

from .device import Device, Event, Stream


class Sent:
    """A batch whose copies are queued.

    Attributes:
        batch: complete on the device once ``copied`` has happened; None after it was received.
        copied: the event after its copies; None if nothing is queued.
        finished: events after which nobody reads it; None until they are known.
        received: whether the consumer has received it.
    """

    __slots__ = ("batch", "copied", "finished", "received")

    def __init__(self, batch: Batch, copied: Event | None = None) -> None:
        self.batch = batch
        self.copied = copied
        self.finished: tuple[Event, ...] | None = None
        self.received = False


class Transfer:
    """Moves the batches of one loader: start, then send and receive in turns.

    This one serves the CPU and devices without streams: nothing is copied before it is received.

    Attributes:
        slots: how many batches may be sent but not yet received.
        remainder: the work that is left to do on each batch, if any.
    """

    remainder: Remainder | None = None

    def __init__(self, device: torch.device, slots: int) -> None:
        self.slots = slots
        self._to = device

    def enter_thread(self) -> None:
        """Prepare the prefetch thread, which calls this once before it sends."""

    def start(self) -> None:
        """Begin an epoch on the thread that sends; drop what was sent and never received."""

    def send(self, batch: Batch) -> Sent:
        """Begin to move ``batch``, and do the remainder; on one thread at a time."""
        if self.remainder is not None:
            with record_function("dataloaders: remainder"):
                batch = self.remainder.apply(batch, lambda host: host)
        return Sent(batch)

    def receive(self, sent: Sent) -> Batch:
        """Return the batch, ready for what the calling thread's current stream does next."""
        batch, sent.batch = sent.batch, None  # the thread may still hold what it sent
        if self.remainder is not None:
            batch = self.remainder.received(batch)
        return batch if self._to.type == "cpu" else to_device(batch, self._to)


class StreamTransfer(Transfer):
    """Copies batches on a side stream, up to ``slots`` batches ahead.

    Args:
        device: the accelerator.
        ahead: batches to have on the device before they are asked for.
        pins: whether pageable tensors are copied into pinned memory first.
    """

    def __init__(self, device: Device, *, ahead: int, pins: bool = True) -> None:
        super().__init__(device.device, ahead)
        self._device = device
        self._pins = pins
        self._alive = ahead + 2
        self._stream = device.stream()
        self._outstanding: deque[Sent] = deque()  # the sending thread's
        self._unseen = False  # whether an object holds tensors that `leaves` does not find
        # The consumer's: the batch in use, and the stream on which it was handed over.
        self._received: tuple[Sent, Stream] | None = None

    def start(self) -> None:
        """Drop what was never received."""
        self._outstanding = deque(sent for sent in self._outstanding if sent.received)

    def enter_thread(self) -> None:
        """Give the thread this device, and threads for its copies into pinned memory."""
        self._device.enter_thread()

    def send(self, batch: Batch) -> Sent:
        """Queue the copies of ``batch``, once few enough batches are on the device.

        Raises:
            torch.OutOfMemoryError: the device has no room; says how large a batch is.
        """
        self._make_room()
        try:
            with self._device.on(self._stream), record_function("dataloaders: copy"):
                sent = Sent(self._copied(batch), self._device.record(self._stream))
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(self._no_room(batch, error)) from error
        self._outstanding.append(sent)
        return sent

    def receive(self, sent: Sent) -> Batch:
        """Let the current stream wait for the copies, and for nothing else on the side stream."""
        stream = self._device.current_stream()
        if self._received is not None:
            # The previous batch is finished after all that the consumer has queued so far.
            before, its_stream = self._received
            before.finished = tuple(map(self._device.record, {its_stream, stream}))
        self._received, sent.received = (sent, stream), True
        self._device.stream_waits(stream, sent.copied)
        batch, sent.batch = sent.batch, None
        for leaf in leaves(batch):
            if leaf.device == self._device.device and _is_dense(leaf):
                self._device.used_on(leaf, stream)
        if self.remainder is not None:
            whole = self.remainder.received(batch)
            batch = batch if whole is batch else to_device(whole, self._device.device)
        if self._unseen or any(leaf.is_cpu and not _is_plain(leaf) for leaf in leaves(batch)):
            batch = self._moved(batch)
        return batch

    def _make_room(self) -> None:
        while len(self._outstanding) >= self._alive:
            oldest = self._outstanding.popleft()
            # It was received, and a later one too, since at most ``slots`` are not yet received.
            assert oldest.finished is not None
            for event in oldest.finished:
                self._device.thread_waits(event)

    def _copied(self, batch: Batch) -> Batch:
        def copied(child: Any) -> Any:
            if isinstance(child, torch.Tensor):
                return self._copied_leaf(child)
            if callable(getattr(child, "to", None)):
                return self._copied_custom(child)
            return map_children(child, copied)

        if self.remainder is None:
            return copied(batch)
        with record_function("dataloaders: remainder"):
            return self.remainder.apply(batch, copied)

    def _copied_leaf(self, leaf: torch.Tensor) -> torch.Tensor:
        if not _is_plain(leaf):
            return leaf  # on a device already, or moved on the consumer's stream
        source = self._pinned(leaf.as_subclass(torch.Tensor))
        target = self._device.empty_like(source)
        self._device.copy(target, source)
        if type(leaf) is torch.Tensor:
            return target
        typed = target.as_subclass(type(leaf))
        typed.__dict__.update(vars(leaf))
        return typed

    def _copied_custom(self, batch: Any) -> Any:
        """Copy by the type's own methods, since only the type knows which tensors must stay."""
        found = list(leaves(batch))
        # A remainder may have put tensors on the device, which cannot be pinned.
        pins = self._pins and all(leaf.is_cpu for leaf in found)
        if pins and callable(getattr(batch, "pin_memory", None)):
            batch = batch.pin_memory()
        if _hides_tensors(batch):
            self._unseen = True
            return batch
        return to_device(batch, self._device.device)

    def _pinned(self, leaf: torch.Tensor) -> torch.Tensor:
        """Return ``leaf`` or a copy of it in pinned memory."""
        if not self._pins or leaf.numel() == 0 or self._device.is_pinned(leaf):
            return leaf
        try:
            pinned = self._device.pinned_like(leaf)
        except RuntimeError as error:
            self._pins = False
            warnings.warn(
                f"prefetch: {nbytes(leaf) / 1e6:.1f} MB of host memory could not be pinned, so "
                "batches are copied from pageable memory from now on, which is slower; free host "
                "memory or raise the limit of locked memory (ulimit -l), or say "
                f"Prefetch(pin_memory=False): {error}",
                CapacityWarning,
                stacklevel=2,
            )
            return leaf
        return pinned.copy_(leaf)

    def _moved(self, child: Any) -> Any:
        """Move what was left on the host, since its use on a stream cannot be recorded.

        Such as sparse and nested tensors, and objects that hide theirs.
        """
        if isinstance(child, torch.Tensor):
            left = child.is_cpu and not _is_plain(child)
        else:
            left = callable(getattr(child, "to", None)) and _hides_tensors(child)
        if left:
            return to_device(child, self._device.device)
        return map_children(child, self._moved)

    def _no_room(self, batch: Batch, error: BaseException) -> str:
        size = nbytes(batch) / 1e6
        return (
            f"no room on {self._device.device} for the next batch of {size:.1f} MB "
            f"({describe(batch)}), with up to {self._alive} alive at once (ahead={self.slots}): "
            f"lower ahead, as in backend=Prefetch(ahead=1), or the batch size. {error}"
        )


def _hides_tensors(batch: Any) -> bool:
    """Whether an object with a ``.to()`` may hold tensors whose use on a stream is not recorded.

    That is if `leaves` finds none, if an attribute is such an object, too, or if one is sparse.
    """
    held = getattr(batch, "__dict__", {}).values()
    inner = [each for each in held if not isinstance(each, (torch.Tensor, Mapping, list, tuple))]
    found = list(map(_is_dense, leaves(batch)))
    return not found or not all(found) or any(callable(getattr(each, "to", None)) for each in inner)


def _is_dense(leaf: torch.Tensor) -> bool:
    """Whether ``record_stream`` takes ``leaf``, if it is on a device."""
    return leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized


def _is_plain(leaf: torch.Tensor) -> bool:
    """Whether ``leaf`` is a dense tensor in host memory, whose elements can be copied as bytes.

    Subclasses with storage of their own count (torchvision's tv_tensors, MONAI's MetaTensor), but
    not those that wrap other tensors.
    """
    return (
        leaf.device.type == "cpu"
        and _is_dense(leaf)
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and type(leaf).to is torch.Tensor.to
        and not leaf.requires_grad
        and not leaf.is_conj()
        and not leaf.is_neg()
    )
