"""Recorded calls done to many images at once: which kernel does a call, and the images of a kernel.

    calls of an image  ──kernels_of──>  [(kernel, number), ...]  ──do──> call k of all images

`OF_BYTES` has the calls on bytes, before the last pass, and `OF_FLOATS` those on floats, after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dataloaders.recording import program
from dataloaders.recording.ops import run
from dataloaders.recording.program import Node

from . import kernels
from .kernels import Array, upload
from .plan import Row, arguments

Kernel: TypeAlias = Callable[[Tensor, Sequence[Any]], Tensor]
"""Takes images and a number for each; returns new images."""

Step: TypeAlias = tuple[Kernel, Any]
"""A kernel, and what it takes for one image."""

_MOST_BYTES = 1 << 26
"""What a kernel works on at a time; its temporary tensors take some 20 times that."""


def do(images: Tensor, steps: Sequence[Sequence[Step]]) -> None:
    """Do ``steps``, those of each image in order, in place, each kernel for all images at once.

    Args:
        images: uint8 [n, H, W, 3], or floats [n, 3, H, W].
        steps: of each image.
    """
    most = max(1, _MOST_BYTES // (images[:1].numel() * images.element_size() or 1))
    for level in range(max(map(len, steps), default=0)):
        groups: dict[Kernel, tuple[list[int], list[Any]]] = {}
        for place, own in enumerate(steps):
            for kernel, number in own[level : level + 1]:
                places, numbers = groups.setdefault(kernel, ([], []))
                places.append(place)
                numbers.append(number)
        for kernel, (places, numbers) in groups.items():
            for begin in range(0, len(places), most):
                some = slice(begin, begin + most)
                index = upload(np.array(places[some]), images.device)
                made = kernel(images.index_select(0, index), numbers[some])
                images.index_copy_(0, index, made)


class Call(NamedTuple):
    """How a recorded call is made on a device.

    Attributes:
        kernel: does it; None: it leaves the values as they are.
        number: returns what the kernel takes for a step; None: the CPU has to make that step.
        off: levels of 256 by which it differs from torchvision's at most, in our tests and from one
            image to another: what follows may make more of it.
    """

    kernel: Kernel | None
    number: Callable[[Node], Any]
    off: int = 0


def levels_off(op: str) -> int:
    """Return by how many levels of 256 a device's ``op`` differs from torchvision's at most."""
    return 12 if op in _RESIZES else OF_BYTES[op].off if op in OF_BYTES else 0


def bytes_steps(row: Row, height: int, width: int) -> list[Step] | None:
    """Return the steps of ``row`` between its first steps and its bytes; None: for the CPU."""
    head = row.head
    if head is None or min(height, width) < 3:
        return None
    if head.size is not None and head.by != 2:
        return None
    for step in (head.node, *row.steps):
        what = step.what
        size = what.size[::-1] if isinstance(what, program.Image) else what.shape[1:]
        if tuple(size) != (height, width):
            return None
    return _steps(row.steps, OF_BYTES)


def float_steps(row: Row) -> list[Step] | None:
    """Return the steps of ``row`` after the stack's last pass; None: for the CPU."""
    node, steps = row.last, []
    while node is not row.done:
        if node.what != row.done.what or node.what.dtype is not torch.float32:
            return None
        steps.append(node)
        node = node.inputs[0]
    return _steps(steps[::-1], OF_FLOATS)


def _steps(nodes: Sequence[Node], table: dict[str, Call]) -> list[Step] | None:
    found: list[Step] = []
    for node in nodes:
        op = f"{node.op} {int(node.args[0])}" if node.op == "pil.transpose" else node.op
        call = table.get(op)
        number = None if call is None else call.number(node)
        if number is None:
            return None
        if call.kernel is not None:  # type: ignore[union-attr]
            found.append((call.kernel, number))  # type: ignore[union-attr]
    return found


def _given(step: Node) -> list[Any]:
    return [*step.args, *(value for _, value in step.kwargs)]


def _first(step: Node) -> Any:
    return _given(step)[0]


def _always(step: Node) -> Any:
    return True


def _if_plain(step: Node) -> Any:
    return None if any(_given(step)) else True


def _shift(step: Node) -> int:
    return int(_first(step) * 255) & 255


def _brightness(step: Node) -> Array:
    """Return uint8 [1, 256]: each level times the factor."""
    levels = np.arange(256, dtype=np.float32).reshape(1, 256)
    made: Array = np.clip(levels * np.float32(_first(step)), 0, 255).astype(np.uint8)
    return made


def _table(step: Node) -> Array:
    """Return uint8 [1, 256]: what Pillow makes of each level."""
    return _table_of(step.op.replace("v2.", "imageops."), step.args, step.kwargs)


@lru_cache(maxsize=512)
def _table_of(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Array:
    what = program.Image("RGB", (256, 1))
    levels = np.arange(256, dtype=np.uint8).reshape(1, 256, 1).repeat(3, 2)
    first = Node("array", (), (levels.tobytes(), levels.shape), (), what)
    made: Array = np.asarray(run([Node(op, (first,), args, kwargs, what)])[0])
    return made[:, :, 0]


def _warp(step: Node) -> tuple[Array, Array] | None:
    """Return the matrix and the colour outside of an affine step; None for any other."""
    size, method, matrix, resample, _, colour = step.args
    plain = method == 0 and resample == 0 and (not colour or np.shape(colour) == (3,))
    numbers = np.array(matrix[:6], np.float64)
    if not plain or not kernels.reaches(numbers, *size):
        return None
    return numbers, np.array(colour or (0, 0, 0)).clip(0, 255).astype(np.uint8)


def _weights(step: Node) -> tuple[Array, ...] | None:
    """Return the weights of a blur across and down."""
    named = arguments(step, ("kernel_size", "sigma"))
    sizes, sigmas = (named.get(name, ()) for name in ("kernel_size", "sigma"))
    if np.shape(sizes) != (2,) or np.shape(sigmas) != (2,):
        return None
    if any(size // 2 >= side for size, side in zip(sizes, step.what.shape[:0:-1], strict=True)):
        return None
    weights = []
    for size, sigma in zip(sizes, sigmas, strict=True):
        weight = np.exp(-0.5 * ((np.arange(size) - size // 2) / sigma) ** 2)
        weights.append((weight / weight.sum()).astype(np.float32))
    return tuple(weights)


def _mean_and_std(step: Node) -> Array:
    named = arguments(step, ("mean", "std"))
    return np.stack([np.broadcast_to(np.float32(named[each]), 3) for each in ("mean", "std")])


def _box(step: Node) -> tuple[Any, ...] | None:
    """Return the values of an erased box, their strides, and its place."""
    value = step.inputs[1]
    named = arguments(step, ("i", "j", "h", "w"))
    if value.op != "tensor" or value.what.dtype is not torch.float32 or len(value.what.shape) != 3:
        return None
    strides = [
        0 if side == 1 else stride
        for side, stride in zip(value.what.shape, value.args[-1], strict=True)
    ]
    box = tuple(int(named[name]) for name in "ijhw")
    return np.frombuffer(value.args[0], np.float32), strides, box


_RESIZES = ("pil.resize", "v2.resize", "v2.resized_crop")
_SAME, _TABLE = Call(None, _always), Call(kernels.lookup, _table)
_BRIGHTNESS, _GREY = Call(kernels.lookup, _brightness), Call(kernels.saturation, lambda step: 0.0)
_BLUR = Call(kernels.blur, _weights, 1)
_TABLES = ("invert", "posterize", "solarize")
_MIRRORS, _FLIPS = ("hflip", "horizontal_flip"), ("vflip", "vertical_flip")

OF_BYTES: dict[str, Call] = {
    **dict.fromkeys(("pil_to_tensor", "to_pil_image", "as_subclass", "v2.to_dtype"), _SAME),
    "enhance.Brightness": _BRIGHTNESS,
    "enhance.Contrast": Call(kernels.contrast, _first),
    "enhance.Color": Call(kernels.saturation, _first),
    "enhance.Sharpness": Call(kernels.sharpness, _first),
    "fpil.adjust_hue": Call(kernels.hue, _shift),
    "fpil.adjust_gamma": _TABLE,
    "fpil.to_grayscale": _GREY,
    "imageops.autocontrast": Call(kernels.autocontrast, _if_plain),
    "imageops.equalize": Call(kernels.equalize, _if_plain),
    **{f"{home}.{name}": _TABLE for home in ("imageops", "v2") for name in _TABLES},
    "pil.transform": Call(kernels.affine, _warp),
    **{f"pil.transpose {method}": Call(turn, _always) for method, turn in kernels.TURNS.items()},
    **dict.fromkeys(("v1t.gaussian_blur", "v2.gaussian_blur"), _BLUR),
    "v2.adjust_brightness": _BRIGHTNESS,
    "v2.adjust_contrast": Call(kernels.contrast, _first, 1),
    "v2.adjust_saturation": Call(kernels.saturation, _first, 1),
    "v2.adjust_sharpness": Call(kernels.sharpness, _first, 1),
    "v2.adjust_hue": Call(kernels.tint, _first, 1),
    "v2.autocontrast": Call(kernels.autocontrast, _if_plain, 1),
    "v2.equalize": Call(kernels.equalize, _if_plain),
    **dict.fromkeys(("v2.rgb_to_grayscale", "v2.to_grayscale"), _GREY._replace(off=1)),
    **{f"v2.{name}": Call(kernels.TURNS[0], _always) for name in _MIRRORS},
    **{f"v2.{name}": Call(kernels.TURNS[1], _always) for name in _FLIPS},
}
_OF_FLOATS = {
    "normalize": Call(kernels.normalised, _mean_and_std),
    "erase": Call(kernels.erased, _box),
    **dict.fromkeys(_MIRRORS, Call(lambda images, _: images.flip(3), _always)),
    **dict.fromkeys(_FLIPS, Call(lambda images, _: images.flip(2), _always)),
}
OF_FLOATS: dict[str, Call] = {
    "as_subclass": _SAME,
    **{f"{home}.{name}": call for home in ("v1t", "v2") for name, call in _OF_FLOATS.items()},
}
