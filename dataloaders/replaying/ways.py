"""Write the values of a table for a whole batch, on the device where the batch is.

    uint8 [N, C, H, W] ──Arithmetic: div, sub, div in place──> float [N, C, H, W]
                       └─Lookup: table[256 * channel + byte]─┘

Arithmetic is used where, tried on that very device for every byte and channel, it equals the
table to the bit; the lookup is exact by its nature. Divisors are tensors on the device: dividing
by a Python number, CUDA multiplies by its reciprocal, which differs for 126 of 256 bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dataloaders.batches.tree import same_bits

Step = tuple[str, torch.Tensor]
""""div", "mul" or "sub", and by what: a float32 tensor of shape [C or 1, 1, 1]."""

_CPU_ELEMENTS = 1 << 18
"""Values worked on at a time: on the CPU what stays in a core's cache between two steps,"""

_DEVICE_ELEMENTS = 1 << 23
"""elsewhere what bounds a temporary tensor (32 MiB of float32)."""


@dataclass(frozen=True)
class Table:
    """What is made of each byte in each channel.

    Attributes:
        values: [channels, 256] in the dtype that comes out; on the CPU.
        steps: the same in float32 arithmetic as torchvision's own code does it, for trying on a
            device; None where there is no such form. Nothing relies on it untried.
    """

    values: Tensor
    steps: tuple[Step, ...] | None


def every_byte(channels: int) -> Tensor:
    """Return a uint8 image [channels, 16, 16] with every byte in every channel, on the CPU."""
    row = torch.arange(256, dtype=torch.uint8, device="cpu")
    return row.reshape(1, 16, 16).repeat(channels, 1, 1)


def column(numbers: Any) -> Tensor:
    """Return one number, or one for each channel, as a `Step` takes them."""
    return torch.as_tensor(numbers, dtype=torch.float32, device="cpu").reshape(-1, 1, 1)


class Way(ABC):
    """One way of writing a table's values for ``bytes_`` into ``out``."""

    @abstractmethod
    def run(self, bytes_: Tensor, out: Tensor) -> None:
        """Fill ``out``: floats of the shape of ``bytes_``, a uint8 [..., C, H, W], same device."""


class Arithmetic(Way):
    """Steps in float32; another dtype is rounded to once, from the float32 value."""

    def __init__(self, steps: tuple[Step, ...], device: torch.device) -> None:
        self._steps = tuple((name, number.to(device)) for name, number in steps)

    def run(self, bytes_: Tensor, out: Tensor) -> None:
        """Fill ``out``."""
        narrow = out.dtype is not torch.float32
        on_cpu = bytes_.device.type == "cpu"
        # Nothing temporary to bound on a device, and each further kernel costs its launch.
        whole = not on_cpu and not narrow
        for piece, target in [(bytes_, out)] if whole else _pieces(bytes_, out):
            values = torch.empty_like(piece, dtype=torch.float32) if narrow else target
            if on_cpu or not self._steps:
                values.copy_(piece)  # where an operation on bytes makes floats of them first
                self.finish(values)
            else:
                (name, number), *rest = self._steps
                _OPERATIONS[name](piece, number, out=values)
                _apply(rest, values)
            if narrow:
                target.copy_(values)

    def finish(self, values: Tensor) -> None:
        """Make of float32 ``values``, which are the bytes', in place what `run` makes of these."""
        _apply(self._steps, values)


class Lookup(Way):
    """One indexed read a value; its indices are int32 and made piece by piece."""

    def __init__(self, table: Tensor, device: torch.device) -> None:
        channels = len(table)
        self._flat = table.reshape(-1).to(device)
        offsets = torch.arange(0, 256 * channels, 256, dtype=torch.int32, device="cpu")
        self._offsets = offsets.reshape(-1, 1, 1).to(device)

    def run(self, bytes_: Tensor, out: Tensor) -> None:
        """Fill ``out``."""
        for piece, target in _pieces(bytes_, out):
            indices = torch.empty_like(target, dtype=torch.int32)
            torch.add(piece, self._offsets, out=indices)
            if indices.stride() == target.stride():  # both dense, in one order of memory
                flat = (target.numel(),), (1,)
                places, made = indices.as_strided(*flat), target.as_strided(*flat)
                torch.index_select(self._flat, 0, places, out=made)
            else:
                found = torch.index_select(self._flat, 0, indices.reshape(-1))
                target.copy_(found.view(indices.shape))


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "div": torch.div,
    "mul": torch.mul,
    "sub": torch.sub,
}


def _apply(steps: Iterable[Step], values: Tensor) -> None:
    for name, number in steps:
        _OPERATIONS[name](values, number, out=values)


def way_for(table: Table, dtype: torch.dtype, device: torch.device) -> Way:
    """Return the way to make ``table``, rounded to ``dtype``, tried on ``device`` first."""
    wanted = table.values.to(dtype)
    if table.steps is not None and table.values.dtype is torch.float32:
        way = Arithmetic(table.steps, device)
        bytes_ = every_byte(len(wanted)).to(device)
        out = torch.empty_like(bytes_, dtype=dtype)
        way.run(bytes_, out)
        if same_bits(out.cpu().view(-1, 256), wanted):
            return way
    return Lookup(wanted, device)


def _pieces(bytes_: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of both along the first dimension, of a bounded number of values."""
    most = _CPU_ELEMENTS if bytes_.device.type == "cpu" else _DEVICE_ELEMENTS
    if bytes_.ndim < 4 or bytes_.numel() <= most:
        yield bytes_, out
        return
    rows = max(1, most // bytes_[0].numel())
    for begin in range(0, len(bytes_), rows):
        yield bytes_[begin : begin + rows], out[begin : begin + rows]
