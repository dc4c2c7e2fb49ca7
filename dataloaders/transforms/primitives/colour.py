"""Steps that change levels and colours, and let each pixel stay where it is.

    Brightness, Contrast, Saturation, Sharpness    a blend with black, the mean, grey, a blur
    Hue, Grayscale, PermuteChannels, Rgb           between and within channels
    Invert, Posterize, Solarize                    tables of levels, the same for every image
    Autocontrast, Equalize                         tables of levels, made from the image
    GaussianBlur, Jpeg                             what they say

PIL images: v1 and v2 do the same. Of tensors v1 and v2 round differently; ``v2`` says which it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dataloaders.transforms.actions import Primitive

from .geometry import functional_of

__all__ = [
    "Autocontrast",
    "Brightness",
    "Contrast",
    "Equalize",
    "GaussianBlur",
    "Grayscale",
    "Hue",
    "Invert",
    "Jpeg",
    "PermuteChannels",
    "Posterize",
    "Rgb",
    "Saturation",
    "Sharpness",
    "Solarize",
]


@dataclass(frozen=True)
class _Adjusted(Primitive):
    """What one of torchvision's functions makes of an image and a ``factor``.

    Attributes:
        v2: whether a tensor is done as torchvision's v2 does it.
        function: its name.
    """

    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("factor",)
    function: ClassVar[str]

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return getattr(functional_of(self.v2), self.function)(value, numbers["factor"])


@dataclass(frozen=True)
class Brightness(_Adjusted):
    """Each level times ``factor``: 0 gives black, 1 the image."""

    function: ClassVar[str] = "adjust_brightness"


@dataclass(frozen=True)
class Contrast(_Adjusted):
    """Away from the mean grey of the image, ``factor`` times as far: 0 gives that grey."""

    function: ClassVar[str] = "adjust_contrast"


@dataclass(frozen=True)
class Saturation(_Adjusted):
    """Away from each pixel's own grey, ``factor`` times as far: 0 gives a grey image."""

    function: ClassVar[str] = "adjust_saturation"


@dataclass(frozen=True)
class Sharpness(_Adjusted):
    """Away from a blur by 3 x 3 pixels, ``factor`` times as far: 0 gives the blur."""

    function: ClassVar[str] = "adjust_sharpness"


@dataclass(frozen=True)
class Hue(_Adjusted):
    """The hue moved on by ``factor`` of the colour circle, -0.5 to 0.5."""

    function: ClassVar[str] = "adjust_hue"


@dataclass(frozen=True)
class Grayscale(Primitive):
    """Grey levels.

    Attributes:
        channels: how many equal channels it has then, 1 or 3; None: as many as before.
        v2: whether a tensor is done as torchvision's v2 does it.
    """

    channels: int | None = None
    v2: bool = True

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        functions = functional_of(self.v2)
        channels = functions.get_dimensions(value)[0] if self.channels is None else self.channels
        return functions.rgb_to_grayscale(value, num_output_channels=channels)


@dataclass(frozen=True)
class Rgb(Primitive):
    """Three channels; those of a grey image are equal."""

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        from torchvision.transforms.v2 import functional

        return functional.grayscale_to_rgb(value)


@dataclass(frozen=True)
class PermuteChannels(Primitive):
    """Channel ``permutation[k]`` in place k; entries below 0 count for nothing."""

    numbers: ClassVar[tuple[str, ...]] = ("permutation",)

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        from torchvision.transforms.v2 import functional

        permutation = [place for place in numbers["permutation"].tolist() if place >= 0]
        return functional.permute_channels(value, permutation)


@dataclass(frozen=True)
class Invert(Primitive):
    """The greatest level less each level.

    Attributes:
        v2: whether a tensor is done as torchvision's v2 does it.
    """

    v2: bool = True

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return functional_of(self.v2).invert(value)


@dataclass(frozen=True)
class Posterize(Primitive):
    """The highest ``bits`` of each level; 8 gives the image.

    Attributes:
        v2: whether a tensor is done as torchvision's v2 does it.
    """

    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("bits",)

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return functional_of(self.v2).posterize(value, numbers["bits"])


@dataclass(frozen=True)
class Solarize(Primitive):
    """Levels from ``threshold`` on inverted.

    Attributes:
        share: whether ``threshold`` is a share of the greatest level, 0 to 1: of 255 for a PIL
            image and a tensor of bytes, of 1 for one of floats.
        v2: whether a tensor is done as torchvision's v2 does it.
    """

    share: bool = False
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("threshold",)

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        threshold = numbers["threshold"]
        if self.share:
            threshold = _greatest_level(value) * threshold
        return functional_of(self.v2).solarize(value, threshold)


@dataclass(frozen=True)
class Autocontrast(Primitive):
    """Each channel stretched: its lowest level becomes 0, its highest the greatest there is.

    Attributes:
        v2: whether a tensor is done as torchvision's v2 does it.
    """

    v2: bool = True

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return functional_of(self.v2).autocontrast(value)


@dataclass(frozen=True)
class Equalize(Primitive):
    """Each channel's levels spread so that each is about as frequent.

    Attributes:
        v2: whether a tensor is done as torchvision's v2 does it.
    """

    v2: bool = True

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return functional_of(self.v2).equalize(value)


@dataclass(frozen=True)
class GaussianBlur(Primitive):
    """Blurred by a Gaussian of ``sigma`` pixels, the image mirrored at its borders.

    Attributes:
        width, height: of the kernel in pixels, odd.
        v2: whether it is done as torchvision's v2 does it.
    """

    width: int
    height: int
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("sigma",)

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        sigma = numbers["sigma"]
        kernel = [self.width, self.height]
        return functional_of(self.v2).gaussian_blur(value, kernel, [sigma, sigma])


@dataclass(frozen=True)
class Jpeg(Primitive):
    """Compressed as a JPEG file of ``quality`` 1 to 100, and decompressed."""

    numbers: ClassVar[tuple[str, ...]] = ("quality",)

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        from torchvision.transforms.v2 import functional

        return functional.jpeg(value, numbers["quality"])


def _greatest_level(value: Any) -> float:
    import torch

    if not isinstance(value, torch.Tensor):
        return 255.0
    return 1.0 if value.is_floating_point() else float(torch.iinfo(value.dtype).max)
