"""Which kernel stands for which primitive, and how far it is from what torchvision computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dataloaders.transforms.actions import Primitive
from dataloaders.transforms.kinds import torchvision_name
from dataloaders.transforms.primitives.auto import AugMixed, Shear, Shift, Turn
from dataloaders.transforms.primitives.colour import (
    Autocontrast,
    Brightness,
    Contrast,
    Equalize,
    GaussianBlur,
    Grayscale,
    Hue,
    Invert,
    PermuteChannels,
    Posterize,
    Rgb,
    Saturation,
    Sharpness,
    Solarize,
)
from dataloaders.transforms.primitives.convert import Converted
from dataloaders.transforms.primitives.elastic import Elastic
from dataloaders.transforms.primitives.erasing import Erase, EraseByNoise
from dataloaders.transforms.primitives.geometry import (
    Crop,
    HorizontalFlip,
    Pad,
    Resize,
    VerticalFlip,
)
from dataloaders.transforms.primitives.turns import Affine, Perspective, Rotate

from . import hue, levels, neighbours, own, place, resize, warp
from .kernel import EXACT, Array, Form, Images, Kernel, there
from .recorded import recorder

__all__ = ["TABLE", "Row", "form_after", "kernel_for"]

Numbers: TypeAlias = Mapping[str, Array]

_Function: TypeAlias = Callable[[Any, Numbers], Images]

_Maker: TypeAlias = Callable[[Any], "_Function | None"]
"""A primitive -> what its kernel runs; None: with these options there is none."""


_BOX = ("top", "left", "height", "width")


def _by(function: Callable[..., Images], *names: str) -> Callable[[Any], _Function]:
    """A kernel that takes nothing of its primitive: ``function(images, *numbers)``."""

    def called(images: Any, numbers: Numbers) -> Images:
        return function(images, *(numbers[name] for name in names))

    return lambda primitive: called


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
            image[:, i : i + h, j : j + w] = there(noise.values(), image.device)
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


@dataclass(frozen=True)
class Row:
    """What kernels compute, against torchvision's functions on PIL images.

    Attributes:
        makers: the steps that they stand for, and what makes the kernel of each.
        follows: whose arithmetic it is.
        exact: `EXACT`, or how far it is.
        limits: which of them; empty: all.
        light, ragged, any_dtype: see `Kernel`.
        of_tensors: whether torchvision makes tensors of PIL images for them.
    """

    makers: Mapping[type[Primitive], _Maker]
    follows: str
    exact: str = EXACT
    limits: str = ""
    light: bool = True
    ragged: bool = False
    any_dtype: bool = False
    of_tensors: bool = False

    @property
    def primitives(self) -> tuple[type[Primitive], ...]:
        """The steps."""
        return tuple(self.makers)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the steps."""
        return tuple(primitive.__name__ for primitive in self.primitives)


TABLE: tuple[Row, ...] = (
    Row(
        {
            Brightness: _by(levels.brightness, "factor"),
            Contrast: _by(levels.contrast, "factor"),
            Saturation: _by(levels.saturation, "factor"),
        },
        "Pillow's Blend.c, Convert.c and ImageEnhance.py",
    ),
    Row({Hue: _by(hue.hue, "factor")}, "Pillow's Convert.c: to HSV in bytes and back"),
    Row({Grayscale: _grayscale, Rgb: _rgb}, "Pillow's Convert.c"),
    Row(
        {
            Invert: _by(levels.invert),
            Posterize: _by(levels.posterize, "bits"),
            Solarize: _solarize,
            Autocontrast: _by(levels.autocontrast),
            Equalize: _by(levels.equalize),
        },
        "Pillow's ImageOps.py",
    ),
    Row({Sharpness: _by(neighbours.sharpness, "factor")}, "Pillow's Filter.c and Blend.c"),
    Row({GaussianBlur: _blur}, "torchvision's gaussian_blur", neighbours.BLUR_EXACT),
    Row({Pad: _pad}, "nothing is computed"),
    Row({Crop: _by(place.crop, *_BOX)}, "nothing is computed", ragged=True, any_dtype=True),
    Row(
        {
            HorizontalFlip: _by(place.horizontal_flip),
            VerticalFlip: _by(place.vertical_flip),
            PermuteChannels: _by(levels.permuted, "permutation"),
            Erase: _erase,
            EraseByNoise: _erase_by_noise,
        },
        "nothing is computed",
        any_dtype=True,
    ),
    Row(
        {Resize: _resize},
        "Pillow's Resample.c; nearest: Geometry.c",
        light=False,
        ragged=True,
    ),
    Row(
        dict.fromkeys((Affine, Perspective, Rotate, Shear, Shift, Turn), _turned),
        "Pillow's Geometry.c, by coefficients of torchvision's and Pillow's own Python",
        limits="nearest, bilinear and bicubic, as Pillow",
        light=False,
    ),
    Row(
        {AugMixed: own.mixed, Elastic: own.elastic},
        "torchvision's own functions on tensors",
        own.OWN,
        light=False,
        of_tensors=True,
    ),
)
"""All kernels. Exact: on the CPU, every byte is that of Pillow built for x86-64, where no two
operations are fused. On CUDA the same operations run, each rounded once as IEEE 754 says; not yet
run on a GPU. Those of any type compute no number, and so take any number of channels too."""

_ROWS = {primitive: row for row in TABLE for primitive in row.primitives}


_NO_VALUES = ("Identity", "PILToTensor", "ToImage", "ToPureTensor")
"""These make a tensor of an image, or nothing, and change no value."""


def kernel_for(primitive: Primitive, form: Form = "pil") -> Kernel | None:
    """The kernel that computes ``primitive`` on a batch; None: there is none.

    Args:
        form: what the user's transform has at this place. For "pil" kernels follow torchvision on
            PIL images. Of tensors, "bytes" or "floats", torchvision computes otherwise: for them
            kernels run its own functions, image by image.
    """
    kind = type(primitive)
    if isinstance(primitive, Converted):
        if torchvision_name(primitive.transform) not in _NO_VALUES:
            return None
        return Kernel(primitive.name, lambda images, numbers: images, True, True, True)
    row = _ROWS.get(kind)
    if row is None:
        return None
    if form != "pil" and not (row.any_dtype or row.of_tensors):
        return Kernel(kind.__name__, own.one_by_one(primitive), True, True, True, own.OWN)
    function = row.makers[kind](primitive)
    if function is None:
        return None
    any_dtype = row.any_dtype or form != "pil"
    return Kernel(kind.__name__, function, row.ragged, any_dtype, row.light, row.exact)


def form_after(primitive: Primitive, form: Form) -> Form:
    """What the user's transform has behind ``primitive``, one that has a kernel."""
    if isinstance(primitive, Converted) and form == "pil":
        name = torchvision_name(primitive.transform)
        return "bytes" if name in ("PILToTensor", "ToImage") else form
    return form
