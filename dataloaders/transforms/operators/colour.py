"""Operators that change levels and colours: jitter, grey, blur, tables of levels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import (
    Action,
    Fixed,
    Operator,
    Primitive,
    Sizes,
    refused,
    taking,
)
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

from .options import range_of, whole
from .table import NotRead, reads


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
        names = ("brightness", "contrast", "saturation", "hue")
        self._ranges = [range_of(ranges[member], names[member]) for member in self._used]
        self.primitives = tuple(kinds[member] for member in self._used) * len(self._used)
        self.few = len(self._used) > 1

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
        self._ranges = [range_of(getattr(transform, name), name) for name in names]
        lows, (least, most) = [low for low, _ in self._ranges[:3]], self._ranges[3]
        self._doubtful = min(lows) < 0 or least < -0.5 or most > 0.5
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
        actions = [
            Action(primitive, dict.fromkeys(primitive.numbers, array), mask)
            for primitive, array, mask in zip(self.primitives, own, masks, strict=True)
        ]
        if self._doubtful:
            for action in actions[:5]:
                factor = action.numbers["factor"]
                turned = isinstance(action.primitive, Hue)
                refuse(action, np.abs(factor) > 0.5 if turned else factor < 0, sizes)
        return actions


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
        self._range = range_of(transform.sigma, "sigma", 0.0, above=True)
        self._reach = [whole(side, "kernel_size") // 2 for side in transform.kernel_size]
        width, height = transform.kernel_size
        self.primitives = (GaussianBlur(int(width), int(height), v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        sigma = draws.uniform(*self._range, where)
        action = Action(self.primitives[0], {"sigma": sigma}, where)
        # So little cannot be mirrored that far.
        small = (sizes.width <= self._reach[0]) | (sizes.height <= self._reach[1])
        refuse(action, small, sizes)
        return [action]


class RandomJpeg(Operator):
    """v2's JPEG: at a quality of its own for each sample."""

    random = True
    primitives = (Jpeg(),)

    def __init__(self, transform: Any) -> None:
        low, high = (whole(bound, "quality") for bound in transform.quality)
        self._range = (low, high + 1)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        return [Action(self.primitives[0], {"quality": draws.randint(*self._range, where)}, where)]


class Sometimes(Operator):
    """One primitive, with the same numbers, for a share of the samples.

    Args:
        probability: the share.
        exactly: whether torchvision compares as Python does, in float64; else in float32.
        doubtful: whether torchvision may refuse these numbers.
        numbers: of the primitive.
    """

    random = True

    def __init__(
        self,
        primitive: Primitive,
        probability: float,
        *,
        exactly: bool,
        doubtful: bool = False,
        **numbers: Any,
    ) -> None:
        self.primitives = (primitive,)
        self._probability = float(probability)
        self._exactly = exactly
        self._doubtful = doubtful
        self._numbers = numbers

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        if self._exactly:
            taken = draws.rand(where).astype(np.float64) < self._probability
            taken = taking(where, taken)
        else:
            taken = draws.below(self._probability, where)
        numbers = {name: np.full(len(sizes), value) for name, value in self._numbers.items()}
        action = Action(self.primitives[0], numbers, taken)
        if self._doubtful:
            refuse(action, np.ones(len(sizes), np.bool_), sizes)
        return [action]


class _Grayscale(Fixed):
    def __init__(self, transform: Any, v2: bool) -> None:
        self._channels = transform.num_output_channels
        self._v2 = v2
        if self._channels not in (1, 3):
            raise NotRead(f"num_output_channels={self._channels!r}: torchvision makes 1 or 3")
        super().__init__(Grayscale(self._channels, v2))

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        channels = np.full(len(sizes), self._channels)
        if not self._v2:  # which leaves grey tensors as they are
            channels[sizes.tensors & (sizes.channels == 1)] = 1
        sizes.become_channels(channels, where)
        return super().draw(draws, sizes, where)


class _Rgb(Fixed):
    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        more = sizes.tensors & (sizes.channels > 3)
        sizes.become_channels(np.where(more, sizes.channels, 3), where)
        return super().draw(draws, sizes, where)


def refuse(action: Action, doubtful: npt.NDArray[np.bool_], sizes: Sizes) -> None:
    """Let torchvision refuse the samples whose numbers are ``doubtful``, bool [n].

    Raises:
        SampleError: it does.
    """
    for sample in np.flatnonzero(taking(action.where, doubtful)).tolist():
        refused([action], sample, sizes)


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


@reads("GaussianNoise")
def _noise(transform: Any, v2: bool) -> Operator:
    raise NotRead(
        "GaussianNoise draws as many numbers as the layout of a tensor in memory asks for, which "
        "is not known before the image is; add the noise to whole batches, in the loop"
    )


@reads("JPEG")
def _jpeg(transform: Any, v2: bool) -> Operator:
    return RandomJpeg(transform)


@reads("Grayscale")
def _grayscale(transform: Any, v2: bool) -> Operator:
    return _Grayscale(transform, v2)


@reads("RGB")
def _rgb(transform: Any, v2: bool) -> Operator:
    return _Rgb(Rgb())


@reads("RandomGrayscale")
def _random_grayscale(transform: Any, v2: bool) -> Operator:
    return Sometimes(Grayscale(None, v2), transform.p, exactly=False)


@reads("RandomInvert")
def _invert(transform: Any, v2: bool) -> Operator:
    return Sometimes(Invert(v2), transform.p, exactly=not v2)


@reads("RandomPosterize")
def _posterize(transform: Any, v2: bool) -> Operator:
    bits = _number(transform, "bits")
    doubtful = not 1 <= bits <= 8 or not isinstance(bits, int)
    return Sometimes(Posterize(v2), transform.p, exactly=not v2, doubtful=doubtful, bits=bits)


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
    primitive, doubtful = Sharpness(v2), factor < 0
    return Sometimes(primitive, transform.p, exactly=not v2, doubtful=doubtful, factor=factor)
