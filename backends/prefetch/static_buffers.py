"""Device memory for ``reuse=True``: batches of one shape always lie at the same few addresses."""

from __future__ import annotations

import torch

from dataloaders.batches.tree import Batch, map_tensors

from .device import Device

__all__ = ["StaticBuffers", "retyped"]


class StaticBuffers:
    """The buffers of one batch, one a tensor; the caller knows when they are free."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._next = 0

    def begin(self) -> None:
        """Expect a batch's first tensor."""
        self._next = 0

    def copy(self, leaf: torch.Tensor) -> torch.Tensor:
        """Queue a copy of ``leaf`` into its buffer, and return the copy.

        The buffer is replaced only for a tensor that is larger than all before it, or of another
        dtype. A short last batch lies at the start of it.
        """
        position, self._next = self._next, self._next + 1
        if position == len(self._buffers):
            self._buffers.append(self._device.empty_like(leaf))
        buffer = self._buffers[position]
        if buffer.dtype != leaf.dtype or buffer.numel() < leaf.numel():
            buffer = self._buffers[position] = self._device.empty_like(leaf)
        strides = torch.empty_like(leaf, device="meta").stride()
        target = buffer.as_strided(leaf.shape, strides, 0)
        self._device.copy(target, leaf)
        return target

    def copy_all(self, batch: Batch) -> Batch:
        """Copy ``batch``, which is on the device already, tensor by tensor."""
        self.begin()
        return map_tensors(
            batch, lambda leaf: retyped(self.copy(leaf.as_subclass(torch.Tensor)), leaf)
        )


def retyped(copy: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Return ``copy`` as a tensor of the type of ``leaf``, with its attributes."""
    if type(leaf) is torch.Tensor:
        return copy
    typed = copy.as_subclass(type(leaf))
    typed.__dict__.update(vars(leaf))
    return typed
