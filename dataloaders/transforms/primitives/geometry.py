"""Steps that move pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dataloaders.transforms.actions import Primitive

from .fills import Fill, colour_for

__all__ = ["Crop", "HorizontalFlip", "Pad", "Resize", "VerticalFlip"]


@dataclass(frozen=True)
class Crop(Primitive):
    """The part of ``height`` x ``width`` from row ``top``, column ``left``; zeros outside of it.

    Attributes:
        v2: whether it is done by torchvision's v2: that leaves a tv_tensors.Image one.
    """

    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("top", "left", "height", "width")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return functional_of(self.v2).crop(value, **numbers)


@dataclass(frozen=True)
class Pad(Primitive):
    """So many pixels more on each side; negative ones are cut off.

    Attributes:
        fill: their colour, where ``mode`` is "constant".
        mode: "constant", "edge", "reflect" or "symmetric".
        v2: whether it is done by torchvision's v2, which takes more kinds of ``fill``.
    """

    fill: Fill = 0
    mode: str = "constant"
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("left", "top", "right", "bottom")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        fill = colour_for(self.fill, value)
        padding = [numbers[side] for side in self.numbers]
        return functional_of(self.v2).pad(value, padding, fill=fill, padding_mode=self.mode)


@dataclass(frozen=True)
class Resize(Primitive):
    """``height`` x ``width`` pixels.

    Attributes:
        interpolation: torchvision's name of it, such as "bilinear".
        antialias: of tensors; PIL images always are, by bilinear and bicubic.
        v2: whether a tensor of bytes stays one inside, as torchvision's v2 does it.
    """

    interpolation: str = "bilinear"
    antialias: bool | None = True
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("height", "width")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        from torchvision.transforms import InterpolationMode

        size = [numbers["height"], numbers["width"]]
        mode = InterpolationMode(self.interpolation)
        resize = functional_of(self.v2).resize
        return resize(value, size, interpolation=mode, antialias=self.antialias)


@dataclass(frozen=True)
class HorizontalFlip(Primitive):
    """Left and right exchanged.

    Attributes:
        v2: whether it is done by torchvision's v2: that leaves a tv_tensors.Image one.
    """

    v2: bool = True

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return functional_of(self.v2).hflip(value)


@dataclass(frozen=True)
class VerticalFlip(Primitive):
    """Top and bottom exchanged.

    Attributes:
        v2: whether it is done by torchvision's v2: that leaves a tv_tensors.Image one.
    """

    v2: bool = True

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return functional_of(self.v2).vflip(value)


def functional_of(v2: bool) -> Any:
    """torchvision's module of functions, of v2 or v1."""
    if v2:
        from torchvision.transforms.v2 import functional as functional2

        return functional2
    from torchvision.transforms import functional

    return functional
