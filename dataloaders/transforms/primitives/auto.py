"""The steps of the automatic policies: AutoAugment, RandAugment, TrivialAugmentWide and AugMix.

    a policy's name for it, its level ──step_of, numbers_of──> primitive, its numbers

Shears, shifts and turns with the corner or the middle of the image that the policies fix, and
the mixing of AugMix. The others are steps of `colour`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Primitive

from .colour import (
    Autocontrast,
    Brightness,
    Contrast,
    Equalize,
    Invert,
    Posterize,
    Saturation,
    Sharpness,
    Solarize,
)
from .fills import Fill, colour_for
from .geometry import functional_of

__all__ = ["AugMixed", "Shear", "Shift", "Turn", "numbers_of", "step_of"]


@dataclass(frozen=True)
class Shear(Primitive):
    """Rows (or columns) shifted by ``level`` pixels for each row (column) from the first one.

    Attributes:
        axis: "x" if rows are shifted sideways, "y" if columns up or down.
        interpolation: torchvision's name of it, such as "bilinear".
        fill: the colour outside.
        v2: whether a tensor is done as torchvision's v2 does it.
    """

    axis: str
    interpolation: str = "nearest"
    fill: Fill = None
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("level",)

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        angle = math.degrees(math.atan(numbers["level"]))
        shear = [angle, 0.0] if self.axis == "x" else [0.0, angle]
        return _affine(self, value, translate=[0, 0], shear=shear, center=[0, 0])


@dataclass(frozen=True)
class Shift(Primitive):
    """The image moved by ``pixels``, a whole number.

    Attributes:
        axis: "x" if to the right, "y" if down.
        interpolation: torchvision's name of it, such as "bilinear".
        fill: the colour outside.
        v2: whether a tensor is done as torchvision's v2 does it.
    """

    axis: str
    interpolation: str = "nearest"
    fill: Fill = None
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("pixels",)

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        pixels = numbers["pixels"]
        translate = [pixels, 0] if self.axis == "x" else [0, pixels]
        return _affine(self, value, translate=translate, shear=[0.0, 0.0])


@dataclass(frozen=True)
class Turn(Primitive):
    """The image turned about its middle by ``angle`` degrees, its size kept.

    Attributes:
        interpolation: torchvision's name of it, such as "bilinear".
        fill: the colour outside.
        v2: whether a tensor is done as torchvision's v2 does it.
    """

    interpolation: str = "nearest"
    fill: Fill = None
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("angle",)

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        fill = colour_for(self.fill, value)
        mode = _mode(self.interpolation)
        rotate = functional_of(self.v2).rotate
        return rotate(value, numbers["angle"], interpolation=mode, fill=fill)


@dataclass(frozen=True)
class AugMixed(Primitive):
    """The image and some others made from it, each by some steps, added with weights.

    Numbers of a sample, with w others of at most d steps each:
        original: the weight of the image itself.
        weights: [w], those of the others.
        operations: [w, d], places in ``steps``; below 0: no step.
        levels: [w, d], how strongly.

    Attributes:
        names: of the steps, as `step_of` takes them.
        steps: what does each; None: nothing.
        v2: whether it is done as torchvision's v2 does it.
    """

    names: tuple[str, ...]
    steps: tuple[Primitive | None, ...]
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("original", "weights", "operations", "levels")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`.

        Raises:
            ValueError: a stack of several images; torchvision would draw weights for each.
        """
        import torch
        from torchvision import tv_tensors

        functions = functional_of(self.v2)
        image = value if isinstance(value, torch.Tensor) else functions.pil_to_tensor(value)
        batch = image.reshape([1] * max(4 - image.ndim, 0) + list(image.shape))
        if len(batch) != 1 or batch.ndim > 4:
            raise ValueError(f"AugMix: one image is needed, not a stack of {tuple(image.shape)}")
        mixed = torch.full((1, 1, 1, 1), numbers["original"]) * batch
        for weight, operations, levels in zip(
            numbers["weights"], numbers["operations"], numbers["levels"], strict=True
        ):
            other = batch
            for operation, level in zip(operations.tolist(), levels, strict=True):
                other = self.stepped(other, operation, level)
            mixed.add_(torch.full((1, 1, 1, 1), weight.item()) * other)
        mixed = mixed.reshape(image.shape).to(image.dtype)
        if not isinstance(value, torch.Tensor):
            return functions.to_pil_image(mixed)
        if self.v2 and isinstance(value, tv_tensors.Image):
            return tv_tensors.wrap(mixed, like=value)
        return mixed

    def stepped(self, value: Any, operation: int, level: npt.NDArray[np.float64]) -> Any:
        """One of the steps, done to a tensor of one or more images at one level."""
        step = self.steps[operation] if operation >= 0 else None
        if step is None:
            return value
        own = numbers_of(self.names[operation], level)
        return step.apply(value, **{name: number.item() for name, number in own.items()})


def step_of(name: str, interpolation: str, fill: Fill, v2: bool) -> Primitive | None:
    """What a policy calls ``name``; None for "Identity".

    Raises:
        KeyError: no policy of torchvision has it.
    """
    moved = (interpolation, fill, v2)
    steps: dict[str, Callable[[], Primitive | None]] = {
        "Identity": lambda: None,
        "ShearX": lambda: Shear("x", *moved),
        "ShearY": lambda: Shear("y", *moved),
        "TranslateX": lambda: Shift("x", *moved),
        "TranslateY": lambda: Shift("y", *moved),
        "Rotate": lambda: Turn(*moved),
        "Brightness": lambda: Brightness(v2),
        "Color": lambda: Saturation(v2),
        "Contrast": lambda: Contrast(v2),
        "Sharpness": lambda: Sharpness(v2),
        "Posterize": lambda: Posterize(v2),
        # v2's levels are shares of the greatest level, v1's are of 255.
        "Solarize": lambda: Solarize(share=v2, v2=v2),
        "AutoContrast": lambda: Autocontrast(v2),
        "Equalize": lambda: Equalize(v2),
        "Invert": lambda: Invert(v2),
    }
    return steps[name]()


def numbers_of(name: str, levels: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[Any]]:
    """The numbers of `step_of` the same name at these ``levels``, signs included; of any shape."""
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        return {"factor": 1.0 + levels}
    if name in ("ShearX", "ShearY"):
        return {"level": levels}
    if name in ("TranslateX", "TranslateY"):
        return {"pixels": levels.astype(np.int64)}
    if name == "Posterize":
        return {"bits": levels.astype(np.int64)}
    own = {"Rotate": "angle", "Solarize": "threshold"}.get(name)
    return {} if own is None else {own: levels}


def _affine(step: Shear | Shift, value: Any, **options: Any) -> Any:
    fill = colour_for(step.fill, value)
    mode = _mode(step.interpolation)
    affine = functional_of(step.v2).affine
    return affine(value, angle=0.0, scale=1.0, interpolation=mode, fill=fill, **options)


def _mode(interpolation: str) -> Any:
    from torchvision.transforms import InterpolationMode

    return InterpolationMode(interpolation)
