"""The last pass of a batch: what ToTensor, Normalize and the like make of each byte.

    256 levels x 3 channels ──the recorded steps themselves──> table
    uint8 [n, H, W, 3] ──looked up──> [n, 3, H, W], in its dtype and memory order

Exact by its nature, on any device, and one pass also for bfloat16 and channels_last. On the CPU
float32 in torch's own order is computed, a third quicker, where that gives the table to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dataloaders.recording import program
from dataloaders.recording.ops import run
from dataloaders.recording.program import Node

from .plan import arguments

__all__ = ["Pointwise"]


class Pointwise:
    """What ``tail`` makes of bytes.

    Args:
        tail: steps, each a function of a byte and its channel.
        of: what the first of them takes.
        dtype: what floats are rounded to at last; None: they stay.

    Attributes:
        dtype: of what comes out.
    """

    def __init__(
        self,
        tail: Sequence[Node],
        of: program.Image | program.Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        levels = torch.arange(256, dtype=torch.uint8).view(16, 16, 1).expand(16, 16, 3).contiguous()
        table = _made_of(levels, tail, of).reshape(-1)
        self._table = table.to(dtype) if dtype and table.is_floating_point() else table
        self.dtype = self._table.dtype
        self._there: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._steps: list[tuple[Callable[..., Tensor], Tensor]] | None = None
        steps = _arithmetic(tail)
        if steps is not None and self.dtype in (torch.float32, torch.uint8):
            out = torch.empty(3, 16, 16, dtype=self.dtype)
            _compute(steps, levels.permute(2, 0, 1), out)
            self._steps = steps if torch.equal(out.view(-1), self._table) else None

    def __call__(self, images: Tensor, out: Tensor) -> None:
        """Fill ``out``, [n, 3, H, W] dense in either order, of ``images``, uint8 [n, H, W, 3]."""
        planes = images.permute(0, 3, 1, 2)
        if self._steps is not None and (not self._steps or (out.is_cpu and out.is_contiguous())):
            _compute(self._steps, planes, out)
            return
        if images.device not in self._there:
            starts = torch.arange(0, 768, 256, dtype=torch.int32)
            self._there[images.device] = starts.to(images.device), self._table.to(images.device)
        starts, table = self._there[images.device]
        if out.is_contiguous():
            places = planes.contiguous() + starts.view(3, 1, 1)
        else:
            places, out = images.contiguous() + starts, out.permute(0, 2, 3, 1)
        torch.index_select(table, 0, places.view(-1), out=out.view(-1))


def _made_of(levels: Tensor, tail: Sequence[Node], of: program.Image | program.Tensor) -> Tensor:
    """Return what ``tail`` makes of ``levels``, uint8 [16, 16, 3]."""
    if isinstance(of, program.Image):
        if not tail:
            return levels.permute(2, 0, 1)
        node = Node("array", (), (0, (16, 16, 3), "|u1", "RGB"), (), program.Image("RGB", (16, 16)))
    else:
        levels = levels.permute(2, 0, 1).contiguous()
        layout = (3, 16, 16), levels.dtype, of.flavour, levels.stride()
        node = Node("tensor", (), (0, *layout), (), of)
    for step in tail:
        node = Node(step.op, (node,), step.args, step.kwargs, step.what)
    made: Tensor = run([node], [levels.numpy().tobytes()])[0]
    return made.as_subclass(Tensor)


def _arithmetic(tail: Sequence[Node]) -> list[tuple[Callable[..., Tensor], Tensor]] | None:
    """Return ``tail`` as torchvision computes it; None if it has other steps."""
    steps: list[tuple[Callable[..., Tensor], Tensor]] = []
    for step in tail:
        if step.what[1] is torch.uint8:
            continue  # bytes as they are
        if step.op in ("to_tensor", "v1t.convert_image_dtype"):
            steps.append((torch.div, _column(255)))
        elif step.op == "v2.to_dtype":
            steps.append((torch.mul, _column(1 / 255)))
        elif step.op.endswith(".normalize"):
            given = arguments(step, ("mean", "std"))
            steps += [(torch.sub, _column(given["mean"])), (torch.div, _column(given["std"]))]
        elif step.op != "as_subclass":
            return None
    return steps


def _column(numbers: Any) -> Tensor:
    return torch.as_tensor(numbers, dtype=torch.float32).reshape(-1, 1, 1)


def _compute(
    steps: Sequence[tuple[Callable[..., Tensor], Tensor]], planes: Tensor, out: Tensor
) -> None:
    out.copy_(planes)
    for function, number in steps:
        function(out, number, out=out)
