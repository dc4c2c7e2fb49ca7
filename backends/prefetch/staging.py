"""A ring of page-locked buffers, through which batches pass on their way to the device.

    batch 0 ──memcpy──> slot 0 ──DMA──> device        event 0: slot 0 may be written again
    batch 1 ──memcpy──> slot 1 ──DMA──> device        event 1
    batch 2 ── waits for event 0 ──> slot 0 ...

Pinning memory costs milliseconds and stalls the device, so that each slot is pinned once and
grows only when a batch does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cuda import Cuda, Event

__all__ = ["PinnedRing"]

_ALIGNMENT = 256


@dataclass
class _Slot:
    memory: torch.Tensor | None = None
    free: Event | None = None
    used: int = 0


class PinnedRing:
    """Page-locked memory for the batches whose copies are under way."""

    def __init__(self, cuda: Cuda, slots: int = 2) -> None:
        self._cuda = cuda
        self._slots = [_Slot() for _ in range(slots)]
        self._turn = 0

    def next(self, nbytes: int) -> None:
        """Turn to the next slot, wait until the copies out of it are done, and empty it.

        ``nbytes`` is what will be placed in it, by `room_for` for each tensor.
        """
        self._turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[self._turn]
        if slot.free is not None:
            self._cuda.thread_waits(slot.free)
            slot.free = None
        slot.used = 0
        if slot.memory is None or slot.memory.numel() < nbytes:
            slot.memory = None  # the old one first: never both
            slot.memory = self._cuda.pinned(nbytes)

    def place(self, leaf: torch.Tensor) -> torch.Tensor:
        """A copy of ``leaf`` in the slot whose turn it is, with the strides of ``leaf.to()``."""
        slot = self._slots[self._turn]
        assert slot.memory is not None
        size = leaf.numel() * leaf.element_size()
        flat = slot.memory[slot.used : slot.used + size].view(leaf.dtype)
        slot.used += room_for(leaf)
        strides = torch.empty_like(leaf, device="meta").stride()
        return flat.as_strided(leaf.shape, strides).copy_(leaf)

    def copied(self, event: Event) -> None:
        """The copies out of the slot whose turn it is are queued; ``event`` is behind them."""
        self._slots[self._turn].free = event


def room_for(leaf: torch.Tensor) -> int:
    """Bytes that ``leaf`` takes in a slot."""
    size = leaf.numel() * leaf.element_size()
    return -(-size // _ALIGNMENT) * _ALIGNMENT
