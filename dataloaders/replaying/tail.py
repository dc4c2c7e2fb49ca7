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
from dataloaders.errors import BackendUnavailable
from dataloaders.recording.ops import as_flavour
from dataloaders.recording.tail import Trailing
from dataloaders.recording.worker import recording_changes
from dataloaders.specification import view_of

from .pointwise import Pointwise
from .proof import prove


def device_tail(
    loader: Specification,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> DeviceTail | str:
    """Return a `DeviceTail` that is proved on samples of ``loader``; or say why there is none.

    Args:
        loader: any torch DataLoader.
        dtype: a float dtype for the images, each value rounded to it once; None: the dataset's.
        memory_format: of batches of images [N, C, H, W].
    """
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
        if dtype not in (None, torch.float32):
            text += f"; then rounded to {str(dtype).removeprefix('torch.')}"
        return DeviceTail(dtype, memory_format, text)
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
        dtype: what floats are rounded to at last; None: they stay.
        memory_format: of batches of images.
        description: for the plan.
        empty_like: makes tensors of the shape of a given one and another dtype.
    """

    def __init__(
        self,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.preserve_format,
        description: str = "",
        empty_like: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.description = description
        self._dtype = dtype
        self._memory_format = memory_format
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
        """See `Remainder`.

        Raises:
            BackendUnavailable: another dtype or memory order is asked for, and a batch has no image
                of which it is known.
        """
        images = 0

        def made(value: Any) -> Any:
            nonlocal images
            if isinstance(value, Trailing):
                images += 1
                return self._finished(value)
            return map_children(value, made)

        def whole(value: Any) -> Any:
            """Finish what an object with a ``.to()`` holds: its own methods know no `Trailing`."""
            if isinstance(value, (torch.Tensor, Trailing)):
                return value
            moves_itself = callable(getattr(value, "to", None))
            return made(value) if moves_itself else map_children(value, whole)

        finished = made(move(whole(batch)))
        if not images and (self._dtype or self._memory_format is not torch.preserve_format):
            raise BackendUnavailable(
                "a batch has no image whose floats torchvision's ToTensor, ConvertImageDtype or "
                "ToDtype made of bytes, so that none gets the dtype and memory_format of Prefetch; "
                "leave these out"
            )
        return finished

    def _finished(self, value: Trailing) -> torch.Tensor:
        pixels, steps = value
        if pixels.ndim == 4 and self._memory_format is not torch.preserve_format:
            pixels = pixels.contiguous(memory_format=self._memory_format)
        if not steps:
            return pixels if self._dtype is None else pixels.to(self._dtype)
        tail = Pointwise(steps, pixels.shape[-3])
        out = self._empty_like(pixels, dtype=self._dtype or tail.dtype)
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
