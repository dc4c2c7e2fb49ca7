"""Finish the floats of batches whose workers sent bytes and the steps that are left.

workers   the dataset's own code, up to ToTensor or ToDtype ──collate_fn──> Trailing
here      Trailing ──move──> bytes on the device ──the steps──> floats, equal to the bit
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from dataloaders.backend import Remainder, Specification
from dataloaders.batches.memory import HostPool
from dataloaders.batches.tree import Batch, map_children
from dataloaders.recording.ops import as_flavour
from dataloaders.recording.tail import Trailing
from dataloaders.recording.worker import recording_changes
from dataloaders.specification import view_of

from .pointwise import Pointwise
from .proof import prove


def device_tail(loader: Specification) -> DeviceTail | str:
    """Return a `DeviceTail` that is proved on samples of ``loader``; or say why there is none."""
    proof = prove(loader, "tail", DeviceTail().apply, _left)
    if proof.obstacle is not None:
        return proof.obstacle
    left = [fact for facts in proof.facts for fact in facts]
    if left:
        saved = sum(saved for _, saved in left) // proof.samples
        text = (
            f"{', '.join(left[0][0])} once a batch on the device: {saved} bytes a sample less to "
            f"collate and copy, equal to the bit on {proof.samples} samples of this dataset"
        )
        return DeviceTail(text)
    name = type(loader.dataset).__name__
    if proof.looks:
        return f"{name} or its collate_fn works on the floats: {proof.looks[0]}"
    return (
        f"no float image of {name} comes from torchvision's ToTensor, ConvertImageDtype or ToDtype "
        "of an image of bytes"
    )


class DeviceTail(Remainder):
    """Finish the images of batches whose workers recorded their tails; made by `device_tail`.

    Args:
        description: for the plan.
        empty_like: makes tensors of the shape of a given one and another dtype.
    """

    def __init__(
        self, description: str = "", empty_like: Callable[..., torch.Tensor] | None = None
    ) -> None:
        self.description = description
        if empty_like is not None:
            self._empty_like = empty_like

    @cached_property
    def _empty_like(self) -> Callable[..., torch.Tensor]:
        return HostPool().empty_like

    @staticmethod
    def recorded(loader: Specification) -> Specification:
        """Return a view of ``loader``, which may be seeded, whose workers record tails."""
        return view_of(loader, **recording_changes(loader, "tail"))

    def apply(self, batch: Batch, move: Callable[[Batch], Batch] = lambda batch: batch) -> Batch:
        """See `Remainder`."""

        def made(value: Any) -> Any:
            return self._made(value) if isinstance(value, Trailing) else map_children(value, made)

        return made(move(batch))

    def _made(self, value: Trailing) -> torch.Tensor:
        pixels, steps = value
        if not steps:
            return pixels
        tail = Pointwise(steps, pixels.shape[-3])
        out = self._empty_like(pixels, dtype=tail.dtype)
        tail(pixels.as_subclass(torch.Tensor), out)
        made: torch.Tensor = as_flavour(out, "Tensor" if pixels.ndim == 4 else steps[-1].flavour)
        return made


def _left(batch: Batch) -> list[tuple[list[str], int]]:
    """Return for each image of a batch the names of the steps left, and the bytes saved."""
    found = []

    def look(value: Any) -> None:
        if isinstance(value, Trailing):
            names = dict.fromkeys(step.op.rpartition(".")[2] for step in value.steps)
            if names:
                larger = value.steps[-1].dtype.itemsize - 1
                found.append((list(names), larger * value.pixels.numel()))
        else:
            map_children(value, look)

    look(batch)
    return found
