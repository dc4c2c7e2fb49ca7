"""What is done to a batch of images behind the graph: image by image, or all at once.

    uint8 [n, C, H, W] ──Each: Primitive.apply in threads──> uint8 or floats
                       ──Whole: the tail's table, in pieces──> floats [n, C, H, W]

Images are one tensor, or a list of tensors where their sizes differ. Only images that take part
in an action are touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeAlias

import numpy as np
import torch

from dataloaders.pool import HostPool
from dataloaders.transforms.actions import Action
from dataloaders.transforms.kinds import torchvision_name
from dataloaders.transforms.table import tables_of
from dataloaders.transforms.trailing import arithmetic_of
from dataloaders.transforms.ways import Way, way_for

from .plan import Behind, TailRun

__all__ = ["Each", "Images", "Memory", "Step", "Whole", "dense", "memory_of"]

Images: TypeAlias = "torch.Tensor | list[torch.Tensor]"
"""[n, C, H, W]; or n of [C, H, W] where they differ in size or type."""

Memory: TypeAlias = "Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]"
"""Makes a dense tensor, its contents undefined."""


_OF_PIL = ("PILToTensor", "ToImage", "ToTensor")


class Step(ABC):
    """One part of the way behind the graph, for any number of batches."""

    @abstractmethod
    def __call__(self, images: Images, actions: Sequence[Action]) -> Images:
        """What becomes of ``images``, which may be written to.

        Args:
            images: of one batch.
            actions: of the whole chain, one for each of its primitives.
        """


class Each(Step):
    """A `Behind`, by torchvision's own functions on each image, in threads."""

    def __init__(self, part: Behind, threads: Executor, count: int) -> None:
        self._part = part
        self._threads = threads
        self._count = count

    def __call__(self, images: Images, actions: Sequence[Action]) -> Images:
        """See `Step`."""
        own = [actions[place] for place in self._part.places]
        touched = [i for i in range(len(images)) if any(action.takes(i) for action in own)]
        if not touched:
            return images
        made: list[torch.Tensor] = list(images)

        def make(samples: Sequence[int]) -> None:
            for sample in samples:
                made[sample] = self._made(own, sample, made[sample])

        parts = [touched[begin :: self._count] for begin in range(self._count)]
        futures = [self._threads.submit(make, part) for part in parts[1:] if part]
        try:
            make(parts[0])
        finally:
            errors = [future.exception() for future in futures]  # all have ended then
        for error in errors:
            if error is not None:
                raise error
        return _together(images, made, touched)

    def _made(self, own: Sequence[Action], sample: int, image: torch.Tensor) -> torch.Tensor:
        value: Any = _picture(image) if self._part.form == "pil" else image
        for action in own:
            value = action.apply(sample, value)
        return value if isinstance(value, torch.Tensor) else _pixels(value)


class Whole(Step):
    """A `TailRun`: the values that its members make of each byte, for all images at once.

    The values are tables, made by the members themselves: torchvision's to the bit.
    """

    def __init__(self, run: TailRun, memory: Memory) -> None:
        self._members = [member.transform for member in run.members]
        self._tables, self._channels = tables_of(arithmetic_of(run.members))
        self._memory = memory
        self._ways: dict[tuple[torch.device, int], Way] = {}

    def __call__(self, images: Images, actions: Sequence[Action]) -> Images:
        """See `Step`."""
        if isinstance(images, list):
            return [self._floats(image[None])[0] for image in images]
        return self._floats(images)

    def _floats(self, images: torch.Tensor) -> torch.Tensor:
        after = self._channels.get(images.shape[1])
        if after is None:
            return self._one_by_one(images)
        way = self._ways.get((images.device, after))
        if way is None:
            values = self._tables[after].values
            way = way_for(self._tables[after], values.dtype, images.device)
            self._ways[images.device, after] = way
        if after != images.shape[1]:
            images = images.expand(-1, after, -1, -1)
        out = self._memory(images.shape, self._tables[after].values.dtype, images.device)
        way.run(images, out)
        return out

    def _one_by_one(self, images: torch.Tensor) -> torch.Tensor:
        """For a number of channels that the members refuse: they raise, and say why."""
        made = []
        for image in images:
            value: Any = _picture(image) if torchvision_name(self._members[0]) in _OF_PIL else image
            for transform in self._members:
                value = transform(value)
            made.append(value)
        return torch.stack(made)


def memory_of(pool: HostPool) -> Memory:
    """Dense memory, of ``pool`` where it is on the CPU."""

    def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return pool.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    return empty


def dense(images: Images, memory: Memory) -> Images:
    """``images`` in the order of torchvision's tensors: rows of one channel after the other."""
    if isinstance(images, list):
        return [image.contiguous() for image in images]
    if images.is_contiguous():
        return images
    return memory(images.shape, images.dtype, images.device).copy_(images)


def _picture(image: torch.Tensor) -> Any:
    """A PIL image of uint8 [C, H, W]; it does not share memory with it."""
    from PIL import Image

    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _pixels(picture: Any) -> torch.Tensor:
    """uint8 [C, H, W], as ToTensor orders it."""
    array = np.array(picture, np.uint8)
    if array.ndim == 2:
        array = array[:, :, None]
    return torch.from_numpy(array).permute(2, 0, 1)


def _together(images: Images, made: list[torch.Tensor], touched: Sequence[int]) -> Images:
    """``made`` as one tensor again, in the memory of ``images`` where that fits."""
    first = made[0]
    if any(m.shape != first.shape or m.dtype is not first.dtype for m in made):
        return made
    if (
        isinstance(images, torch.Tensor)
        and images.shape[1:] == first.shape
        and images.dtype is first.dtype
    ):
        for sample in touched:
            images[sample].copy_(made[sample])
        return images
    return torch.stack(made)
