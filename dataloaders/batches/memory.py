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
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.machine.resources import total_memory

SMALLEST = 2 << 20
"""The size in bytes from which a buffer is worth about 15 microseconds of Python.

Below it, glibc's malloc hands out memory that the process already has. From here to 32 MiB it may
or may not, depending on the state of its heap; above, it never does (mallopt(3), M_MMAP_THRESHOLD).
"""

_WINDOW = 64  # a buffer that none of so many tensors came from is released
_ALIGNMENT = 64  # torch's own


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
        # Only the tensor's storage holds ``array``. Not a view of another tensor: some operations
        # are forbidden on views.
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(torch.from_numpy(array).untyped_storage(), 0, shape)  # type: ignore[call-overload]
        return tensor

    def empty_like(self, leaf: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor like ``leaf`` with undefined contents, as ``torch.empty_like`` does.

        It comes from the pool if ``leaf`` has a contiguous tensor's strides and is on the CPU.
        """
        if leaf.is_cpu and leaf.is_contiguous():
            out = self.empty(leaf.shape, dtype or leaf.dtype)
            if out.stride() == leaf.stride():  # that of a size 1 may be any
                return out
        return torch.empty_like(leaf, dtype=dtype)

    def _lend(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        """Return the memory for a tensor of ``nbytes``; None where torch is to make it.

        That is if another call holds the lock, or if there is no memory: torch tries once more, and
        raises its own error.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            # A tensor takes at least half of its buffer: a caller that keeps many small tensors
            # must not keep a large buffer for each.
            fits = [
                each
                for each in self._buffers
                if nbytes <= each.nbytes <= 2 * nbytes and each.is_free()
            ]
            buffer = min(fits, key=lambda each: (each.nbytes, -each.lent_at), default=None)
            if buffer is None:
                buffer = _Buffer(nbytes)
                self._buffers.append(buffer)
            self._handed_out += 1
            buffer.lent_at = self._handed_out
            array = buffer.view(nbytes)
            self._release(self._most_free)
            return array
        except (MemoryError, OverflowError, ValueError):
            self._release(most_free=0)
            return None
        finally:
            self._lock.release()

    def _release(self, most_free: int) -> None:
        """Release free buffers that were not used lately, and the oldest beyond ``most_free``."""
        for buffer in sorted(self._buffers, key=lambda each: -each.lent_at):
            if buffer.is_free():
                most_free -= buffer.nbytes
                if most_free < 0 or self._handed_out - buffer.lent_at > _WINDOW:
                    self._buffers.remove(buffer)


class _Buffer:
    """Memory that the pool owns.

    Attributes:
        lent_at: how many tensors the pool had handed out, this one's latest included.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lent_at = 0
        # NumPy asks the system for pages of 2 MiB, whose first use costs a third.
        self._memory: npt.NDArray[Any] = np.empty(nbytes + _ALIGNMENT, np.uint8)

    def view(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return an aligned view of the first ``nbytes``; its base is the memory itself."""
        start = -self._memory.__array_interface__["data"][0] % _ALIGNMENT
        return self._memory[start : start + nbytes]

    def references(self) -> int:
        """Count the references to its memory: more than `_UNUSED` while a tensor lives."""
        return sys.getrefcount(self._memory)

    def is_free(self) -> bool:
        """Whether no tensor lives in it."""
        return self.references() == _UNUSED


_UNUSED = _Buffer(1).references()
