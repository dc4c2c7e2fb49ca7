"""Process a batch of images after the graph: image by image, or all at once.

    uint8 [n, C, H, W] ──Each: Primitive.apply in threads of the CPU──> uint8 or floats
                       ──OnDevice: kernels on the batch, on a device──>
                       ──Whole: the tail's table, in pieces──> floats [n, C, H, W]

Images are one tensor, or a list of tensors if their sizes differ. Only images that an action
selects are touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from dataloaders.batches.memory import HostPool
from dataloaders.transforms.actions import Action, Primitive
from dataloaders.transforms.kernels import EXACT, kernel_for, run
from dataloaders.transforms.kernels.kernel import Form
from dataloaders.transforms.kernels.table import form_after
from dataloaders.transforms.kinds import torchvision_name
from dataloaders.transforms.primitives.geometry import Crop, HorizontalFlip, Resize, VerticalFlip
from dataloaders.transforms.table import tables_of
from dataloaders.transforms.trailing import arithmetic_of
from dataloaders.transforms.ways import Way, way_for

from .plan import Behind, TailRun

__all__ = [
    "ByHost",
    "Each",
    "Images",
    "Memory",
    "OnDevice",
    "Step",
    "Whole",
    "apart",
    "dense",
    "memory_of",
    "resizes_quickly",
]

Images: TypeAlias = "torch.Tensor | list[torch.Tensor]"
"""[n, C, H, W]; or n of [C, H, W] if they differ in size or type."""

Memory: TypeAlias = "Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]"
"""Allocates a dense tensor with undefined contents."""


_OF_PIL = ("PILToTensor", "ToImage", "ToTensor")


class Step(ABC):
    """One step after the graph, for any number of batches."""

    @abstractmethod
    def __call__(self, images: Images, actions: Sequence[Action]) -> Images:
        """Return the processed ``images``, which may be written to.

        Args:
            images: the images of one batch.
            actions: the actions of the whole chain, one for each of its primitives.
        """


class Each(Step):
    """Run a `Behind` with torchvision's own functions on each image, in threads of the CPU.

    Args:
        part: what is done.
        threads, count: the threads that share the images, and their number.
        memory: allocates a batch.
        fast: whether "resize" may be torch's on bytes, 1 or 2 levels off, instead of Pillow's.
        ordered: whether images keep the memory order in which torchvision makes them.
    """

    def __init__(
        self,
        part: Behind,
        threads: Executor,
        count: int,
        memory: Memory,
        *,
        fast: bool = False,
        ordered: bool = False,
    ) -> None:
        self._part = part
        self._threads = threads
        self._count = count
        self._memory = _ordered(memory) if ordered else _dense(memory)
        self._fast = fast

    def __call__(self, images: Images, actions: Sequence[Action]) -> Images:
        """See `Step`."""
        own = [
            self._quicker(actions[place], form)
            for place, form in zip(self._part.places, self._part.forms, strict=True)
        ]
        touched = [i for i in range(len(images)) if any(action.takes(i) for action in own)]
        if not touched:
            return images
        first = _tensor(self._made(own, touched[0], images[touched[0]]))
        batch = self._batch(images, first, len(touched))
        made: list[torch.Tensor] = list(images)

        def make(samples: Sequence[int]) -> None:
            for sample in samples:
                at_hand = sample == touched[0]
                image = first if at_hand else _tensor(self._made(own, sample, images[sample]))
                made[sample] = image
                if batch is not None and image.shape == first.shape and image.dtype is first.dtype:
                    made[sample] = batch[sample].copy_(image)

        shares = [touched[begin :: self._count] for begin in range(self._count)]
        futures = [self._threads.submit(make, share) for share in shares[1:] if share]
        try:
            make(shares[0])
        finally:
            errors = [future.exception() for future in futures]  # all have ended then
        for error in errors:
            if error is not None:
                raise error
        alike = all(each.shape == first.shape and each.dtype is first.dtype for each in made)
        if not alike:
            return made
        return torch.stack(made) if batch is None else batch

    def _batch(self, images: Images, first: torch.Tensor, touched: int) -> torch.Tensor | None:
        """Return memory to put images like ``first`` into; None: they are stacked later."""
        if touched == len(images):
            return self._memory(first, touched, first.dtype)
        if isinstance(images, torch.Tensor) and (images.shape[1:], images.dtype) == (
            first.shape,
            first.dtype,
        ):
            return images
        return None

    def _made(self, own: Sequence[Action], sample: int, image: torch.Tensor) -> Any:
        value: Any = _wrapped(image) if self._part.wraps else image
        stands_for_picture = self._part.form == "pil"
        if stands_for_picture and not self._fast:
            value, stands_for_picture = _picture(value), False
        for action in own:
            if not action.takes(sample):
                continue
            if stands_for_picture and not _is_alike(action.primitive):
                value, stands_for_picture = _picture(value), False
            value = action.apply(sample, value)
        return value

    def _quicker(self, action: Action, form: str) -> Action:
        primitive = action.primitive
        if self._fast and isinstance(primitive, Resize) and form == "pil":
            return replace(action, primitive=replace(primitive, antialias=True, v2=True))
        return action


def resizes_quickly(part: Behind, fast: Collection[str]) -> bool:
    """Whether torch resizes something of ``part`` on bytes, instead of Pillow."""
    return "resize" in fast and any(
        isinstance(step, Resize) and _is_alike(step) and form == "pil"
        for step, form in zip(part.primitives, part.forms, strict=True)
    )


def _is_alike(primitive: Primitive) -> bool:
    """Whether a tensor of bytes may replace a PIL image in, or next to, a `fast` resize."""
    if isinstance(primitive, Resize):
        return primitive.interpolation == "bilinear"
    return isinstance(primitive, (Crop, HorizontalFlip, VerticalFlip))


class OnDevice(Step):
    """Run a `Behind` with kernels on the whole batch, on its device."""

    def __init__(self, part: Behind) -> None:
        self._part = part

    def __call__(self, images: Images, actions: Sequence[Action]) -> Images:
        """See `Step`."""
        own = [actions[place] for place in self._part.places]
        return run(own, images, cast(Form, self._part.form), ours=True)

    @staticmethod
    def exactness(part: Behind) -> str | None:
        """Say how far the kernels of ``part`` are from torchvision; None if one is missing."""
        if part.by_type:
            return None  # a kernel sees plain tensors only
        form = cast(Form, part.form)
        told: list[str] = []
        for primitive in part.primitives:
            kernel = kernel_for(primitive, form)
            if kernel is None:
                return None
            if kernel.exact not in (EXACT, *told):
                told.append(kernel.exact)
            form = form_after(primitive, form)
        return "; ".join(told) or "torchvision's values to the bit"


class ByHost(Step):
    """Run a step on the CPU between steps on a device: copy there and back."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def __call__(self, images: Images, actions: Sequence[Action]) -> Images:
        """See `Step`."""
        device = images[0].device
        here: Images = (
            images.cpu() if isinstance(images, torch.Tensor) else [image.cpu() for image in images]
        )
        done = self._step(here, actions)
        if isinstance(done, torch.Tensor):
            return done.to(device)
        return [image.to(device) for image in done]


class Whole(Step):
    """Run a `TailRun`: look up what its members make of each byte, for all images at once.

    The members themselves made the tables, so the values equal torchvision's to the bit.

    Args:
        run: what is done.
        memory: allocates a batch.
        ordered: see `Each`; ToTensor makes all of them dense.
    """

    def __init__(self, run: TailRun, memory: Memory, *, ordered: bool = False) -> None:
        self._members = [member.transform for member in run.members]
        self._tables, self._channels = tables_of(arithmetic_of(run.members))
        first = torchvision_name(arithmetic_of(run.members)[0])
        keeps = ordered and first != "ToTensor"
        self._memory = _ordered(memory) if keeps else _dense(memory)
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
        out = self._memory(images[0], len(images), self._tables[after].values.dtype)
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


_Like: TypeAlias = "Callable[[torch.Tensor, int, torch.dtype], torch.Tensor]"
"""(an image, count, dtype) -> memory for this many images of that shape, on its device."""


def _dense(memory: Memory) -> _Like:
    return lambda image, count, dtype: memory((count, *image.shape), dtype, image.device)


def _ordered(memory: Memory) -> _Like:
    """Return an allocator that keeps the memory order of an image's dimensions."""

    def like(image: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        strides = image.stride()
        order = sorted(range(image.ndim), key=lambda place: -strides[place])
        out = memory((count, *(image.shape[place] for place in order)), dtype, image.device)
        return out.permute(0, *(1 + order.index(place) for place in range(image.ndim)))

    return like


def memory_of(pool: HostPool) -> Memory:
    """Return an allocator of dense memory, from ``pool`` on the CPU."""

    def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return pool.empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    return empty


def dense(images: Images, memory: Memory) -> Images:
    """Return ``images`` in the order of torchvision's tensors: one channel after the other."""
    if isinstance(images, list):
        return [image.contiguous() for image in images]
    if images.is_contiguous():
        return images
    return memory(images.shape, images.dtype, images.device).copy_(images)


def apart(images: Images, taken: Images) -> Images:
    """Return ``images``, copied if they share memory with ``taken``."""
    theirs = {image.untyped_storage().data_ptr() for image in _tensors(taken)}
    if isinstance(images, torch.Tensor):
        return images.clone() if images.untyped_storage().data_ptr() in theirs else images
    return [
        image.clone() if image.untyped_storage().data_ptr() in theirs else image for image in images
    ]


def _tensors(images: Images) -> Sequence[torch.Tensor]:
    return [images] if isinstance(images, torch.Tensor) else images


def _wrapped(image: torch.Tensor) -> torch.Tensor:
    from torchvision.tv_tensors import Image

    wrapped: torch.Tensor = image.as_subclass(Image)
    return wrapped


def _picture(image: torch.Tensor) -> Any:
    """Return a PIL image of uint8 [C, H, W], without sharing memory."""
    from PIL import Image

    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _tensor(value: Any) -> torch.Tensor:
    """Return ``value``, or for a PIL image uint8 [C, H, W] in the order [H, W, C]."""
    if isinstance(value, torch.Tensor):
        return value
    array = np.array(value, np.uint8)
    if array.ndim == 2:
        array = array[:, :, None]
    return torch.from_numpy(array).permute(2, 0, 1)
