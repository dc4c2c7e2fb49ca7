"""Recycle host memory for batches: as safe to keep as a fresh tensor, nearly as cheap as reuse.

    HostPool.empty(shape, dtype) ──> tensor ──> its storage ──> one view of a buffer
                                     views, slices, .numpy(), saved for backward ... all keep
                                     the storage alive, and with it that view
    the next empty() ──> a buffer to which nothing but the pool refers is free again

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
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from dataloaders.machine.resources import total_memory

SMALLEST = 2 << 20
"""The size in bytes from which a buffer is worth about 15 microseconds of Python.

Below it, glibc's malloc hands out memory that the process already has. From here to 32 MiB it may
or may not, depending on the state of its heap; above, it never does (mallopt(3), M_MMAP_THRESHOLD).
"""

_WINDOW = 64  # "recent" means at least this many tensors back, and at most twice as many
_PAGE = mmap.PAGESIZE


class HostMemory(Protocol):
    """A source of memory for batches."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense CPU tensor of ``shape`` and ``dtype`` with undefined contents."""

    def pays_for(self, nbytes: int) -> bool:
        """Whether a tensor of ``nbytes`` should come from here, not from ``torch.empty``."""


class PinnedMemory:
    """Page-locked tensors from torch's own caching allocator.

    Torch reuses a pinned block only after every copy that was queued from it has run, so a batch
    may be dropped right after ``batch.to("cuda", non_blocking=True)``.
    """

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense, pinned CPU tensor with undefined contents.

        Raises:
            RuntimeError: there is no device to pin memory for.
        """
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def pays_for(self, nbytes: int) -> bool:
        """True from a few pages on: torch's ``pin_memory()`` would copy the batch once more."""
        return nbytes >= _PAGE


class HostPool:
    """Pageable CPU tensors whose memory is used again once nothing refers to it.

    Safe to use from any thread, in finalizers and after a fork: no call ever waits for another
    one. A tensor may be kept for ever, even after the pool is gone.

    Args:
        most_free: the bytes that may be unused at any time; by default the smaller of 2 GiB and a
            sixteenth of the machine's memory.
        smallest: tensors of fewer bytes come from ``torch.empty``.
    """

    def __init__(self, *, most_free: int | None = None, smallest: int = SMALLEST) -> None:
        self._most_free = _default_most_free() if most_free is None else most_free
        self._smallest = max(1, smallest)
        # Never waited for: the collector may make a call in the midst of another one's.
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._handed_out = 0
        # Bytes that the living tensors asked for, at most: in this window and in the one before.
        self._recent_peak = self._earlier_peak = 0
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

        It comes from the pool if ``leaf`` has a contiguous tensor's strides and is on the CPU.
        """
        if leaf.is_cpu and leaf.is_contiguous():
            out = self.empty(leaf.shape, dtype or leaf.dtype)
            if out.stride() == leaf.stride():  # that of a size 1 may be any
                return out
        return torch.empty_like(leaf, dtype=dtype)

    def pays_for(self, nbytes: int) -> bool:
        """Whether a tensor of ``nbytes`` would come from a buffer of this pool."""
        return nbytes >= self._smallest

    @property
    def free_bytes(self) -> int:
        """Bytes of buffers that nothing refers to at present."""
        self._tidy()
        return sum(buffer.nbytes for buffer in self._buffers if not buffer.needed)

    @property
    def lent_bytes(self) -> int:
        """Bytes of buffers that tensors refer to at present."""
        self._tidy()
        return self._lent_bytes()

    def _lend(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Return the memory for a tensor of ``nbytes``; None if another call holds the lock."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._look()
            buffer = self._best_fit(nbytes)
            if buffer is None:
                try:
                    buffer = _Buffer(nbytes)
                except (MemoryError, OSError, ValueError):
                    self._shrink(most_free=0)
                    return None  # torch tries once more, and raises its own error
                self._buffers.append(buffer)
            array = np.frombuffer(buffer.memory, np.uint8, nbytes)
            buffer.needed = _whole_pages(nbytes)
            self._note_peak()
            self._shrink(self._most_free)
            return array
        finally:
            self._lock.release()

    def _tidy(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._look()
                self._shrink(self._most_free)
            finally:
                self._lock.release()

    def _look(self) -> None:
        """Find out which buffers have become free."""
        for buffer in self._buffers:
            if buffer.needed and buffer.references() == _UNUSED:
                buffer.needed, buffer.freed_at = 0, self._handed_out

    def _best_fit(self, nbytes: int) -> _Buffer | None:
        """Return the smallest free buffer that holds ``nbytes``."""
        fits = [each for each in self._buffers if not each.needed and each.nbytes >= nbytes]
        if not fits:
            return None
        best = min(fits, key=lambda each: (each.nbytes, -each.freed_at))
        # A small tensor may use a large buffer (the last, short batch of an epoch), but a caller
        # that keeps many small tensors must not keep a large buffer for each.
        slack = best.nbytes - _whole_pages(nbytes)
        if slack:
            slack += sum(each.nbytes - each.needed for each in self._buffers if each.needed)
        return None if slack > self._peak() // 2 else best

    def _note_peak(self) -> None:
        needed = sum(buffer.needed for buffer in self._buffers)
        self._recent_peak = max(self._recent_peak, needed)
        self._handed_out += 1
        if self._handed_out % _WINDOW == 0:
            self._earlier_peak, self._recent_peak = self._recent_peak, needed

    def _peak(self) -> int:
        return max(self._earlier_peak, self._recent_peak)

    def _lent_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers if buffer.needed)

    def _shrink(self, most_free: int) -> None:
        """Release free buffers down to the bounds, the least recently used first."""
        free = [buffer for buffer in self._buffers if not buffer.needed]
        if not free:
            return
        excess = sum(buffer.nbytes for buffer in free)
        excess -= min(most_free, self._peak() - self._lent_bytes())
        free.sort(key=lambda each: each.freed_at, reverse=True)
        while free and excess > 0:
            excess -= free[-1].nbytes
            self._buffers.remove(free.pop())

    def _forked(self) -> None:
        """In a forked child: take a new lock, and drop the parent's free buffers."""
        self._lock = threading.Lock()
        self._look()
        self._buffers = [buffer for buffer in self._buffers if buffer.needed]


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
    """Memory that the pool owns, in whole pages, private to this process.

    Attributes:
        needed: the bytes, in whole pages, that a tensor asked for; 0: it is free.
        freed_at: how many tensors the pool had handed out when it was found to be free.
    """

    __slots__ = ("freed_at", "memory", "nbytes", "needed")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _whole_pages(nbytes)
        self.needed = self.freed_at = 0
        if sys.platform == "win32":  # maps have no flags there, and nothing forks
            self.memory = mmap.mmap(-1, self.nbytes)
        else:  # mmap's default is memory shared with forked children
            self.memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:  # pages of 2 MiB: first use costs a third
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel built without them

    def references(self) -> int:
        """Count the references to its memory: more than `_UNUSED` while a tensor lives."""
        return sys.getrefcount(self.memory)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


_UNUSED = _Buffer(1).references()


def _default_most_free() -> int:
    return min(2 << 30, total_memory() // 16)


_POOLS: weakref.WeakSet[HostPool] = weakref.WeakSet()


def _in_forked_child() -> None:
    for pool in _POOLS:
        pool._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
