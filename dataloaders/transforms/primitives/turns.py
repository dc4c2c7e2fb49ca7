"""Steps that compute where each pixel comes from: rotation, affine, perspective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dataloaders.transforms.actions import Primitive

from .fills import Fill, colour_for
from .geometry import functional_of

__all__ = ["Affine", "Perspective", "Rotate"]


@dataclass(frozen=True)
class Rotate(Primitive):
    """Turned by ``angle`` degrees, anticlockwise.

    Attributes:
        interpolation: torchvision's name of it, such as "nearest".
        expand: whether the image grows to hold all of the turned one.
        center: (x, y) in pixels from the upper left; None: the middle.
        fill: the colour outside.
        v2: whether it is done by torchvision's v2, which computes in another order.
    """

    interpolation: str = "nearest"
    expand: bool = False
    center: tuple[float, float] | None = None
    fill: Fill = 0
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("angle",)

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return functional_of(self.v2).rotate(
            value,
            numbers["angle"],
            interpolation=_mode(self.interpolation),
            expand=self.expand,
            center=None if self.center is None else list(self.center),
            fill=_outside(self.fill, value, self.v2),
        )


@dataclass(frozen=True)
class Affine(Primitive):
    """Turned by ``angle``, moved by ``translate`` (x, y), scaled and sheared (x, y).

    Attributes:
        interpolation, center, fill, v2: see `Rotate`.
    """

    interpolation: str = "nearest"
    center: tuple[float, float] | None = None
    fill: Fill = 0
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("angle", "translate", "scale", "shear")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return functional_of(self.v2).affine(
            value,
            angle=numbers["angle"],
            translate=numbers["translate"].tolist(),
            scale=numbers["scale"],
            shear=numbers["shear"].tolist(),
            interpolation=_mode(self.interpolation),
            center=None if self.center is None else list(self.center),
            fill=_outside(self.fill, value, self.v2),
        )


@dataclass(frozen=True)
class Perspective(Primitive):
    """Its corners, from the upper left on clockwise, moved to ``corners`` (x, y); int64 [4, 2].

    Attributes:
        interpolation, fill, v2: see `Rotate`.
    """

    interpolation: str = "bilinear"
    fill: Fill = 0
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("corners",)

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        functional = functional_of(self.v2)
        _, height, width = functional.get_dimensions(value)
        right, lower = width - 1, height - 1
        return functional.perspective(
            value,
            [[0, 0], [right, 0], [right, lower], [0, lower]],
            numbers["corners"].tolist(),
            interpolation=_mode(self.interpolation),
            fill=_outside(self.fill, value, self.v2),
        )


def _mode(interpolation: str) -> Any:
    from torchvision.transforms import InterpolationMode

    return InterpolationMode(interpolation)


def _outside(fill: Fill, value: Any, v2: bool) -> Any:
    """``fill`` as v1's members, or v2's, hand it to their functions."""
    import torch

    colour = colour_for(fill, value)
    if v2 or not isinstance(value, torch.Tensor):
        return colour
    if isinstance(colour, (int, float)):
        return [float(colour)] * functional_of(v2).get_dimensions(value)[0]
    return [float(level) for level in colour]
