"""Recycle host memory for batches: as safe to keep as a fresh tensor, nearly as cheap as reuse.

    HostPool.empty(shape, dtype) ──> tensor ──> its storage ──> one view of a buffer
                                     views, slices, .numpy(), saved for backward ... all keep
                                     the storage alive, and with it that view
    the next empty() ──> a buffer to which nothing but the pool refers is free again

The system provides a fresh batch of many megabytes page by page: each page is zeroed and mapped
when it is first written. A buffer that was used before already has its pages.

A buffer that none of the last 64 tensors came from is released, and so are unused ones beyond a
limit.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dataloaders.machine.resources import total_memory

SMALLEST = 2 << 20
"""The size in bytes from which a buffer is worth about 15 microseconds of Python.

Below it, glibc's malloc hands out memory that the process already has. From here to 32 MiB it may
or may not, depending on the state of its heap; above, it never does (mallopt(3), M_MMAP_THRESHOLD).
"""

_WINDOW = 64  # a buffer that none of so many tensors came from is released
_PAGE = mmap.PAGESIZE


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
        self._most_free = min(2 << 30, total_memory() // 16) if most_free is None else most_free
        self._smallest = max(1, smallest)
        # Never waited for: the collector may make a call in the midst of another one's.
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._handed_out = 0

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

    @property
    def free_bytes(self) -> int:
        """Bytes of buffers that nothing refers to at present."""
        return sum(buffer.nbytes for buffer in self._buffers if buffer.is_free())

    @property
    def lent_bytes(self) -> int:
        """Bytes of buffers that tensors refer to at present."""
        return sum(buffer.nbytes for buffer in self._buffers if not buffer.is_free())

    def _lend(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Return the memory for a tensor of ``nbytes``; None if another call holds the lock."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            buffer = self._best_fit(nbytes)
            if buffer is None:
                try:
                    buffer = _Buffer(nbytes)
                except (MemoryError, OSError, ValueError):
                    self._release(most_free=0)
                    return None  # torch tries once more, and raises its own error
                self._buffers.append(buffer)
            self._handed_out += 1
            buffer.lent_at = self._handed_out
            array = np.frombuffer(buffer.memory, np.uint8, nbytes)
            self._release(self._most_free)
            return array
        finally:
            self._lock.release()

    def _best_fit(self, nbytes: int) -> _Buffer | None:
        """Return the smallest free buffer that holds ``nbytes``, the one used last if several do.

        A tensor takes at least half of its buffer: a caller that keeps many small tensors must not
        keep a large buffer for each.
        """
        most = 2 * _whole_pages(nbytes)
        fits = [each for each in self._buffers if nbytes <= each.nbytes <= most and each.is_free()]
        return min(fits, key=lambda each: (each.nbytes, -each.lent_at), default=None)

    def _release(self, most_free: int) -> None:
        """Release free buffers that were not used lately, and the oldest beyond ``most_free``."""
        for buffer in sorted(self._buffers, key=lambda each: -each.lent_at):
            if buffer.is_free():
                most_free -= buffer.nbytes
                if most_free < 0 or self._handed_out - buffer.lent_at > _WINDOW:
                    self._buffers.remove(buffer)


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
        lent_at: how many tensors the pool had handed out, this one's latest included.
    """

    __slots__ = ("lent_at", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = _whole_pages(nbytes)
        self.lent_at = 0
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

    def is_free(self) -> bool:
        """Whether no tensor lives in it."""
        return self.references() == _UNUSED


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


_UNUSED = _Buffer(1).references()
