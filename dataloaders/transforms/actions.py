"""What the members of a chain do to the images of a batch, drawn before anything is decoded.

member ──operators──> Operator ──draw(Draws, Sizes)──> Actions     which samples, which numbers
                                                         └─ Primitive   what is done: torchvision's
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.draws import Draws, Where

__all__ = [
    "Action",
    "Crop",
    "HorizontalFlip",
    "Operator",
    "Primitive",
    "Resize",
    "SampleError",
    "Sizes",
    "VerticalFlip",
    "applied",
    "drawn",
]


@dataclass(frozen=True)
class Primitive:
    """One deterministic step: a functional of torchvision's, which is imported when it is done.

    Attributes:
        v2: whether it is v2's. These leave a tv_tensors.Image one, and resize a tensor of bytes
            without making floats of it.
        functional: its name.
        numbers: the names of what each sample has of its own, keywords of `apply`.
    """

    v2: bool = True
    functional: ClassVar[str] = ""
    numbers: ClassVar[tuple[str, ...]] = ()

    def apply(self, value: Any, **numbers: Any) -> Any:
        """Return what torchvision makes of ``value``, a PIL image or a tensor."""
        name = f"torchvision.transforms.{'v2.' if self.v2 else ''}functional"
        return getattr(importlib.import_module(name), self.functional)(value, **numbers)


class Crop(Primitive):
    """The part of ``height`` x ``width`` from row ``top``, column ``left``; zeros outside of it."""

    functional = "crop"
    numbers = ("top", "left", "height", "width")


class HorizontalFlip(Primitive):
    """Left and right exchanged."""

    functional = "hflip"


class VerticalFlip(Primitive):
    """Top and bottom exchanged."""

    functional = "vflip"


@dataclass(frozen=True)
class Resize(Primitive):
    """``height`` x ``width`` pixels.

    Attributes:
        interpolation: torchvision's name of it, such as "bilinear".
        antialias: of tensors; PIL images always are, by bilinear and bicubic.
    """

    interpolation: str = "bilinear"
    antialias: bool | None = True
    functional = "resize"
    numbers = ("height", "width")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        from torchvision.transforms import InterpolationMode

        options = {"interpolation": InterpolationMode(self.interpolation)}
        size = [numbers["height"], numbers["width"]]
        return super().apply(value, size=size, antialias=self.antialias, **options)


class Sizes:
    """The sizes of n images at one place of a chain.

    Attributes:
        height, width: in pixels, int64 [n].
    """

    def __init__(self, height: npt.ArrayLike, width: npt.ArrayLike, *_: Any) -> None:
        self.height = np.array(height, np.int64)
        self.width = np.array(width, np.int64)

    def __len__(self) -> int:
        return len(self.height)

    def become(self, height: Any, width: Any) -> None:
        """Set these sizes; numbers or [n]."""
        self.height = np.full(len(self), height, np.int64)
        self.width = np.full(len(self), width, np.int64)


@dataclass(frozen=True)
class Action:
    """A primitive, drawn for a batch of n samples.

    Attributes:
        primitive: what is done.
        numbers: for each of ``primitive.numbers`` an array [n].
        where: a mask of the samples to which it is done, bool [n]; None: all.
    """

    primitive: Primitive
    numbers: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    where: Where = None

    def apply(self, sample: int, value: Any) -> Any:
        """Return what becomes of ``value``, the image of this sample."""
        if self.where is not None and not self.where[sample]:
            return value
        own = {name: int(array[sample]) for name, array in self.numbers.items()}
        return self.primitive.apply(value, **own)


class Operator(ABC):
    """One member of a chain, read.

    Attributes:
        primitives: what it does, in order; `draw` returns one action for each.
        random: whether two calls on the same image may differ.
    """

    primitives: tuple[Primitive, ...] = ()
    random: bool = False

    @abstractmethod
    def draw(self, draws: Draws, sizes: Sizes) -> list[Action]:
        """Return its actions on a batch; ``sizes`` become those after it.

        Draws the numbers that torchvision would, in the same order.

        Raises:
            SampleError: torchvision would raise, or may raise, for one of these images.
        """


class SampleError(ValueError):
    """torchvision may raise for an image of this batch: let it make the samples one by one."""


def applied(actions: Iterable[Action], sample: int, value: Any) -> Any:
    """Return what ``actions``, in order, make of the image of one sample."""
    for action in actions:
        value = action.apply(sample, value)
    return value


def drawn(operators: Sequence[Operator], draws: Draws, sizes: Sizes) -> list[Action]:
    """Return the actions of ``operators``, in order, on a batch."""
    return [action for operator in operators for action in operator.draw(draws, sizes)]
