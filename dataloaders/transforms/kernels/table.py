"""Which kernel stands for which primitive, and how far it is from what torchvision computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dataloaders.transforms.actions import Primitive

from . import hue, levels, neighbours, place, resize, warp
from .kernel import EXACT, Array, Images, Kernel
from .recorded import recorder

__all__ = ["TABLE", "Row", "kernel_for"]

Numbers: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True)
class Row:
    """What a kernel computes, against torchvision's functional on PIL images.

    Attributes:
        primitives: names of the classes that it stands for.
        follows: where the arithmetic is from.
        exact: `EXACT`, or how far it is.
        when: what else it depends on; empty: nothing.
    """

    primitives: tuple[str, ...]
    follows: str
    exact: str = EXACT
    when: str = ""


TABLE: tuple[Row, ...] = (
    Row(("Brightness", "Contrast", "Saturation"), "Pillow's Blend.c, Convert.c, ImageEnhance.py"),
    Row(("Hue",), "Pillow's Convert.c (rgb2hsv, hsv2rgb)"),
    Row(("Grayscale", "Rgb"), "Pillow's Convert.c (rgb2l)"),
    Row(("PermuteChannels",), "no arithmetic"),
    Row(("Invert", "Posterize", "Solarize", "Autocontrast", "Equalize"), "Pillow's ImageOps.py"),
    Row(("Sharpness",), "Pillow's Filter.c (SMOOTH), Blend.c"),
    Row(("GaussianBlur",), "torchvision's gaussian_blur", neighbours.BLUR_EXACT),
    Row(("Crop", "HorizontalFlip", "VerticalFlip", "Pad"), "no arithmetic"),
    Row(("Erase", "EraseByNoise"), "no arithmetic", when="of tensors of any type too"),
    Row(
        ("Resize",),
        "Pillow's Resample.c; nearest: Geometry.c",
        when="all of torchvision's interpolations",
    ),
    Row(
        ("Affine", "Perspective", "Rotate", "Shear", "Shift", "Turn"),
        "Pillow's Geometry.c",
        when="nearest, bilinear, bicubic; coefficients by torchvision's own code",
    ),
)
"""All kernels. Exact means: on the CPU against a Pillow built for x86-64, to the bit. The same
operations, each rounded once by IEEE 754, run on CUDA."""

_EXACT = {name: row.exact for row in TABLE for name in row.primitives}


def kernel_for(primitive: Primitive) -> Kernel | None:
    """The kernel that computes ``primitive`` on a batch; None: there is none.

    It follows torchvision on PIL images, also where torchvision computes otherwise on tensors.
    """
    if not type(primitive).__module__.startswith("dataloaders.transforms.primitives."):
        return None
    name = type(primitive).__name__
    made = _MAKERS.get(name)
    function = made(primitive) if made is not None else None
    if function is None:
        return None
    return Kernel(
        name,
        function,
        ragged=name in ("Crop", "Resize"),
        any_dtype=name in _PLACED,
        exact=_EXACT[name],
    )


_BOX = ("top", "left", "height", "width")

_Function: TypeAlias = Callable[[Any, Numbers], Images]


def _by(function: Callable[..., Images], *names: str) -> Callable[[Any], _Function]:
    """A kernel that takes nothing of its primitive: ``function(images, *numbers)``."""
    return lambda primitive: lambda images, numbers: function(images, *(numbers[n] for n in names))


def _grayscale(primitive: Any) -> _Function:
    channels = primitive.channels
    return lambda x, numbers: levels.grayscale(x, x.shape[1] if channels is None else channels)


def _rgb(primitive: Any) -> _Function:
    return lambda x, numbers: x if x.shape[1] == 3 else x.expand(-1, 3, -1, -1).contiguous()


def _solarize(primitive: Any) -> _Function:
    whole = 255.0 if primitive.share else 1
    return lambda x, numbers: levels.solarize(x, whole * numbers["threshold"])


def _blur(primitive: Any) -> _Function:
    size = (primitive.width, primitive.height)
    return lambda x, numbers: neighbours.gaussian_blur(x, size, numbers["sigma"], primitive.v2)


def _resize(primitive: Any) -> _Function | None:
    mode = primitive.interpolation
    if mode not in resize.FILTERS and not mode.startswith("nearest"):
        return None
    return lambda x, numbers: resize.resize(x, numbers["height"], numbers["width"], mode)


def _pad(primitive: Any) -> _Function:
    def padded(images: Tensor, numbers: Numbers) -> Images:
        sides = np.stack([numbers[side] for side in ("left", "top", "right", "bottom")], 1)
        if (sides == sides[0]).all():
            return _padded(primitive, images, sides[0].tolist())
        # Few paddings are drawn at random; each image by its own.
        return [
            _padded(primitive, images[sample : sample + 1], own)[0]
            for sample, own in enumerate(sides.tolist())
        ]

    return padded


def _padded(primitive: Any, images: Tensor, sides: list[int]) -> Tensor:
    left, top, right, bottom = sides
    fill: tuple[int, ...] = (0,)
    if primitive.mode == "constant":
        fill = _colour(primitive, images.shape[1])
    return place.pad(images, left, top, right, bottom, fill, primitive.mode)


def _colour(primitive: Any, channels: int) -> tuple[int, ...]:
    """The levels that torchvision pads with: it is asked to pad one pixel."""
    from PIL import Image

    pixel = Image.new("RGB" if channels == 3 else "L", (1, 1))
    padded = primitive.apply(pixel, left=1, top=0, right=0, bottom=0)
    found = padded.getpixel((0, 0))
    return tuple(found) if isinstance(found, tuple) else (found,)


def _erase(primitive: Any) -> _Function:
    def erased(images: Tensor, numbers: Numbers) -> Tensor:
        top, left, height, width = (numbers[name] for name in _BOX)
        return place.erase(images, top, left, height, width, torch.tensor(primitive.levels))

    return erased


def _erase_by_noise(primitive: Any) -> _Function:
    def erased(images: Tensor, numbers: Numbers) -> Tensor:
        out = images.clone()
        sides = np.stack([numbers[name] for name in _BOX], 1)
        for image, (i, j, h, w), noise in zip(out, sides.tolist(), numbers["noise"], strict=True):
            image[:, i : i + h, j : j + w] = noise.values().to(image.device)
        return out

    return erased


def _turned(primitive: Any) -> _Function | None:
    if primitive.interpolation not in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        return None

    def turned(images: Tensor, numbers: Numbers) -> Images:
        image = recorder(*images.shape[1:])
        turns = [
            primitive.apply(
                image,
                **{
                    name: array[sample].item() if array.ndim == 1 else array[sample]
                    for name, array in numbers.items()
                },
            )
            for sample in range(len(images))
        ]
        return warp.warped(images, turns)

    return turned


_MAKERS: dict[str, Callable[[Any], _Function | None]] = {
    "Brightness": _by(levels.brightness, "factor"),
    "Contrast": _by(levels.contrast, "factor"),
    "Saturation": _by(levels.saturation, "factor"),
    "Hue": _by(hue.hue, "factor"),
    "Grayscale": _grayscale,
    "Rgb": _rgb,
    "PermuteChannels": _by(levels.permuted, "permutation"),
    "Invert": _by(levels.invert),
    "Posterize": _by(levels.posterize, "bits"),
    "Solarize": _solarize,
    "Autocontrast": _by(levels.autocontrast),
    "Equalize": _by(levels.equalize),
    "Sharpness": _by(neighbours.sharpness, "factor"),
    "GaussianBlur": _blur,
    "Crop": _by(place.crop, "top", "left", "height", "width"),
    "HorizontalFlip": _by(place.horizontal_flip),
    "VerticalFlip": _by(place.vertical_flip),
    "Pad": _pad,
    "Erase": _erase,
    "EraseByNoise": _erase_by_noise,
    "Resize": _resize,
    "Affine": _turned,
    "Perspective": _turned,
    "Rotate": _turned,
    "Shear": _turned,
    "Shift": _turned,
    "Turn": _turned,
}

_PLACED = frozenset(
    ("Crop", "HorizontalFlip", "VerticalFlip", "PermuteChannels", "Erase", "EraseByNoise")
)
"""These compute no number, and so take tensors of any type and any number of channels."""
