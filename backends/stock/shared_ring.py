"""Recycle shared memory in a worker, instead of a new segment for each batch.

    worker      collate into a free slot's segment ──> result queue: slot, shape, dtype
                                                       (and the segment, when it is new)
    consumer    a tensor over that segment, kept mapped; once nothing refers to the tensor,
                the slot's byte in ``flags`` tells the worker

A new segment costs page faults in the worker, and again in the consumer that maps it. The tensors
are as safe to keep as torch's: a slot is free again only when the last reference to its tensor is
gone. No other process can still see the memory then: the slots of a process that was forked
meanwhile are retired (see `_retire`), and a tensor that is sent elsewhere is copied, because it
counts as ordinary memory (``is_shared()`` is False).
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from dataloaders.batches.memory import SMALLEST, tensor_over
from dataloaders.machine.resources import shm_room

__all__ = ["RingFull", "SharedRing"]

SLOTS = 64
"""The most segments of a worker; memory is usually the tighter limit, see ``_Worker.empty``."""

_FREE, _IN_USE, _RETIRED = range(3)


class RingFull(Exception):
    """There is no slot and no room for a new one: this tensor goes into a segment of its own."""


class SharedRing:
    """The slots of all workers of one iterator; a `HostMemory` in the workers.

    Lives in the consumer's process and is pickled or inherited into each worker.

    Args:
        num_workers: the number of workers.
        prefetch_factor: the batches that one worker may have finished or in progress.
    """

    in_worker = True

    def __init__(self, num_workers: int, prefetch_factor: int) -> None:
        self._number = next(_NUMBERS)
        self._flags = torch.zeros(num_workers, SLOTS, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        # Two more: the one that the consumer holds, and the one that it is being given.
        self._batches = prefetch_factor + 2
        self._worker: _Worker | None = None
        self._start()
        _RINGS[self._number] = self

    def _start(self) -> None:
        self._bytes: np.ndarray[Any, Any] = self._flags.numpy()
        self._itself = weakref.ref(self)
        self._segments: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
        self._lent: dict[int, _Loan] = {}

    def __getstate__(self) -> dict[str, Any]:
        names = ("_number", "_flags", "_batches")
        return {"_worker": None, **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # In a worker

    def pays_for(self, nbytes: int) -> bool:
        """Whether a tensor of ``nbytes`` would go into a slot."""
        return nbytes >= SMALLEST

    def begin_batch(self) -> None:
        """Begin a batch: `empty` makes the tensors of this batch from here on."""
        if self._worker is not None:
            self._worker.batch_bytes = 0
            self._worker.batch_slots.clear()

    def undo_batch(self) -> None:
        """Take back all tensors from `empty` since `begin_batch`: the batch will not be sent."""
        if self._worker is not None:
            for slot in self._worker.batch_slots:
                self._worker.give_up(slot)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense tensor in a free slot, contents undefined; to be sent once, or undone.

        Raises:
            RingFull: there is no free slot, or too little shared memory for a new one.
        """
        if self._worker is None:
            info = get_worker_info()
            if info is None:
                raise RingFull("only a DataLoader's worker has slots")
            row = self._bytes[info.id]
            self._worker = _Worker(self._number, info.id, info.num_workers, row, self._batches)
        return self._worker.empty(tuple(shape), dtype)

    def memory(self, size: int) -> torch.Tensor | None:
        """Return a slot's uint8 memory of at least ``size`` bytes, up to an eighth more.

        Batches of bytes differ in size: rounded up, their slots serve again. None: there is none.
        """
        step = 1 << max(0, size.bit_length() - 4)
        try:
            return self.empty((-(-size // step) * step,), torch.uint8) if size >= SMALLEST else None
        except RingFull:
            return None

    # In the consumer

    def _receive(
        self,
        place: tuple[int, int],
        segment: torch.Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        dropped: list[int],
    ) -> torch.Tensor:
        for slot in dropped:
            self._segments.pop((place[0], slot), None)
        if segment is not None:
            self._segments[place] = segment.numpy()
        array = self._segments[place][: _nbytes(shape, dtype)]
        loan = _Loan(array, _on_death)
        loan.ring, loan.place = self._itself, place
        self._lent[id(loan)] = loan
        return tensor_over(array, shape, dtype)

    def _retire(self) -> None:
        """Retire slots before a fork: the child will share the memory of every tensor alive now."""
        for key, loan in list(self._lent.items()):
            if self._lent.pop(key, None) is not None and loan() is not None:
                self._segments.pop(loan.place, None)
                self._bytes[loan.place] = _RETIRED

    def _forked(self) -> None:
        """In a forked child: detach from the workers, which are the parent's."""
        self._lent.clear()
        self._segments.clear()


class _Worker:
    """One worker's slots and their segments, as that worker sees them."""

    def __init__(
        self, ring: int, row: int, workers: int, flags: np.ndarray[Any, Any], batches: int
    ) -> None:
        self.batch_bytes = 0
        self.batch_slots: list[int] = []
        self._ring = ring
        self._row = row
        self._workers = workers
        self._flags = flags
        self._batches = batches
        self._segments: list[torch.Tensor | None] = [None] * SLOTS
        self._held_bytes = 0
        self._largest_batch = 0
        self._dropped: list[
            int
        ] = []  # segments that the consumer may unmap; sent with the next tensor

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = _nbytes(shape, dtype)
        self.batch_bytes += nbytes
        self._largest_batch = max(self._largest_batch, self.batch_bytes)
        slot, is_new = self._best_fit(nbytes), False
        if slot is None:
            slot, is_new = self._new_segment(nbytes), True
        self._flags[slot] = _IN_USE
        self.batch_slots.append(slot)
        segment = self._segments[slot]
        assert segment is not None
        whole = torch.empty(0, dtype=dtype, device="cpu")
        whole.set_(segment.untyped_storage(), 0, shape)  # type: ignore[call-overload]
        tensor = whole.as_subclass(_InSlot)
        tensor.ring, tensor.place = self._ring, (self._row, slot)
        tensor.segment = segment if is_new else None
        tensor.dropped, self._dropped = self._dropped, []
        return tensor

    def give_up(self, slot: int) -> None:
        # With its segment, which the consumer may never have received.
        self._drop(slot)
        self._flags[slot] = _FREE

    def _best_fit(self, nbytes: int) -> int | None:
        best = None
        best_bytes = 0
        for slot in np.flatnonzero(self._flags != _IN_USE).tolist():
            if self._flags[slot] == _RETIRED:
                self._drop(slot)
                self._flags[slot] = _FREE
            segment = self._segments[slot]
            size = 0 if segment is None else segment.numel()
            if size >= nbytes and (best is None or size < best_bytes):
                best, best_bytes = slot, size
        return best

    def _new_segment(self, nbytes: int) -> int:
        free = np.flatnonzero(self._flags == _FREE).tolist()
        for slot in free:  # none of them is large enough
            self._drop(slot)
            if self._fits(nbytes):
                break
        if not free or not self._fits(nbytes):
            raise RingFull
        # Every worker may be about to allocate. Where room is short, torch's own way takes less.
        room = shm_room()
        if room is not None and room < 2 * nbytes * self._workers:
            raise RingFull
        slot = int(free[0])
        segment = torch.empty(nbytes, dtype=torch.uint8, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self._segments[slot] = segment
        self._held_bytes += nbytes
        return slot

    def _fits(self, nbytes: int) -> bool:
        return self._held_bytes + nbytes <= self._batches * self._largest_batch

    def _drop(self, slot: int) -> None:
        segment = self._segments[slot]
        if segment is not None:
            self._held_bytes -= segment.numel()
            self._segments[slot] = None
            self._dropped.append(slot)


class _InSlot(torch.Tensor):
    """A tensor in a slot; it arrives in the consumer as a plain one."""

    ring: int
    place: tuple[int, int]
    segment: torch.Tensor | None
    dropped: list[int]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        form = tuple(self.shape), self.dtype
        return _arrive, (self.ring, self.place, self.segment, *form, self.dropped)


def _arrive(
    number: int,
    place: tuple[int, int],
    segment: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    dropped: list[int],
) -> torch.Tensor:
    ring = _RINGS.get(number)
    if ring is None:
        raise RuntimeError("this batch's iterator is gone: keep it while its batches arrive")
    return ring._receive(place, segment, shape, dtype, dropped)


class _Loan(weakref.ref["np.ndarray[Any, Any]"]):
    """A weak reference to the array that a delivered tensor's storage holds."""

    __slots__ = ("place", "ring")

    ring: weakref.ref[SharedRing]
    place: tuple[int, int]


def _on_death(loan: _Loan) -> None:
    ring = loan.ring()
    if ring is not None and ring._lent.pop(id(loan), None) is not None:
        ring._bytes[loan.place] = _FREE


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = 1
    for size in shape:
        count *= size
    return count * dtype.itemsize


_NUMBERS = itertools.count()
_RINGS: weakref.WeakValueDictionary[int, SharedRing] = weakref.WeakValueDictionary()


def _before_fork() -> None:
    for ring in list(_RINGS.values()):
        ring._retire()


def _in_forked_child() -> None:
    for ring in list(_RINGS.values()):
        ring._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_forked_child)
