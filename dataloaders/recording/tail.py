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
from dataloaders.recording.program import Input, Node

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


def trailing(root: Node, empty: Callable[[int], torch.Tensor]) -> Trailing | None:
    """Return ``root`` as bytes and steps; None if it is anything but pointwise steps of images.

    Args:
        root: an image, or a stack of images that went through equal steps.
        empty: returns uint8 memory of so many bytes.
    """
    node, steps = _chain(root)
    images = [node]
    if node.op == "torch.stack":
        given = list(node.args[0]), *node.args[1:], *dict(node.kwargs).values()
        order = [Input(number) for number in range(len(node.inputs))]
        chains = [_chain(each) for each in node.inputs]
        if given not in ((order,), (order, 0)) or any(each[1] != chains[0][1] for each in chains):
            return None
        images, steps = [image for image, _ in chains], chains[0][1] + steps
    what = images[0].what
    if any(each.op != "tensor" or each.what != what for each in images):
        return None
    floats = root.what.dtype.is_floating_point
    if what.dtype is not torch.uint8 or len(what.shape) < 3 or not floats:
        return None
    values = [
        torch.from_numpy(each.args[0]).as_strided(what.shape, each.args[-1]) for each in images
    ]
    if images[0] is node:
        return Trailing(values[0], tuple(steps))
    pixels = empty(len(values) * values[0].numel()).view(len(values), *what.shape)
    for place, value in zip(pixels, values, strict=True):
        place.copy_(value)
    return Trailing(pixels, tuple(steps))


def obstacle(root: Node) -> str:
    """Return which step keeps ``root`` from being `trailing`."""
    node, _ = _chain(root)
    if node.op == "torch.stack":
        ends = {_chain(each)[0].op for each in node.inputs} - {"tensor"}
        return min(ends, default="torch.stack of unlike images")
    return node.op


def _chain(node: Node) -> tuple[Node, list[Step]]:
    """Return the first step before pointwise ones, and these."""
    steps: list[Step] = []
    while is_pointwise(node):
        steps.append(step_of(node))
        (node,) = node.inputs
    return node, steps[::-1]


def planes(image: Any) -> Any:
    """Return a copy of the bytes that ToTensor scales, [C, H, W]; None if it scales none."""
    if not isinstance(image, np.ndarray) and not hasattr(image, "getbands"):
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
