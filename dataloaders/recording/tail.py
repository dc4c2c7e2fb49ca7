"""What ends a sample: images of bytes become floats, value by value.

    the dataset's own code, on its own images ──> ToTensor, ToDtype ──> a stand-in of the floats
    collate_fn on stand-ins ──> Trailing: a batch of bytes, and the steps that are left

Only floats are stood in for: files are read and decoded where the dataset does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dataloaders.recording import tensor
from dataloaders.recording.context import recorder
from dataloaders.recording.program import Node, is_image, stacks

_POINTWISE = {
    *("to_tensor", "pil_to_tensor", "as_subclass"),
    *("v1t.convert_image_dtype", "v1t.normalize", "v2.normalize", "v2.to_dtype"),
}


def is_pointwise(node: Node) -> bool:
    """Whether ``node`` makes of bytes or floats values that depend on a byte and its channel only.

    Once there are floats, their dtype stays.
    """
    if node.op not in _POINTWISE or len(node.inputs) != 1:
        return False
    before, after = getattr(node.inputs[0].what, "dtype", torch.uint8), node.what.dtype
    return after is before or (before is torch.uint8 and after.is_floating_point)


class Step(NamedTuple):
    """One step of a `Trailing`, as in a `Node`; ``dtype`` and ``flavour`` of what comes out."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    flavour: str


def step_of(node: Node) -> Step:
    """Return a node of one input as a step."""
    return Step(node.op, node.args, node.kwargs, node.what.dtype, node.what.flavour)


class Trailing(NamedTuple):
    """Images of a batch, and what is left to do with each value of them.

    Attributes:
        pixels: uint8 [..., C, H, W]; the floats themselves where no steps are left.
        steps: in order; what they make has the strides of ``pixels``.
    """

    pixels: torch.Tensor
    steps: tuple[Step, ...]


def bytes_of(image: Any) -> Any:
    """Return a stand-in of an image's bytes, uint8 [C, H, W], if tails are recorded here.

    None for what is no image of bytes, or a stand-in already.
    """
    own = recorder()
    if own is None or not own.tail:
        return None
    copied = not isinstance(image, torch.Tensor)
    if copied:
        image = planes(image)
    kind = type(image)
    known = kind is torch.Tensor or kind.__module__.startswith("torchvision.tv_tensors")
    if image is None or not known or kind.__name__ not in ("Tensor", "Image", "Video"):
        return None
    if image.dtype is not torch.uint8 or image.ndim < 3 or not image.numel() or not image.is_cpu:
        return None
    own.sources += 1
    node = tensor.source(image, copied=copied)
    return tensor.new(node, strides=node.args[-1])


def makes_floats(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether ``convert_image_dtype`` or ``to_dtype``, called with these, makes floats."""
    dtype = args[0] if args else kwargs.get("dtype", torch.float32)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def trailing(root: Node, empty: Callable[[int], torch.Tensor]) -> Trailing | str:
    """Return ``root`` as bytes and steps; or the step that keeps it from being that.

    Args:
        root: an image, or a stack of images that went through equal steps.
        empty: returns uint8 memory of so many bytes.
    """
    node, steps = _chain(root)
    stacked = stacks(node)
    chains = [_chain(each) for each in node.inputs] if stacked else [(node, [])]
    before, what = chains[0][1], chains[0][0].what
    others = {image.op for image, _ in chains} - {"tensor"}
    alike = all((image.what, own) == (what, before) for image, own in chains)
    floats = root.what.dtype.is_floating_point
    if others or not alike or what.dtype is not torch.uint8 or len(what.shape) < 3 or not floats:
        return min(others, default=node.op + " of unlike images" * stacked)
    values = [
        torch.from_numpy(image.args[0]).as_strided(what.shape, image.args[-1])
        for image, _ in chains
    ]
    if not stacked:
        return Trailing(values[0], tuple(steps))
    pixels = empty(len(values) * values[0].numel()).view(len(values), *what.shape)
    for place, value in zip(pixels, values, strict=True):
        place.copy_(value)
    return Trailing(pixels, tuple(before + steps))


def _chain(node: Node) -> tuple[Node, list[Step]]:
    """Return the first step before pointwise ones, and these."""
    steps: list[Step] = []
    while is_pointwise(node):
        steps.append(step_of(node))
        (node,) = node.inputs
    return node, steps[::-1]


def planes(image: Any) -> Any:
    """Return a copy of the bytes that ToTensor scales, [C, H, W]; None if it scales none."""
    if not isinstance(image, np.ndarray) and not is_image(image):
        return None
    if getattr(image, "mode", "") == "RGB" and all(image.size):  # quicker than to turn an array
        bytes_ = bytearray().join([image.tobytes("raw", band) for band in "RGB"])
        return torch.frombuffer(bytes_, dtype=torch.uint8).view(3, image.height, image.width)
    pixels = np.array(image)
    if pixels.dtype == bool:  # Pillow's mode "1"
        pixels = pixels.astype(np.uint8) * 255
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        return None
    found = torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).permute(2, 0, 1)
    if isinstance(image, np.ndarray):  # ToTensor gives these other strides, if there is one channel
        return found.clone(memory_format=torch.contiguous_format)
    return found.contiguous()
