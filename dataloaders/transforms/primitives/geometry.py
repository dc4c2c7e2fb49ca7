"""Steps that move pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dataloaders.transforms.actions import Primitive

__all__ = ["Crop", "HorizontalFlip", "Resize", "VerticalFlip"]


@dataclass(frozen=True)
class Crop(Primitive):
    """The part of ``height`` x ``width`` from row ``top``, column ``left``; zeros outside of it."""

    numbers: ClassVar[tuple[str, ...]] = ("top", "left", "height", "width")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        from torchvision.transforms.v2 import functional

        return functional.crop(value, **numbers)


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
        from torchvision.transforms import InterpolationMode, functional
        from torchvision.transforms.v2 import functional as functional2

        resize = functional2.resize if self.v2 else functional.resize
        size = [numbers["height"], numbers["width"]]
        mode = InterpolationMode(self.interpolation)
        return resize(value, size, interpolation=mode, antialias=self.antialias)


@dataclass(frozen=True)
class HorizontalFlip(Primitive):
    """Left and right exchanged."""

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        from torchvision.transforms.v2 import functional

        return functional.horizontal_flip(value)


@dataclass(frozen=True)
class VerticalFlip(Primitive):
    """Top and bottom exchanged."""

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        from torchvision.transforms.v2 import functional

        return functional.vertical_flip(value)
