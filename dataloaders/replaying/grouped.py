"""Recorded steps done to many images at once: which kernel a step has, and the images of a kind.

    steps of an image  ──kinds──>  [(kind, number), ...]  ──do──> step k of all images, by kind

``bytes_kinds``: steps on bytes, before the last pass; ``float_kinds``: steps on floats, after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dataloaders.recording import program
from dataloaders.recording.ops import run
from dataloaders.recording.program import Node

from . import floats, kernels
from .kernels import Array, upload
from .plan import Row, arguments

Kind: TypeAlias = tuple[Any, Any]
"""The key of a kernel, and what it takes for one image."""

_MOST_BYTES = 1 << 26
"""What a kernel works on at a time; its temporary tensors take some 20 times that."""


def do(images: Tensor, steps: Sequence[Sequence[Kind]], table: dict[Any, Kernel]) -> None:
    """Do ``steps``, those of each image in order, in place, each kind for all images at once.

    Args:
        images: uint8 [n, H, W, 3], or floats [n, 3, H, W].
        steps: of each image.
        table: `OF_BYTES` or `OF_FLOATS`.
    """
    most = max(1, _MOST_BYTES // (images[:1].numel() * images.element_size() or 1))
    for level in range(max(map(len, steps), default=0)):
        groups: dict[Any, tuple[list[int], list[Any]]] = {}
        for place, own in enumerate(steps):
            for kind, number in own[level : level + 1]:
                places, numbers = groups.setdefault(kind, ([], []))
                places.append(place)
                numbers.append(number)
        for kind, (places, numbers) in groups.items():
            kernel = table[kind[0] if isinstance(kind, tuple) else kind]
            for begin in range(0, len(places), most):
                some = slice(begin, begin + most)
                index = upload(np.array(places[some]), images.device)
                made = kernel(images.index_select(0, index), numbers[some])
                images.index_copy_(0, index, made)


Kernel: TypeAlias = Callable[[Tensor, Sequence[Any]], Tensor]


def _factors(images: Tensor, numbers: Sequence[float]) -> Tensor:
    return upload(np.array(numbers, np.float32), images.device)


def _warped(images: Tensor, numbers: Sequence[tuple[Array, Array]]) -> Tensor:
    return kernels.affine(
        images, np.stack([m for m, _ in numbers]), np.stack([f for _, f in numbers])
    )


def _blurred(images: Tensor, numbers: Sequence[tuple[Array, Array]]) -> Tensor:
    across, down = (upload(np.stack(each), images.device) for each in zip(*numbers, strict=True))
    return floats.blurred(images, across, down)


def _normalised(images: Tensor, numbers: Sequence[Array]) -> Tensor:
    mean, std = upload(np.stack(numbers), images.device).view(-1, 2, 3, 1, 1).unbind(1)
    return images.sub_(mean).div_(std)


OF_BYTES: dict[Any, Kernel] = {
    "table": lambda x, n: kernels.lookup(x, upload(np.stack(n), x.device)),
    "contrast": lambda x, n: kernels.lookup(x, kernels.contrast(x, _factors(x, n))),
    "autocontrast": lambda x, n: kernels.lookup(x, kernels.autocontrast(x)),
    "equalize": lambda x, n: kernels.lookup(x, kernels.equalize(x)),
    "saturation": lambda x, n: kernels.saturation(x, _factors(x, n)),
    "sharpness": lambda x, n: kernels.sharpness(x, _factors(x, n)),
    "hue": lambda x, n: kernels.hue(x, upload(np.array(n, np.int32), x.device)),
    "tint": lambda x, n: kernels.tint(x, _factors(x, n)),
    "affine": _warped,
    "blur": lambda x, n: (
        _blurred(x.permute(0, 3, 1, 2).float(), n).round_().to(torch.uint8).permute(0, 2, 3, 1)
    ),
    0: lambda x, n: x.flip(2),  # Pillow's Transpose
    1: lambda x, n: x.flip(1),
    2: lambda x, n: x.rot90(1, (1, 2)),
    3: lambda x, n: x.flip((1, 2)),
    4: lambda x, n: x.rot90(3, (1, 2)),
}
OF_FLOATS: dict[Any, Kernel] = {
    "adjust_brightness": lambda x, n: floats.brightness(x, _factors(x, n)),
    "adjust_contrast": lambda x, n: floats.contrast(x, _factors(x, n)),
    "adjust_saturation": lambda x, n: floats.saturation(x, _factors(x, n)),
    "adjust_hue": lambda x, n: floats.hue(x, _factors(x, n)),
    "rgb_to_grayscale": lambda x, n: floats.grey(x).expand_as(x),
    "blur": _blurred,
    "normalize": _normalised,
    "erase": floats.erased,
    0: lambda x, n: x.flip(3),
    1: lambda x, n: x.flip(2),
}

_FACTORS = {
    **dict.fromkeys(("enhance.Contrast", "v2.adjust_contrast"), "contrast"),
    **dict.fromkeys(("enhance.Color", "v2.adjust_saturation"), "saturation"),
    **dict.fromkeys(("enhance.Sharpness", "v2.adjust_sharpness"), "sharpness"),
    "v2.adjust_hue": "tint",
}
_PLAIN: dict[str, Any] = {
    **dict.fromkeys(("imageops.autocontrast", "v2.autocontrast"), "autocontrast"),
    **dict.fromkeys(("imageops.equalize", "v2.equalize"), "equalize"),
    **dict.fromkeys(("v2.hflip", "v2.horizontal_flip"), 0),
    **dict.fromkeys(("v2.vflip", "v2.vertical_flip"), 1),
}
_OFF = {
    **dict.fromkeys(("pil.resize", "v1t.resize", "v2.resize", "v2.resized_crop"), 12),
    **dict.fromkeys(("v2.adjust_contrast", "v2.adjust_saturation", "v2.adjust_hue"), 1),
    **dict.fromkeys(("v2.adjust_sharpness", "v2.autocontrast", "v2.rgb_to_grayscale"), 1),
    **dict.fromkeys(("v1t.gaussian_blur", "v2.gaussian_blur"), 1),
}
_TABLES = ("imageops.invert", "imageops.posterize", "imageops.solarize", "fpil.adjust_gamma")
_GREYS = ("fpil.to_grayscale", "v2.rgb_to_grayscale", "v2.to_grayscale")
_FLIPS = {"hflip": 0, "horizontal_flip": 0, "vflip": 1, "vertical_flip": 1}
_SCALING = ("to_tensor", "pil_to_tensor", "as_subclass", "v1t.convert_image_dtype")
_LEVELS = np.arange(256, dtype=np.float32).reshape(1, 256)


def levels_off(op: str) -> int:
    """Return by how many levels of 256 a device's ``op`` differs from torchvision's at most.

    In our tests, from one image to another: what follows may make more of it.
    """
    return _OFF.get(op, 0)


def bytes_kinds(row: Row, height: int, width: int) -> list[Kind] | None:
    """Return the steps of ``row`` between its first steps and its bytes; None: for the CPU."""
    head = row.head
    if head is None or min(height, width) < 3:
        return None
    if head.size is not None and head.by not in (2, "bilinear"):
        return None
    for step in (head.node, *row.steps):
        what = step.what
        size = what.size[::-1] if isinstance(what, program.Image) else what.shape[1:]
        if tuple(size) != (height, width):
            return None
    return _known([_of_bytes(step, height, width) for step in row.steps])


def float_kinds(row: Row, slots: Sequence[Any]) -> list[Kind] | None:
    """Return the steps of ``row`` after the stack's last pass; None: for the CPU."""
    node, steps = row.last, []
    while node is not row.done:
        if node.what != row.done.what or node.what.dtype is not torch.float32:
            return None
        steps.append(node)
        node = node.inputs[0]
    within = True  # 0 and 1: else torchvision's hue is something else
    while node is not row.image:
        within &= node.op != "v2.to_dtype" or True in _given(node)
        within &= node.op in (*_SCALING, "v2.to_dtype")
        node = node.inputs[0]
    for step in reversed(steps):
        if step.op.endswith(".adjust_hue") and not within:
            return None
        within &= not step.op.endswith((".normalize", ".erase"))
    return _known([_of_floats(step, slots) for step in reversed(steps)])


def _given(step: Node) -> list[Any]:
    return [*step.args, *(value for _, value in step.kwargs)]


def _known(kinds: list[Kind | None]) -> list[Kind] | None:
    found = [kind for kind in kinds if kind is not None and kind[0] != "same"]
    return None if None in kinds else found


def _of_bytes(step: Node, height: int, width: int) -> Kind | None:
    given, op = _given(step), step.op
    if op in ("pil_to_tensor", "to_pil_image", "as_subclass", "v2.to_dtype"):
        return "same", None
    if op in ("enhance.Brightness", "v2.adjust_brightness"):
        table = np.clip(_LEVELS * np.float32(given[0]), 0, 255).astype(np.uint8)
        return "table", table
    if op in _FACTORS:
        return _FACTORS[op], given[0]
    if op in _PLAIN:
        return None if any(given) else (_PLAIN[op], None)
    if op in _TABLES or op.replace("v2.", "imageops.") in _TABLES:
        return "table", _table(op.replace("v2.", "imageops."), step.args, step.kwargs)
    if op in _GREYS:
        return "saturation", 0.0
    if op == "fpil.adjust_hue":
        return "hue", int(given[0] * 255) & 255
    if op == "pil.transform":
        return _warp(step.args, height, width)
    if op.endswith(".gaussian_blur"):
        return _blur(step)
    return (int(given[0]), None) if op == "pil.transpose" and given[0] < 5 else None


def _of_floats(step: Node, slots: Sequence[Any]) -> Kind | None:
    home, _, name = step.op.partition(".")
    if step.op == "as_subclass":
        return "same", None
    if home not in ("v1t", "v2"):
        return None
    if name in _FLIPS:
        return _FLIPS[name], None
    if name == "normalize":
        named = arguments(step, ("mean", "std"))
        both = [np.broadcast_to(np.float32(named[each]), 3) for each in ("mean", "std")]
        return name, np.stack(both)
    if name == "gaussian_blur":
        return _blur(step)
    if name == "erase":
        return _erased(step, slots)
    return (name, _given(step)[0]) if name in OF_FLOATS else None


@lru_cache(maxsize=512)
def _table(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Array:
    """Return uint8 [1, 256]: what Pillow makes of each level."""
    what = program.Image("RGB", (256, 1))
    levels = np.arange(256, dtype=np.uint8).reshape(1, 256, 1).repeat(3, 2)
    first = Node("array", (), (0, levels.shape, "|u1", "RGB"), (), what)
    made = run([Node(op, (first,), args, kwargs, what)], [levels.tobytes()])[0]
    return np.asarray(made)[:, :, 0]


def _warp(args: tuple[Any, ...], height: int, width: int) -> Kind | None:
    """Return an affine step, by its matrix and the colour outside; None for any other."""
    _, method, matrix, resample, _, colour = args
    plain = method == 0 and resample == 0 and (not colour or np.shape(colour) == (3,))
    numbers = np.array(matrix[:6], np.float64)
    if not plain or not kernels.reaches(numbers, width, height):
        return None
    return "affine", (numbers, np.array(colour or (0, 0, 0)).clip(0, 255).astype(np.uint8))


def _blur(step: Node) -> Kind | None:
    """Return a blur, by its weights across and down; those of one size are done together."""
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
    return ("blur", *sizes), tuple(weights)


def _erased(step: Node, slots: Sequence[Any]) -> Kind | None:
    """Return an erased box: its place, and its values with their strides."""
    value = step.inputs[1]
    named = arguments(step, ("i", "j", "h", "w"))
    if value.op != "tensor" or value.what.dtype is not torch.float32 or len(value.what.shape) != 3:
        return None
    strides = [
        0 if side == 1 else stride
        for side, stride in zip(value.what.shape, value.args[-1], strict=True)
    ]
    box = tuple(int(named[name]) for name in "ijhw")
    return "erase", (np.frombuffer(slots[value.args[0]], np.float32), box, tuple(strides))
