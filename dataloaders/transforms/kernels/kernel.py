"""What a kernel is, and what all of them need: numbers on the device, work in bounded pieces.

numbers, NumPy on the host ──there()──> tensors beside the images
uint8 [k, C, H, W] ──in_pieces()──> a few samples at a time ──> uint8 [k, C, H, W]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["EXACT", "Array", "Form", "Images", "Kernel", "column", "in_pieces", "there"]

Array: TypeAlias = "npt.NDArray[Any]"

Images: TypeAlias = "Tensor | list[Tensor]"
"""uint8 [k, C, H, W]; or k tensors [C, H, W] where sizes differ. C: 1 or 3, Pillow's L and RGB."""

Form: TypeAlias = Literal["pil", "bytes", "ints", "floats"]
"""What an image is to the user's transform: a PIL image, or a tensor of bytes, other whole numbers
or floats."""

EXACT = "exact"
"""Every byte is that of torchvision's functional on a PIL image."""

_CPU_ELEMENTS = 1 << 18
"""Values worked on at a time: on the CPU what stays in a core's cache between two steps,"""

_DEVICE_BYTES = 1 << 29
"""elsewhere what bounds all temporary tensors of a step together."""


@dataclass(frozen=True)
class Kernel:
    """A primitive's work on many images at once, where they are.

    Attributes:
        name: what it does, in one word.
        function: called with the images and the numbers, arrays [k, ...] of the host; gives new
            tensors, or the very images if there is nothing to do. Images of one size, unless
            ``ragged``.
        ragged: whether it takes a list of images of different sizes too.
        any_dtype: whether it takes other tensors than uint8 of 1 or 3 channels.
        light: whether on the CPU it takes less than torchvision on PIL images made of the same
            tensors, and back, does (`python -m bench kernels_cpu`).
        exact: `EXACT`; or how far it is from torchvision on PIL images, in words.
    """

    name: str
    function: Callable[[Any, Mapping[str, Array]], Images]
    ragged: bool = False
    any_dtype: bool = False
    light: bool = False
    exact: str = EXACT

    def __call__(self, images: Images, numbers: Mapping[str, Array]) -> Images:
        """What becomes of ``images``: uint8 [k, C, h, w], or a list if sizes then differ.

        Raises:
            TypeError: for tensors of another type, or of other channels than Pillow's L and RGB.
        """
        if not len(images):
            return images
        image = images[0]
        if not self.any_dtype and (image.dtype != torch.uint8 or image.shape[0] not in (1, 3)):
            raise TypeError(
                f"{self.name} computes what Pillow does to bytes of 1 or 3 channels, not "
                f"{str(image.dtype).removeprefix('torch.')} of {image.shape[0]}"
            )
        return self.function(images, numbers)


def there(
    array: npt.ArrayLike | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """``array`` on ``device``; through pinned memory, so that a CUDA stream is not waited for."""
    host = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    if dtype is not None:
        host = host.to(dtype)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def column(array: npt.ArrayLike, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[k, 1, 1, 1] beside ``images``: one number a sample."""
    return there(array, images.device, dtype).reshape(-1, 1, 1, 1)


def in_pieces(
    work: Callable[..., Tensor],
    images: Tensor,
    *numbers: Tensor,
    shape: tuple[int, ...] | None = None,
    bytes_each: int = 32,
) -> Tensor:
    """``work(images, *numbers)`` for a few samples at a time, so that its steps stay in cache.

    Args:
        work: gives uint8 [n, *shape] for uint8 [n, C, H, W] and numbers [n, ...].
        shape: of what it gives for one image; None: that of the image.
        bytes_each: that its temporary tensors take for one value of what it gives.
    """
    count = len(images)
    shape = tuple(images.shape[1:]) if shape is None else shape
    most = _CPU_ELEMENTS if images.device.type == "cpu" else _DEVICE_BYTES // bytes_each
    rows = max(1, most // max(1, math.prod(shape)))
    if rows >= count:
        return work(images, *numbers)
    out = torch.empty((count, *shape), dtype=torch.uint8, device=images.device)
    for begin in range(0, count, rows):
        piece = slice(begin, begin + rows)
        out[piece] = work(images[piece], *(number[piece] for number in numbers))
    return out
