"""Static device buffers for ``reuse=True``: batches of one shape always lie at the same addresses.

slot 0, slot 1, ... slot n-1: for each leaf of a batch one buffer; batch k lies in slot k modulo n.
"""

from __future__ import annotations

import torch

from dataloaders.batches.tree import Batch, map_tensors

from .cuda import Cuda

__all__ = ["Slot"]


class Slot:
    """The buffers of one batch on the device; the caller knows when they are free."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._buffers: list[torch.Tensor] = []
        self._leaf = 0

    def start(self) -> None:
        """The next `place` is for a batch's first leaf."""
        self._leaf = 0

    def place(self, leaf: torch.Tensor) -> torch.Tensor:
        """Queue a copy of ``leaf`` into this slot's buffer for it; the copy.

        The buffer is made anew only for a leaf that is larger than all before it, or of another
        dtype; a short last batch lies at the start of it.
        """
        position, self._leaf = self._leaf, self._leaf + 1
        like = torch.empty_like(leaf, device="meta")
        if position == len(self._buffers):
            self._buffers.append(self._cuda.empty_like(leaf))
        buffer = self._buffers[position]
        if buffer.dtype != leaf.dtype or buffer.numel() < leaf.numel():
            buffer = self._buffers[position] = self._cuda.empty_like(leaf)
        target = buffer.as_strided(leaf.shape, like.stride(), 0)
        self._cuda.copy(target, leaf)
        return target

    def place_all(self, batch: Batch) -> Batch:
        """``batch``, on the device already, copied into this slot leaf by leaf."""
        self.start()
        return map_tensors(batch, self.place)
