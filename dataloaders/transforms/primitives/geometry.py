"""Crop, resize and flip by torchvision's functions, which are imported when a step is done.

``v2`` says which of its functions: those of v2 leave a tv_tensors.Image one, and resize a tensor of
bytes without making floats of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dataloaders.transforms.actions import Primitive

__all__ = ["Crop", "HorizontalFlip", "Resize", "VerticalFlip"]


@dataclass(frozen=True)
class Crop(Primitive):
    """The part of ``height`` x ``width`` from row ``top``, column ``left``; zeros outside of it."""

    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("top", "left", "height", "width")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return _functional(self.v2).crop(value, **numbers)


@dataclass(frozen=True)
class Resize(Primitive):
    """``height`` x ``width`` pixels.

    Attributes:
        interpolation: torchvision's name of it, such as "bilinear".
        antialias: of tensors; PIL images always are, by bilinear and bicubic.
        v2: see the module.
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
        resize = _functional(self.v2).resize
        return resize(value, size, interpolation=mode, antialias=self.antialias)


@dataclass(frozen=True)
class HorizontalFlip(Primitive):
    """Left and right exchanged."""

    v2: bool = True

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return _functional(self.v2).hflip(value)


@dataclass(frozen=True)
class VerticalFlip(Primitive):
    """Top and bottom exchanged."""

    v2: bool = True

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return _functional(self.v2).vflip(value)


def _functional(v2: bool) -> Any:
    if v2:
        from torchvision.transforms.v2 import functional as functional2

        return functional2
    from torchvision.transforms import functional

    return functional
