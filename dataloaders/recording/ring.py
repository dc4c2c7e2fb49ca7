"""Shared memory for the files of recorded batches, used again by the worker that owns it.

    worker      a free slot's segment <── bytes ──> result queue: place, size, a new segment
    consumer    maps a segment once; when nothing refers to a batch's bytes any more, the slot's
                flag says so to the worker

A new segment for each batch would cost page faults in the worker, and again in the consumer.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

import torch
from torch.utils.data import get_worker_info

from dataloaders.machine.resources import shm_room

SMALLEST = 2 << 20
"""The size in bytes from which a slot pays."""


class FileRing:
    """The slots of all workers of one iterator; lives in the consumer, and is sent to each worker.

    Args:
        workers: their number.
        slots: of each worker.
    """

    def __init__(self, workers: int, slots: int) -> None:
        self._number = next(_NUMBERS)
        self._taken = segment(workers * slots).zero_().view(-1, slots)
        self._pid = os.getpid()
        self._segments: dict[tuple[int, int], torch.Tensor] = {}  # as this process sees them
        _RINGS[self._number] = self

    def memory(self, size: int) -> torch.Tensor | None:
        """Return uint8 memory in a free slot of this worker, to be sent once; None without one."""
        info: Any = get_worker_info()
        if info is None or size < SMALLEST:
            return None
        taken = self._taken[info.id].tolist()
        free = [(info.id, slot) for slot, flag in enumerate(taken) if not flag]
        if not free:
            return None
        new, owned = None, self._segments
        fits = [place for place in free if place in owned and len(owned[place]) >= size]
        place = min(fits, key=lambda each: len(owned[each])) if fits else free[0]
        if not fits:
            # Every worker may be about to take as much.
            room = shm_room()
            if room is not None and room < 2 * size * info.num_workers:
                return None
            new = owned[place] = segment(size + size // 8)  # batches of files differ in size
        self._taken[place] = 1
        memory = owned[place][:size].as_subclass(_InSlot)
        memory.sent = self._number, place, size, new
        return memory

    def arrived(self, place: tuple[int, int], size: int, new: torch.Tensor | None) -> torch.Tensor:
        """Return the bytes that a worker has sent."""
        if new is not None:
            self._segments[place] = new
        array = self._segments[place].numpy()[:size]
        weakref.finalize(array, self._release, place).atexit = False
        return torch.from_numpy(array)

    def _release(self, place: tuple[int, int]) -> None:
        if os.getpid() == self._pid:  # a forked child's copy is not the batch
            self._taken[place] = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_segments": {}}


class _InSlot(torch.Tensor):
    """Bytes in a slot; they arrive in the consumer as a plain tensor."""

    sent: tuple[int, tuple[int, int], int, torch.Tensor | None]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _arrived, self.sent


def _arrived(
    number: int, place: tuple[int, int], size: int, new: torch.Tensor | None
) -> torch.Tensor:
    ring = _RINGS.get(number)
    if ring is None:
        raise RuntimeError("this batch's iterator is gone: keep it while its batches arrive")
    return ring.arrived(place, size, new)


def segment(size: int) -> torch.Tensor:
    """Return new memory that a worker's queue sends without a copy."""
    empty: Any = torch.empty(0, dtype=torch.uint8, device="cpu")
    shared: torch.Tensor = empty.set_(empty.untyped_storage()._new_shared(size), 0, (size,))
    return shared


_NUMBERS = itertools.count()
_RINGS: weakref.WeakValueDictionary[int, FileRing] = weakref.WeakValueDictionary()
