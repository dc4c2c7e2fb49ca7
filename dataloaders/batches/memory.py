"""Host memory for batches: as safe to keep as a fresh tensor, nearly as cheap as a reused one.

    HostPool.empty(shape, dtype) ──> tensor ──> its storage ──> one lending ──> a buffer
                                     views, slices, .numpy(), saved for backward ... all keep
                                     the storage, and with it the lending, alive
    the storage dies ──> the lending's weak reference fires ──> the buffer is free again

A fresh batch of many megabytes comes from the system page by page, each page zeroed and mapped
when it is first written. A buffer that was used before has its pages already.

How much the pool holds is bound by what the tensors alone would have held: all its buffers, lent
and free, take no more than the tensors needed together at the worst recent moment.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right, insort_right
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from dataloaders.machine.resources import total_memory

__all__ = ["SMALLEST", "HostMemory", "HostPool", "PinnedMemory", "tensor_over"]

SMALLEST = 2 << 20
"""Bytes of a tensor from which on a buffer is worth its about 15 microseconds of Python.

Below, glibc's malloc hands out memory that the process already has. From here to 32 MiB it may or
may not, by the state of its heap; above, never (mallopt(3), M_MMAP_THRESHOLD)."""

_WINDOW = 64  # hand-outs over which "recent" reaches back, at least; at most twice as many
_PAGE = mmap.PAGESIZE


class HostMemory(Protocol):
    """Where the memory of a batch comes from."""

    @property
    def in_worker(self) -> bool:
        """Whether it is memory for a DataLoader's workers, or for every other process."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A dense CPU tensor of ``shape`` and ``dtype``, its contents undefined."""

    def pays_for(self, nbytes: int) -> bool:
        """Whether a tensor of ``nbytes`` should come from here, not from ``torch.empty``."""

    def undo(self, tensor: torch.Tensor) -> None:
        """Told of a tensor from `empty` that did not become part of a batch."""


class PinnedMemory:
    """Page-locked tensors, from torch's own pool of them.

    torch takes a pinned block back only when every copy that was queued from it has run, so a
    batch may be dropped right after ``batch.to("cuda", non_blocking=True)``.
    """

    in_worker = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A dense, pinned CPU tensor, its contents undefined.

        Raises:
            RuntimeError: there is no device to pin memory for.
        """
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def pays_for(self, nbytes: int) -> bool:
        """True from a few pages on: torch's ``pin_memory()`` would copy the batch once more."""
        return nbytes >= _PAGE

    def undo(self, tensor: torch.Tensor) -> None:
        """Nothing to do: its memory comes back when it dies."""


class HostPool:
    """Pageable CPU tensors whose memory serves again once nothing refers to it.

    Safe to use from any thread, in weak-reference callbacks and after a fork: no call ever waits
    for another one. A tensor may be kept for ever, also when the pool is gone.

    Args:
        most_free: bytes that may lie unused at any time; by default the smaller of 2 GiB and a
            sixteenth of the machine's memory.
        smallest: tensors of fewer bytes come from ``torch.empty``.
    """

    in_worker = False

    def __init__(self, *, most_free: int | None = None, smallest: int = SMALLEST) -> None:
        self._most_free = _default_most_free() if most_free is None else most_free
        self._smallest = max(1, smallest)
        self._itself = weakref.ref(self)
        # Held for moments and never waited for: a weak-reference callback runs wherever memory
        # is freed, also in the very thread that holds the lock.
        self._lock = threading.Lock()
        self._returned: deque[_Lending] = deque()  # dead lendings that nobody has settled yet
        self._lent: dict[int, _Lending] = {}  # a weak reference fires only while it lives itself
        self._free: list[_Buffer] = []  # by size; among equals the one used last comes last
        self._free_bytes = 0
        self._needed_bytes = 0  # what the living tensors asked for
        self._slack_bytes = 0  # what their buffers have beyond that
        self._recent_peak = self._earlier_peak = 0  # of the needed bytes, in this window and before
        self._handed_out = 0
        _POOLS.add(self)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A dense CPU tensor of ``shape`` and ``dtype``, its contents undefined.

        The same as ``torch.empty(shape, dtype=dtype, device="cpu")``, except that its storage
        cannot grow (``resize_`` to more elements raises). The memory is used again when the last
        reference to the storage is gone, views and arrays that share it included.

        Raises:
            RuntimeError: a size is negative, or there is not enough memory.
        """
        shape = tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        array = self._lend(nbytes) if nbytes >= self._smallest else None
        if array is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return tensor_over(array, shape, dtype)

    def empty_like(self, leaf: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of ``leaf``'s shape, as ``torch.empty_like`` makes it, its contents undefined.

        Out of the pool where ``leaf`` is contiguous and on the CPU; else fresh.
        """
        if leaf.is_cpu and leaf.is_contiguous():
            return self.empty(leaf.shape, dtype or leaf.dtype)
        return torch.empty_like(leaf, dtype=dtype)

    def pays_for(self, nbytes: int) -> bool:
        """Whether a tensor of ``nbytes`` would come out of a buffer of this pool."""
        return nbytes >= self._smallest

    def undo(self, tensor: torch.Tensor) -> None:
        """Nothing to do: its memory comes back when it dies."""

    def trim(self) -> None:
        """Give all free buffers back to the system. Those in use come back to the pool as ever."""
        self._settle(most_free=0)

    @property
    def free_bytes(self) -> int:
        """Bytes of buffers that nothing refers to at present."""
        return self._free_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes of buffers that tensors refer to at present."""
        return self._needed_bytes + self._slack_bytes

    def _lend(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        """The memory of a tensor of ``nbytes``; None if somebody else is in here right now."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._take_back()
            buffer = self._best_fit(nbytes)
            if buffer is None:
                try:
                    buffer = _Buffer(nbytes)
                except (MemoryError, OSError, ValueError):
                    self._shrink(most_free=0)
                    return None  # torch tries once more, and raises its own error
            array = np.frombuffer(buffer.memory, np.uint8, nbytes)
            lending = _Lending(array, _on_death)
            needed = _whole_pages(nbytes)
            lending.pool, lending.buffer, lending.nbytes = self._itself, buffer, needed
            self._lent[id(lending)] = lending
            self._needed_bytes += needed
            self._slack_bytes += buffer.nbytes - needed
            self._note_peak()
            self._shrink(self._most_free)
        finally:
            self._lock.release()
        if self._returned:
            self._settle()
        return array

    def _best_fit(self, nbytes: int) -> _Buffer | None:
        """The smallest free buffer that holds ``nbytes``, taken off the list of free ones."""
        free = self._free
        first = bisect_left(free, nbytes, key=_size)
        if first == len(free):
            return None
        size = free[first].nbytes
        # A small tensor may sit in a large buffer (the last, short batch of an epoch), but
        # somebody who keeps many small ones must not keep a large buffer for each.
        slack = size - _whole_pages(nbytes)
        if slack and self._slack_bytes + slack > self._peak() // 2:
            return None
        buffer = free.pop(bisect_right(free, size, lo=first, key=_size) - 1)
        self._free_bytes -= size
        return buffer

    def _settle(self, most_free: int | None = None) -> None:
        """Take back what has died. Whoever holds the lock does so when letting go of it."""
        while (self._returned or most_free is not None) and self._lock.acquire(blocking=False):
            try:
                self._take_back()
                self._shrink(self._most_free if most_free is None else most_free)
            finally:
                self._lock.release()
            most_free = None

    def _take_back(self) -> None:
        while self._returned:
            lending = self._returned.popleft()
            del self._lent[id(lending)]
            buffer = lending.buffer
            self._needed_bytes -= lending.nbytes
            self._slack_bytes -= buffer.nbytes - lending.nbytes
            buffer.freed_at = self._handed_out
            insort_right(self._free, buffer, key=_size)
            self._free_bytes += buffer.nbytes

    def _note_peak(self) -> None:
        self._recent_peak = max(self._recent_peak, self._needed_bytes)
        self._handed_out += 1
        if self._handed_out % _WINDOW == 0:
            self._earlier_peak, self._recent_peak = self._recent_peak, self._needed_bytes

    def _peak(self) -> int:
        return max(self._earlier_peak, self._recent_peak)

    def _shrink(self, most_free: int) -> None:
        """Release free buffers, those first that were used longest ago, down to the bounds."""
        most_free = min(most_free, self._peak() - self.lent_bytes)
        while self._free and self._free_bytes > most_free:
            oldest = min(range(len(self._free)), key=lambda place: self._free[place].freed_at)
            self._free_bytes -= self._free.pop(oldest).nbytes

    def _forked(self) -> None:
        """In a forked child: its own lock, and none of the parent's free buffers."""
        self._lock = threading.Lock()
        self._free.clear()
        self._free_bytes = 0


def tensor_over(
    array: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A dense CPU tensor in the memory of ``array`` (uint8, just long enough).

    Its storage holds ``array``, and nothing else does that comes from the tensor: when ``array``
    dies, nothing refers to the storage any more.
    """
    storage = torch.from_numpy(array).untyped_storage()
    # Not a view of that tensor: some operations are forbidden on views.
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(storage, 0, shape)  # type: ignore[call-overload]
    return tensor


class _Buffer:
    """Memory of the pool's own, in whole pages, private to this process."""

    __slots__ = ("freed_at", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _whole_pages(nbytes)
        self.freed_at = 0
        if sys.platform == "win32":  # its maps have no flags, and nothing forks
            self.memory = mmap.mmap(-1, self.nbytes)
        else:  # not mmap's default, which is memory shared with forked children
            self.memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:  # pages of 2 MiB: a buffer's first use costs a third
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel built without them


class _Lending(weakref.ref["np.ndarray[Any, Any]"]):
    """A weak reference to the array that a tensor's storage holds, and what to do at its end."""

    __slots__ = ("buffer", "nbytes", "pool")

    pool: weakref.ref[HostPool]  # weak: tensors do not keep a dropped pool and its free buffers
    buffer: _Buffer
    nbytes: int


def _on_death(lending: _Lending) -> None:
    pool = lending.pool()
    if pool is not None:
        pool._returned.append(lending)
        pool._settle()


def _size(buffer: _Buffer) -> int:
    return buffer.nbytes


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _default_most_free() -> int:
    return min(2 << 30, total_memory() // 16)


_POOLS: weakref.WeakSet[HostPool] = weakref.WeakSet()


def _in_forked_child() -> None:
    for pool in _POOLS:
        pool._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
