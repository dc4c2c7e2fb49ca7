"""Find the trailing members of a chain that work pixel by pixel, and defer them.

Resize, RandomCrop, flip │ ToTensor, Normalize     in the dataset: float32, 4 bytes a value
Resize, RandomCrop, flip │ Deferred                in its copy: uint8; the rest on the device
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dataloaders.errors import BackendUnavailable
from dataloaders.transforms.kinds import torchvision_name
from dataloaders.transforms.read import Member, Run

__all__ = ["CONVERTERS", "Deferred", "arithmetic_of", "deferred_chain", "trailing"]

CONVERTERS = ("PILToTensor", "ToImage", "ToPureTensor")
"""They change the type of a sample and no value of it: they stay in the dataset."""


def trailing(members: Sequence[Member]) -> tuple[Member, ...] | str:
    """Return the longest trailing run that makes floats of bytes one by one, or why there is none.

    Returns:
        The members of the run, in order: converters (PILToTensor, ToImage, ToPureTensor), one
        that makes floats (ToTensor, ConvertImageDtype or ToDtype with a float dtype), Normalize.
    """
    begin = len(members)
    while begin and _is_pointwise(members[begin - 1].transform):
        begin -= 1
    run = tuple(members[begin:])
    if any(_makes_floats(member.transform) for member in run):
        return run
    if not run:
        last = members[-1] if members else None
        if last is None:
            return "the chain of transforms is empty"
        if last.torchvision == "ToDtype":
            return f"{last} has a dict of dtypes or no float dtype; give it one, torch.float32"
        return (
            f"the chain ends in {last}, which is not known to work on each value alone; put it "
            "before ToTensor, or before ToDtype(torch.float32, scale=True), if it may stand there"
        )
    before = members[begin - 1] if begin else None
    if run[-1].torchvision in CONVERTERS:
        return f"the chain ends in {run[-1]} and makes no floats: there is nothing to move"
    if before is None:
        return f"{run[0]} gets floats from the dataset itself, so nothing smaller could be copied"
    return (
        f"{run[0]} gets floats: {before} stands between it and what makes them; put {before.name} "
        "before ToTensor, or before ToDtype(torch.float32, scale=True), if it may stand there"
    )


def arithmetic_of(run: Sequence[Member]) -> tuple[Any, ...]:
    """Return the run's transforms that make or change floats, without the converters."""
    return tuple(m.transform for m in run if m.torchvision not in CONVERTERS)


def deferred_chain(chain: Any, members: Sequence[Member], deferred: Deferred) -> Any:
    """Return ``chain`` with its trailing run replaced by ``deferred``, a new object.

    Args:
        chain: what `read` read: a Compose (copied), an ``nn.Sequential`` or a lone transform.
        members: all of its members, in order.
        deferred: made of the last of them.
    """
    head = [member.transform for member in members[: len(members) - len(deferred.run)]]
    if torchvision_name(chain) == "Compose":
        shortened = copy.copy(chain)
        shortened.transforms = [*head, deferred]
        return shortened
    return Run((*head, deferred)) if head else deferred


class Deferred:
    """Stop at the uint8 image that the run would turn into floats; runs in the dataset.

    A sample unlike those of the proof (16 bits, another number of channels) goes through the
    user's own members, which may raise as they always did; if they do not, this raises.

    Args:
        run: the user's own transforms, all of the run.
        channels: channels of the image -> channels of the run's output, those that were tried.
            v2's Normalize with three means makes three channels of one.
    """

    def __init__(self, run: Sequence[Any], channels: dict[int, int]) -> None:
        self.run = tuple(run)
        self.channels = channels
        self._kept: list[Any] = []
        for transform in self.run:
            name = torchvision_name(transform)
            if name == "ToTensor":
                self._kept.append(_to_bytes)
            elif name in CONVERTERS:
                self._kept.append(transform)

    def __repr__(self) -> str:
        names = ", ".join(type(transform).__name__ for transform in self.run)
        return f"Deferred({names})"

    def __call__(self, *inputs: Any) -> Any:
        """Return the sample with its image as uint8 [C, H, W], of the run's type."""
        sample: Any = inputs if len(inputs) > 1 else inputs[0]
        deferred = sample
        for transform in self._kept:
            deferred = transform(*deferred) if len(inputs) > 1 else transform(deferred)
        if isinstance(deferred, torch.Tensor):
            after = self._after(deferred)
            if after:
                unchanged = after == deferred.shape[-3]
                return deferred if unchanged else _expanded(deferred, after)
        elif self._all_known(deferred):
            return deferred
        for transform in self.run:  # it may well raise: then as it does without us
            sample = transform(*sample) if len(inputs) > 1 else transform(sample)
        raise BackendUnavailable(
            f"a sample is {_called(inputs[0])} before {type(self.run[0]).__name__}, and only uint8 "
            f"images of {' or '.join(map(str, self.channels))} channels are moved to the device; "
            "turn the device tail off: Prefetch(tail=False)"
        )

    def _after(self, image: torch.Tensor) -> int:
        """Return the channels of the run's output for ``image``; 0 if it was not tried."""
        if image.dtype is not torch.uint8 or image.ndim < 3:
            return 0
        return self.channels.get(image.shape[-3], 0)

    def _all_known(self, sample: Any) -> bool:
        """Return whether the images of a nested sample, as v2 finds them, were tried."""
        tensors = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, torch.Tensor)]
        images = [leaf for leaf in tensors if type(leaf).__name__ in ("Image", "Video")]
        images = images or [leaf for leaf in tensors if type(leaf) is torch.Tensor][:1]
        return bool(images) and all(self._after(leaf) == leaf.shape[-3] for leaf in images)


def _is_pointwise(transform: Any) -> bool:
    name = torchvision_name(transform)
    return name in (*CONVERTERS, "Normalize") or _makes_floats(transform)


def _makes_floats(transform: Any) -> bool:
    name = torchvision_name(transform)
    if name in ("ConvertImageDtype", "ToDtype"):
        dtype = transform.dtype
        return isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return name == "ToTensor"


def _to_bytes(picture: Any) -> Any:
    """Return the uint8 CHW tensor that ToTensor would scale; None if it would scale none."""
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim not in (2, 3):
            return None
        pixels = picture
    elif getattr(picture, "mode", None) in (None, "I", "I;16", "I;16B", "F"):
        return None
    else:
        pixels = np.array(picture, np.uint8)
        if picture.mode == "1":
            pixels *= 255
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    # A copy always: the array may be the dataset's own.
    return torch.from_numpy(pixels).permute(2, 0, 1).clone(memory_format=torch.contiguous_format)


def _expanded(image: torch.Tensor, channels: int) -> torch.Tensor:
    return image.expand(*image.shape[:-3], channels, *image.shape[-2:])


def _called(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = "x".join(str(size) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')} {shape}"
    mode = getattr(value, "mode", None)
    name = type(value).__name__
    return f"{name} of mode {mode}" if isinstance(mode, str) else name
