"""The last pass of a batch: what ToTensor, Normalize and the like make of each byte.

    uint8 [..., C, H, W] ──copy──> floats ──div, sub, div in place──> another dtype, if asked for

These are torchvision's own steps, in its order and dtype. IEEE 754 rounds each in one way, so that
every device makes the same values. Divisors are tensors: CUDA replaces the division by a Python
number with a product, which differs for 126 of 256 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataloaders.recording.tail import Step

from .kernels import upload

_CPU_VALUES = 1 << 18  # worked on at a time: what stays in a core's cache between two steps
_DEVICE_VALUES = 1 << 25  # bounds a temporary tensor to 128 MiB


class Pointwise:
    """Makes what ``steps`` make of bytes.

    Args:
        steps: those for which `is_pointwise` is true, in order.
        channels: of the images.

    Attributes:
        dtype: of what the steps make; uint8 if none of them makes floats.

    Raises:
        ValueError: torchvision would raise an error for such images.
    """

    def __init__(self, steps: Sequence[Step], channels: int) -> None:
        self.dtype = torch.uint8
        self._numbers: list[tuple[Any, Any]] = []
        for op, args, kwargs, dtype, _ in steps:
            if op.endswith(".normalize"):
                named = {**dict(zip(("mean", "std"), args, strict=False)), **dict(kwargs)}
                self._add(torch.sub, named["mean"], channels)
                self._add(torch.div, named["std"], channels)
            elif self.dtype is not dtype:
                self.dtype = dtype
                if op != "v2.to_dtype":
                    self._add(torch.div, 255, channels)
                elif (*args[1:], dict(kwargs).get("scale"))[0]:
                    self._numbers.append((torch.mul, 1 / 255))  # v2 multiplies where v1 divides

    def _add(self, operation: Any, numbers: Any, channels: int) -> None:
        column = torch.as_tensor(numbers, dtype=self.dtype, device="cpu").reshape(-1, 1, 1)
        if len(column) not in (1, channels) or (operation is torch.div and 0 in np.ravel(numbers)):
            raise ValueError(f"images of {channels} channels cannot be normalised by {numbers}")
        self._numbers.append((operation, column))

    def __call__(self, pixels: Tensor, out: Tensor) -> None:
        """Fill ``out`` of ``pixels``, uint8 [..., C, H, W] of the same shape on the same device.

        Values are rounded once if ``out`` has another dtype than the steps make.
        """
        numbers = self._numbers
        if not pixels.is_cpu:
            numbers = [
                (operation, upload(number, pixels.device) if isinstance(number, Tensor) else number)
                for operation, number in numbers
            ]
        for piece, target in _pieces(pixels, out):
            values = target
            if out.dtype is not self.dtype:
                values = torch.empty_like(piece, dtype=self.dtype)
            values.copy_(piece)
            for operation, number in numbers:
                operation(values, number, out=values)
            if values is not target:
                target.copy_(values)

    def finish(self, values: Tensor) -> None:
        """Make of ``values`` on the CPU, the bytes as floats, in place what the steps make."""
        for operation, number in self._numbers:
            operation(values, number, out=values)


def _pieces(pixels: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of both along the first dimension, of a bounded number of values."""
    most = _CPU_VALUES if pixels.is_cpu else _DEVICE_VALUES
    if pixels.ndim < 4 or pixels.numel() <= most:
        yield pixels, out
        return
    rows = max(1, most // pixels[0].numel())
    for begin in range(0, len(pixels), rows):
        yield pixels[begin : begin + rows], out[begin : begin + rows]
