"""The last pass of a batch: what ToTensor, Normalize and the like make of each byte.

    256 levels a channel ──the recorded steps themselves──> Table ──ways.py──> floats of a batch

Exact by its nature, on any device, and one pass also for bfloat16 and channels_last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dataloaders.recording import program
from dataloaders.recording.ops import run
from dataloaders.recording.program import Node
from dataloaders.recording.tail import Step, step_of

from .plan import Stack
from .ways import Lookup, Table, Way, column, every_byte, way_for
from .ways import Step as Arithmetic


class Pointwise:
    """What ``steps`` make of bytes; see `table_of`.

    Args:
        dtype: what floats are rounded to at last; None: they stay.

    Attributes:
        dtype, channels: of what comes out.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        channels: int,
        flavour: str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._table = table_of(steps, channels, flavour)
        values = self._table.values
        self.dtype = dtype if dtype and values.is_floating_point() else values.dtype
        self.channels = len(values)
        self._ways: dict[tuple[torch.device, bool], Way] = {}

    def __call__(self, images: Tensor, out: Tensor) -> None:
        """Fill ``out``, [n, 3, H, W] dense in either order, of ``images``, uint8 [n, H, W, 3]."""
        planes = images.permute(0, 3, 1, 2)
        if self.dtype is torch.uint8 and self._table.steps == ():
            out.copy_(planes)
            return
        # Arithmetic is a third quicker than the lookup where it reads and writes planes.
        is_plain = out.is_cpu and out.is_contiguous() and out.dtype is torch.float32
        self.way(images.device, is_plain).run(planes, out)

    def way(self, device: torch.device, is_plain: bool = True) -> Way:
        """Return how to write it on ``device``; by the lookup unless ``is_plain``."""
        way = self._ways.get((device, is_plain))
        if way is None:
            if is_plain:
                way = way_for(self._table, self.dtype, device)
            else:
                way = Lookup(self._table.values.to(self.dtype), device)
            self._ways[device, is_plain] = way
        return way


class Tails:
    """The last passes of batches, each made once; ``dtype``: what floats are rounded to."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._known: list[tuple[Any, Pointwise]] = []

    def of(
        self,
        steps: tuple[Step, ...],
        channels: int,
        flavour: str | None = "Tensor",
        rounded: bool = True,
    ) -> Pointwise:
        """Return what does ``steps`` to images of so many channels.

        Raises:
            Exception: the steps cannot be done to such images.
        """
        key = steps, channels, flavour, self._dtype if rounded else None
        for known, tail in self._known:
            if known == key:
                return tail
        tail = Pointwise(*key)
        self._known = [(key, tail), *self._known[:7]]
        return tail

    def of_stack(self, stack: Stack, wanted: Sequence[Node]) -> Pointwise:
        """Return what makes the rows of ``stack``; rounded if they are ``wanted`` as they are."""
        as_is = any(stack.node is node for node in wanted)
        as_is = as_is and all(row.last is row.done for row in stack.rows)
        what = stack.rows[0].image.what
        flavour = None if isinstance(what, program.Image) else what.flavour
        return self.of(tuple(map(step_of, stack.tail)), 3, flavour, as_is)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": []}


def table_of(steps: Sequence[Step], channels: int, flavour: str | None = "Tensor") -> Table:
    """Return what ``steps`` make of each byte, done by themselves.

    Args:
        steps: in order.
        channels: of the image.
        flavour: of the tensor that the first step takes; None: it takes an image of Pillow's, RGB.
    """
    levels = every_byte(channels)
    if not steps:
        return Table(levels.reshape(-1, 256), ())
    if flavour is None:
        data = levels.permute(1, 2, 0).contiguous()
        node = Node("array", (), (0, tuple(data.shape), "|u1", "RGB"), (), None)
    else:
        data = levels
        layout = data.shape, data.dtype, flavour, data.stride()
        node = Node("tensor", (), (0, *layout), (), None)
    for step in steps:
        what = program.Tensor((channels, 16, 16), step.dtype, step.flavour)
        node = Node(step.op, (node,), step.args, step.kwargs, what)
    (made,) = run([node], [data.numpy().tobytes()])
    values = made.as_subclass(Tensor).reshape(-1, 256).contiguous()
    return Table(values, _arithmetic_of(steps))


def _arithmetic_of(steps: Sequence[Step]) -> tuple[Arithmetic, ...] | None:
    """Return ``steps`` as torchvision computes them; None if there are others."""
    made: list[Arithmetic] = []
    for op, args, kwargs, dtype, _ in steps:
        named = dict(kwargs)
        if dtype is torch.uint8:
            continue  # bytes as they are
        if op in ("to_tensor", "v1t.convert_image_dtype"):
            made.append(("div", column(255)))
        elif op == "v2.to_dtype":
            scale = named.get("scale", args[1] if len(args) > 1 else False)
            made += [("mul", column(1 / 255))] if scale else []  # v2 multiplies where v1 divides
        elif op.endswith(".normalize"):
            mean, std = (*args, *(named[name] for name in ("mean", "std") if name in named))[:2]
            made += [("sub", column(mean)), ("div", column(std))]
        elif op != "as_subclass":
            return None
    return tuple(made)
