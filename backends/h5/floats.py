"""Make the floats of a batch of images at once: ToTensor, ToDtype and Normalize at a tail's end.

images of bytes [N, C, H, W] ──Pointwise──> floats, equal to torchvision's to the bit
leaf ──UpToBytes──> an image of bytes, for tails that draw what h5 does not draw itself
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from dataloaders.batches.memory import HostPool
from dataloaders.recording.tail import Step, Trailing
from dataloaders.replaying.pointwise import Pointwise
from dataloaders.transforms.read import CONVERTERS, Member, Run, read, trailing

from .rows import empty
from .threads import Threads

__all__ = ["MODES", "UpToBytes", "float_steps"]

MODES = ("L", "RGB", "RGBA", "CMYK", "YCbCr")
"""Modes of PIL images whose planes ToTensor and ToImage take as they are."""


def float_steps(run: Sequence[Member]) -> tuple[Step, ...]:
    """Return the members of ``run``, which is from `trailing`, as a recording has them."""
    steps: list[Step] = []
    for member in run:
        transform: Any = member.transform
        name, is_v2 = member.torchvision, ".v2" in type(transform).__module__
        if name in CONVERTERS:
            continue
        if name == "Normalize":
            op, dtype = f"{'v2' if is_v2 else 'v1t'}.normalize", steps[-1].dtype
            numbers = ("mean", transform.mean), ("std", transform.std)
            steps.append(Step(op, (), numbers, dtype, "Tensor"))
        elif name == "ToTensor" or not is_v2:
            dtype = torch.get_default_dtype() if name == "ToTensor" else transform.dtype
            steps.append(Step("v1t.convert_image_dtype", (dtype,), (), dtype, "Tensor"))
        else:
            args = transform.dtype, getattr(transform, "scale", True)
            steps.append(Step("v2.to_dtype", args, (), transform.dtype, "Tensor"))
    return tuple(steps)


class UpToBytes:
    """A tail up to the members that make floats of bytes: these are done to whole batches.

    Where its images are not of bytes, it does all of the tail.
    """

    def __init__(self, tail: Any) -> None:
        members = read(tail)
        run = trailing(members)
        self.has_floats = bool(run)
        self._first = Run(member.transform for member in members[: len(members) - len(run)])
        self._last = Run(member.transform for member in run)
        self._steps = float_steps(run)

    def __call__(self, leaf: Any) -> Any:
        """Return the bytes of an image, uint8 [C, H, W]; the floats if there are none."""
        image = self._first(leaf)
        if isinstance(image, torch.Tensor):
            is_bytes = image.dtype is torch.uint8 and image.ndim == 3
            return image.as_subclass(torch.Tensor) if is_bytes else self._last(image)
        if getattr(image, "mode", None) not in MODES:
            return self._last(image)
        return torch.from_numpy(np.array(image)).view(*image.size[::-1], -1).permute(2, 0, 1)

    def collate(self, images: list[Any], pool: HostPool, threads: Threads, puts_off: bool) -> Any:
        """Return the batch of what calls returned; if ``puts_off``, of bytes as a `Trailing`."""
        are_bytes = [each.dtype is torch.uint8 for each in images]
        try:
            pointwise = Pointwise(self._steps, len(images[0]))
        except ValueError:  # torchvision raises its own for the sample
            are_bytes[0] = False
        if not all(are_bytes):
            finish = [self._last(each) if each.dtype is torch.uint8 else each for each in images]
            return default_collate(finish)
        pixels = default_collate(images)
        if puts_off:
            return Trailing(pixels, self._steps)
        floats = empty(pool, pixels.shape, pointwise.dtype)
        threads.split(
            len(floats),
            floats.nbytes,
            lambda begin, end: pointwise(pixels[begin:end], floats[begin:end]),
        )
        return floats
