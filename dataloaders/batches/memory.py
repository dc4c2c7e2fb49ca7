"""Recycle host memory for batches: as safe to keep as a fresh tensor, nearly as cheap as reuse.

    HostPool.empty(shape, dtype) ──> tensor ──> its storage ──> one loan ──> a buffer
                                     views, slices, .numpy(), saved for backward ... all keep
                                     the storage alive, and with it the loan
    the storage dies ──> the loan's weak reference fires ──> the buffer is free again

The system provides a fresh batch of many megabytes page by page: each page is zeroed and mapped
when it is first written. A buffer that was used before already has its pages.

The pool is bounded by what the tensors alone would have needed: all its buffers, lent and free,
take no more than the tensors took together at their recent peak.
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
"""The size in bytes from which a buffer is worth about 15 microseconds of Python.

Below it, glibc's malloc hands out memory that the process already has. From here to 32 MiB it may
or may not, depending on the state of its heap; above, it never does (mallopt(3), M_MMAP_THRESHOLD).
"""

_WINDOW = 64  # "recent" means at least this many tensors back, and at most twice as many
_PAGE = mmap.PAGESIZE


class HostMemory(Protocol):
    """A source of memory for batches."""

    @property
    def in_worker(self) -> bool:
        """Whether this memory is for a DataLoader's workers, or for every other process."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense CPU tensor of ``shape`` and ``dtype`` with undefined contents."""

    def pays_for(self, nbytes: int) -> bool:
        """Whether a tensor of ``nbytes`` should come from here, not from ``torch.empty``."""

    def undo(self, tensor: torch.Tensor) -> None:
        """Take back a tensor from `empty` that did not become part of a batch."""


class PinnedMemory:
    """Page-locked tensors from torch's own caching allocator.

    Torch reuses a pinned block only after every copy that was queued from it has run, so a batch
    may be dropped right after ``batch.to("cuda", non_blocking=True)``.
    """

    in_worker = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense, pinned CPU tensor with undefined contents.

        Raises:
            RuntimeError: there is no device to pin memory for.
        """
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def pays_for(self, nbytes: int) -> bool:
        """True from a few pages on: torch's ``pin_memory()`` would copy the batch once more."""
        return nbytes >= _PAGE

    def undo(self, tensor: torch.Tensor) -> None:
        """Do nothing: the memory comes back when the tensor dies."""


class HostPool:
    """Pageable CPU tensors whose memory is used again once nothing refers to it.

    Safe to use from any thread, in weak-reference callbacks and after a fork: no call ever waits
    for another one. A tensor may be kept for ever, even after the pool is gone.

    Args:
        most_free: the bytes that may be unused at any time; by default the smaller of 2 GiB and a
            sixteenth of the machine's memory.
        smallest: tensors of fewer bytes come from ``torch.empty``.
    """

    in_worker = False

    def __init__(self, *, most_free: int | None = None, smallest: int = SMALLEST) -> None:
        self._most_free = _default_most_free() if most_free is None else most_free
        self._smallest = max(1, smallest)
        self._itself = weakref.ref(self)
        # Held for moments and never waited for: a weak-reference callback runs wherever memory is
        # freed, even on the very thread that holds the lock.
        self._lock = threading.Lock()
        self._returned: deque[_Loan] = deque()  # dead loans that nobody has settled yet
        self._lent: dict[int, _Loan] = {}  # a weak reference fires only while it is alive itself
        self._free: list[_Buffer] = []  # by size; among equals the most recently used comes last
        self._free_bytes = 0
        self._needed_bytes = 0  # what the living tensors asked for
        self._slack_bytes = 0  # what their buffers have beyond that
        # Needed bytes, in this window and in the one before.
        self._recent_peak = self._earlier_peak = 0
        self._handed_out = 0
        _POOLS.add(self)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense CPU tensor of ``shape`` and ``dtype`` with undefined contents.

        It equals ``torch.empty(shape, dtype=dtype, device="cpu")``, except that its storage cannot
        grow (``resize_`` to more elements raises). The memory is used again when the last reference
        to the storage is gone, including views and arrays that share it.

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
        """Return a tensor like ``leaf`` with undefined contents, as ``torch.empty_like`` does.

        It comes from the pool if ``leaf`` is contiguous and on the CPU, else it is fresh.
        """
        if leaf.is_cpu and leaf.is_contiguous():
            return self.empty(leaf.shape, dtype or leaf.dtype)
        return torch.empty_like(leaf, dtype=dtype)

    def pays_for(self, nbytes: int) -> bool:
        """Whether a tensor of ``nbytes`` would come from a buffer of this pool."""
        return nbytes >= self._smallest

    def undo(self, tensor: torch.Tensor) -> None:
        """Do nothing: the memory comes back when the tensor dies."""

    def trim(self) -> None:
        """Return all free buffers to the system. Those in use come back to the pool as usual."""
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
        """Return the memory for a tensor of ``nbytes``; None if another call holds the lock."""
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
            loan = _Loan(array, _on_death)
            needed = _whole_pages(nbytes)
            loan.pool, loan.buffer, loan.nbytes = self._itself, buffer, needed
            self._lent[id(loan)] = loan
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
        """Remove and return the smallest free buffer that holds ``nbytes``."""
        free = self._free
        first = bisect_left(free, nbytes, key=_size)
        if first == len(free):
            return None
        size = free[first].nbytes
        # A small tensor may use a large buffer (the last, short batch of an epoch), but a caller
        # that keeps many small tensors must not keep a large buffer for each.
        slack = size - _whole_pages(nbytes)
        if slack and self._slack_bytes + slack > self._peak() // 2:
            return None
        buffer = free.pop(bisect_right(free, size, lo=first, key=_size) - 1)
        self._free_bytes -= size
        return buffer

    def _settle(self, most_free: int | None = None) -> None:
        """Take back what has died. Whoever holds the lock does so before releasing it."""
        while (self._returned or most_free is not None) and self._lock.acquire(blocking=False):
            try:
                self._take_back()
                self._shrink(self._most_free if most_free is None else most_free)
            finally:
                self._lock.release()
            most_free = None

    def _take_back(self) -> None:
        while self._returned:
            loan = self._returned.popleft()
            del self._lent[id(loan)]
            buffer = loan.buffer
            self._needed_bytes -= loan.nbytes
            self._slack_bytes -= buffer.nbytes - loan.nbytes
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
        """Release free buffers down to the bounds, the least recently used first."""
        most_free = min(most_free, self._peak() - self.lent_bytes)
        while self._free and self._free_bytes > most_free:
            oldest = min(range(len(self._free)), key=lambda place: self._free[place].freed_at)
            self._free_bytes -= self._free.pop(oldest).nbytes

    def _forked(self) -> None:
        """In a forked child: take a new lock, and drop the parent's free buffers."""
        self._lock = threading.Lock()
        self._free.clear()
        self._free_bytes = 0


def tensor_over(
    array: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a dense CPU tensor in the memory of ``array`` (uint8, just long enough).

    Only its storage holds ``array``: when ``array`` dies, nothing refers to the storage any more.
    """
    storage = torch.from_numpy(array).untyped_storage()
    # Not a view of that tensor: some operations are forbidden on views.
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(storage, 0, shape)  # type: ignore[call-overload]
    return tensor


class _Buffer:
    """Memory that the pool owns, in whole pages, private to this process."""

    __slots__ = ("freed_at", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _whole_pages(nbytes)
        self.freed_at = 0
        if sys.platform == "win32":  # maps have no flags there, and nothing forks
            self.memory = mmap.mmap(-1, self.nbytes)
        else:  # mmap's default is memory shared with forked children
            self.memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:  # pages of 2 MiB: first use costs a third
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel built without them


class _Loan(weakref.ref["np.ndarray[Any, Any]"]):
    """A weak reference to the array that a tensor's storage holds, and what to do when it dies."""

    __slots__ = ("buffer", "nbytes", "pool")

    pool: weakref.ref[HostPool]  # weak: tensors do not keep a dropped pool and its free buffers
    buffer: _Buffer
    nbytes: int


def _on_death(loan: _Loan) -> None:
    pool = loan.pool()
    if pool is not None:
        pool._returned.append(loan)
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
