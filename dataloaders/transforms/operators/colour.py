"""Operators that change levels and colours: jitter, grey, blur, tables of levels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Action, Fixed, Operator, Primitive, Sizes, taking
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.colour import (
    Autocontrast,
    Brightness,
    Contrast,
    Equalize,
    GaussianBlur,
    Grayscale,
    Hue,
    Invert,
    Jpeg,
    PermuteChannels,
    Posterize,
    Rgb,
    Saturation,
    Sharpness,
    Solarize,
)

from .table import NotRead, reads

_Range = tuple[float, float]


class ColorJitter(Operator):
    """Brightness, contrast, saturation and hue by random factors, in random order.

    With k of the four in use there are k places, each with all k primitives: a sample takes one
    of them at each place.
    """

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        ranges = (transform.brightness, transform.contrast, transform.saturation, transform.hue)
        kinds = (Brightness(v2), Contrast(v2), Saturation(v2), Hue(v2))
        self._used = [member for member, own in enumerate(ranges) if own is not None]
        self._ranges: list[_Range] = [ranges[member] for member in self._used]
        self.primitives = tuple(kinds[member] for member in self._used) * len(self._used)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        order = draws.randperm(4, where)
        factors = [draws.uniform(low, high, where) for low, high in self._ranges]
        # Where in the order each member stands, and which place that is among those in use.
        position = np.argsort(order, axis=1)[:, self._used]
        place = (position[:, :, None] > position[:, None, :]).sum(axis=2)
        return [
            Action(
                self.primitives[member],
                {"factor": factors[member]},
                taking(where, place[:, member] == here),
            )
            for here in range(len(self._used))
            for member in range(len(self._used))
        ]


class PhotometricDistort(Operator):
    """v2's RandomPhotometricDistort: each of its changes for a share of the samples."""

    random = True

    def __init__(self, transform: Any) -> None:
        self._probability = float(transform.p)
        names = ("brightness", "contrast", "saturation", "hue")
        self._ranges = [_range(transform, name) for name in names]
        self.primitives = (
            Brightness(),
            Contrast(),
            Saturation(),
            Hue(),
            Contrast(),
            PermuteChannels(),
        )

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        taken, factors = [], []
        for low, high in self._ranges:
            taken.append(draws.below(self._probability, where))
            factors.append(draws.uniform(low, high, taken[-1]))
        early = draws.below(0.5, where)
        permuted = draws.below(self._probability, where)
        permutation = _permutations(draws, sizes, permuted)
        brightness, contrast, saturation, hue = taken
        masks = (brightness, contrast & early, saturation, hue, contrast & ~early, permuted)
        own: tuple[npt.NDArray[Any], ...] = (*factors, factors[1], permutation)
        return [
            Action(primitive, dict.fromkeys(primitive.numbers, array), mask)
            for primitive, array, mask in zip(self.primitives, own, masks, strict=True)
        ]


class ChannelPermutation(Operator):
    """v2's RandomChannelPermutation."""

    random = True
    primitives = (PermuteChannels(),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        numbers = {"permutation": _permutations(draws, sizes, where)}
        return [Action(self.primitives[0], numbers, where)]


class RandomBlur(Operator):
    """GaussianBlur: by a sigma of its own for each sample."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._range = _range(transform, "sigma")
        width, height = transform.kernel_size
        self.primitives = (GaussianBlur(int(width), int(height), v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        return [Action(self.primitives[0], {"sigma": draws.uniform(*self._range, where)}, where)]


class RandomJpeg(Operator):
    """v2's JPEG: at a quality of its own for each sample."""

    random = True
    primitives = (Jpeg(),)

    def __init__(self, transform: Any) -> None:
        low, high = transform.quality
        self._range = (int(low), int(high) + 1)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        return [Action(self.primitives[0], {"quality": draws.randint(*self._range, where)}, where)]


class Sometimes(Operator):
    """One primitive, with the same numbers, for a share of the samples.

    Args:
        probability: the share.
        exactly: whether torchvision compares as Python does, in float64; else in float32.
        numbers: of the primitive.
    """

    random = True

    def __init__(
        self, primitive: Primitive, probability: float, *, exactly: bool, **numbers: Any
    ) -> None:
        self.primitives = (primitive,)
        self._probability = float(probability)
        self._exactly = exactly
        self._numbers = numbers

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        if self._exactly:
            taken = draws.rand(where).astype(np.float64) < self._probability
            taken = taking(where, taken)
        else:
            taken = draws.below(self._probability, where)
        numbers = {name: np.full(len(sizes), value) for name, value in self._numbers.items()}
        return [Action(self.primitives[0], numbers, taken)]


class Recoloured(Fixed):
    """A primitive without numbers, for all samples, after which they have ``channels``."""

    def __init__(self, primitive: Primitive, channels: int) -> None:
        super().__init__(primitive)
        self._channels = channels

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        sizes.become_channels(self._channels, where)
        return super().draw(draws, sizes, where)


def _range(transform: Any, name: str) -> _Range:
    """The smallest and the greatest of what the option ``name`` allows."""
    low, high = getattr(transform, name)
    if not low <= high:
        raise NotRead(f"{name}={(low, high)} must not fall; give it as (smallest, greatest)")
    return float(low), float(high)


def _number(transform: Any, name: str) -> float:
    """The option ``name``: a number, whole or not as the user gave it."""
    value = getattr(transform, name)
    if not isinstance(value, (int, float)):
        raise NotRead(f"{name}={value!r} is no number of Python's; give it as one")
    return value


def _permutations(draws: Draws, sizes: Sizes, where: Where) -> npt.NDArray[np.int64]:
    """int64 [n, most channels]: ``torch.randperm(channels)`` of each, and -1 where it has less."""
    found = np.full((len(sizes), int(sizes.channels.max(initial=1))), -1)
    for channels in np.unique(sizes.channels).tolist():
        these = sizes.channels == channels
        drawn = draws.randperm(channels, taking(where, these))
        found[these, :channels] = drawn[these]
    return found


@reads("ColorJitter")
def _color_jitter(transform: Any, v2: bool) -> Operator:
    return ColorJitter(transform, v2)


@reads("RandomPhotometricDistort")
def _photometric_distort(transform: Any, v2: bool) -> Operator:
    return PhotometricDistort(transform)


@reads("RandomChannelPermutation")
def _channel_permutation(transform: Any, v2: bool) -> Operator:
    return ChannelPermutation()


@reads("GaussianBlur")
def _blur(transform: Any, v2: bool) -> Operator:
    return RandomBlur(transform, v2)


@reads("JPEG")
def _jpeg(transform: Any, v2: bool) -> Operator:
    return RandomJpeg(transform)


@reads("Grayscale")
def _grayscale(transform: Any, v2: bool) -> Operator:
    channels = transform.num_output_channels
    return Recoloured(Grayscale(channels, v2), channels)


@reads("RGB")
def _rgb(transform: Any, v2: bool) -> Operator:
    return Recoloured(Rgb(), 3)


@reads("RandomGrayscale")
def _random_grayscale(transform: Any, v2: bool) -> Operator:
    return Sometimes(Grayscale(None, v2), transform.p, exactly=False)


@reads("RandomInvert")
def _invert(transform: Any, v2: bool) -> Operator:
    return Sometimes(Invert(v2), transform.p, exactly=not v2)


@reads("RandomPosterize")
def _posterize(transform: Any, v2: bool) -> Operator:
    return Sometimes(Posterize(v2), transform.p, exactly=not v2, bits=_number(transform, "bits"))


@reads("RandomSolarize")
def _solarize(transform: Any, v2: bool) -> Operator:
    threshold = _number(transform, "threshold")
    return Sometimes(Solarize(v2=v2), transform.p, exactly=not v2, threshold=threshold)


@reads("RandomAutocontrast")
def _autocontrast(transform: Any, v2: bool) -> Operator:
    return Sometimes(Autocontrast(v2), transform.p, exactly=not v2)


@reads("RandomEqualize")
def _equalize(transform: Any, v2: bool) -> Operator:
    return Sometimes(Equalize(v2), transform.p, exactly=not v2)


@reads("RandomAdjustSharpness")
def _sharpness(transform: Any, v2: bool) -> Operator:
    factor = _number(transform, "sharpness_factor")
    return Sometimes(Sharpness(v2), transform.p, exactly=not v2, factor=factor)
