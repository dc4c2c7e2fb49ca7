"""Collate as torch does by default, with a batch's large tensors stacked into pooled memory.

    samples ──> torch's collate: nesting, types, errors
                 ├─ large plain tensors ──> torch.stack(..., out=pool.empty(...))
                 └─ everything else ──────> torch's own function for it

The batch equals torch's to the bit, strides and errors included: unusual samples (gradients,
sparse, mixed shapes or types, other devices) are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils import collate as torch_collate

from dataloaders.batches.memory import HostMemory
from dataloaders.batches.tree import Batch

SMALLEST_SAMPLE = 1 << 14
"""The size in bytes from which a sample pays: below, looking at each takes longer than it saves."""


_PATIENCE, _REST = 8, 15
"""After this many small batches in a row, as many are left to torch without a look, repeatedly."""


class PooledCollate:
    """Call ``default_collate`` on samples, with large tensors in memory from ``memory``.

    Entries added to torch's ``default_collate_fn_map``, at any time, are respected.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._stack = _Stack(memory)
        self._torchs: dict[Any, Callable[..., Any]] = {}
        self._table: dict[Any, Callable[..., Any]] = {}
        self._small_ones = 0
        self._rest = 0

    def __call__(self, samples: Any) -> Batch:
        """Return the batch of ``samples``, equal to torch's; its large tensors in pooled memory."""
        if self._rest:
            self._rest -= 1
            return default_collate(samples)
        torchs = torch_collate.default_collate_fn_map
        if torchs != self._torchs:
            self._torchs, self._table = dict(torchs), dict(torchs)
            if torchs.get(torch.Tensor) is torch_collate.collate_tensor_fn:
                self._table[torch.Tensor] = self._stack
        self._stack.was_used = False
        batch = torch_collate.collate(samples, collate_fn_map=self._table)
        if self._stack.was_used:
            self._small_ones = 0
        else:
            self._small_ones += 1
            if self._small_ones >= _PATIENCE:
                self._rest = _REST
        return batch


class _Stack:
    """Torch's ``collate_tensor_fn`` for the tensors of one leaf."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self.was_used = False

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        first = batch[0]
        nbytes = first.numel() * first.element_size()
        if nbytes >= SMALLEST_SAMPLE and self._memory.pays_for(nbytes * len(batch)):
            stacked = self._pooled(batch, first)
            if stacked is not None:
                self.was_used = True
                return stacked
        return torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]

    def _pooled(self, batch: Any, first: torch.Tensor) -> torch.Tensor | None:
        if not _is_usual(batch, first):
            return None
        try:
            out = self._memory.empty((len(batch), *first.shape), first.dtype)
            # Its return value, not ``out``: torchvision may be configured to wrap results.
            return torch.stack(batch, 0, out=out)
        except Exception:
            return None  # torch fails in the same way, and raises its own error


def _is_usual(batch: Sequence[torch.Tensor], first: torch.Tensor) -> bool:
    """Whether stacking into dense memory gives the result or the error of torch's collation."""
    kind = type(first)
    if kind is not torch.Tensor and not kind.__module__.startswith("torchvision.tv_tensors."):
        return False
    if type(batch) not in (list, tuple) or {*map(type, batch)} != {kind}:
        return False
    if get_worker_info() is not None:  # torch collates into shared memory there
        return False
    if torch._C._len_torch_dispatch_stack():  # fake tensors, tracing
        return False
    with torch._C.DisableTorchFunctionSubclass():  # attribute access of tv_tensors is slow
        if not first.is_cpu or first.layout is not torch.strided:
            return False
        dtype = first.dtype  # out= would silently convert samples of other types
        if not all(sample.dtype is dtype for sample in batch):
            return False
        # Torch makes a batch contiguous whatever its samples are, except that it keeps the
        # channels-last layout of samples in 4 and 5 dimensions.
        format_ = _CHANNELS_LAST.get(first.dim())
        return format_ is None or all(
            sample.is_contiguous() and not sample.is_contiguous(memory_format=format_)
            for sample in batch
        )


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
