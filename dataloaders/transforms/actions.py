"""What the members of a chain do to the samples of one batch, drawn before anything is decoded.

    member ──operators──> Operator ──draw(Draws, Sizes)──> Actions     which samples, which numbers
                                                             └─ Primitive   what is done, and how

An operator says beforehand which primitives it may take, in order: so a graph can be built of them.
Drawn for a batch, each of them is one `Action`; samples that do not take it are left out by
``where``. RandomApply, RandomChoice, ColorJitter's order and RandAugment are such masks.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.draws import Draws, Where

__all__ = [
    "Action",
    "Fixed",
    "Operator",
    "Primitive",
    "SampleError",
    "Sizes",
    "applied",
    "drawn",
    "refused",
    "taking",
]

_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}

Numbers: TypeAlias = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Primitive(ABC):
    """One deterministic step; a frozen dataclass of what is the same for all samples.

    Attributes:
        numbers: the names of what each sample has of its own, keywords of `apply`.
    """

    numbers: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def apply(self, value: Any, **numbers: Any) -> Any:
        """What torchvision makes of one ``value``, a PIL image or a tensor, by these numbers."""


class Sizes:
    """What each of n images is, where the chain has come to.

    Attributes:
        height, width: in pixels, int64 [n].
        channels: int64 [n].
        tensors: whether it is a tensor by now, bool [n]; else it is a PIL image.
    """

    def __init__(
        self,
        height: npt.ArrayLike,
        width: npt.ArrayLike,
        channels: npt.ArrayLike = 3,
        tensors: npt.ArrayLike = False,
    ) -> None:
        self.height = np.array(height, np.int64)
        self.width = np.array(width, np.int64)
        self.channels = np.full(len(self), channels, np.int64)
        self.tensors = np.full(len(self), tensors, np.bool_)

    def __len__(self) -> int:
        return len(self.height)

    def copy(self) -> Sizes:
        """The same, which stays as it is when this one changes."""
        return copy.copy(self)  # changes put new arrays into the place of the old

    def become(self, height: Any, width: Any, where: Where = None) -> None:
        """These sizes, for those samples; numbers or [n]."""
        self.height = _changed(self.height, height, where)
        self.width = _changed(self.width, width, where)

    def become_channels(self, channels: Any, where: Where = None) -> None:
        """So many channels, for those samples; a number or [n]."""
        self.channels = _changed(self.channels, channels, where)

    def become_tensors(self, tensors: bool, where: Where = None) -> None:
        """Tensors, or PIL images, for those samples."""
        self.tensors = _changed(self.tensors, tensors, where)


def _changed(array: npt.NDArray[Any], value: Any, where: Where) -> npt.NDArray[Any]:
    """A new array with ``value``, a number or [n], for those samples."""
    if where is not None:
        return np.where(where, value, array)
    return np.full(len(array), value, array.dtype)


@dataclass(frozen=True)
class Action:
    """A primitive, drawn for a batch of n samples.

    Attributes:
        primitive: what is done.
        numbers: for each of ``primitive.numbers`` an array [n, ...].
        where: which samples it is done to, bool [n]; None: all.
    """

    primitive: Primitive
    numbers: Numbers = field(default_factory=dict)
    where: Where = None

    def takes(self, sample: int) -> bool:
        """Whether it is done to this sample."""
        return self.where is None or bool(self.where[sample])

    def apply(self, sample: int, value: Any) -> Any:
        """What becomes of ``value``, the image of this sample."""
        if not self.takes(sample):
            return value
        own = {name: _plain(array[sample]) for name, array in self.numbers.items()}
        return self.primitive.apply(value, **own)


class Operator(ABC):
    """One member of a chain, read.

    Attributes:
        primitives: what it may take, in order; `draw` gives one action for each.
        random: whether two calls on the same image may differ.
        few: whether each sample takes only a few of its many primitives.
    """

    primitives: tuple[Primitive, ...] = ()
    random: bool = False
    few: bool = False

    @abstractmethod
    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """Its actions on a batch; one for each of ``primitives``, in order.

        Draws what torchvision would, in the same order, for those samples only that ``where``
        names, and moves ``sizes`` on for them.

        Raises:
            SampleError: torchvision would raise for one of these images (its position is told).
        """


class Fixed(Operator):
    """An operator that draws nothing, changes no size and takes one primitive."""

    def __init__(self, primitive: Primitive) -> None:
        self.primitives = (primitive,)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        return [Action(self.primitives[0], {}, where)]


class SampleError(ValueError):
    """torchvision would raise for one image of a batch.

    Attributes:
        sample: its position in the batch.
        error: what torchvision would raise, of the same type and text.
    """

    def __init__(self, sample: int, error: Exception | str) -> None:
        super().__init__(str(error))
        self.sample = sample
        self.error = ValueError(error) if isinstance(error, str) else error


def applied(actions: Iterable[Action], sample: int, value: Any) -> Any:
    """What ``actions``, one after the other, make of the image of one sample: torchvision's way."""
    for action in actions:
        value = action.apply(sample, value)
    return value


def refused(actions: Sequence[Action], sample: int, before: Sizes) -> None:
    """Have torchvision itself say what is wrong with the numbers of a sample.

    Args:
        actions: as drawn for the batch.
        sample: whose numbers.
        before: what the images are before the first of the actions.

    Raises:
        SampleError: torchvision raises for a black image of this size.
    """
    import PIL.Image
    import torch

    height, width = int(before.height[sample]), int(before.width[sample])
    channels = int(before.channels[sample])
    value: Any = PIL.Image.new(_MODES.get(channels, "RGB"), (width, height))
    if before.tensors[sample]:
        value = torch.zeros(channels, height, width, dtype=torch.uint8)
    try:
        applied(actions, sample, value)
    except Exception as error:
        raise SampleError(sample, error) from None


def taking(where: Where, also: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Those of ``where`` that are in ``also`` too."""
    return also if where is None else where & also


def drawn(operators: Sequence[Operator], draws: Draws, sizes: Sizes) -> list[Action]:
    """The actions of ``operators``, one after the other, on a batch."""
    return [action for operator in operators for action in operator.draw(draws, sizes)]


def _plain(value: Any) -> Any:
    """Python's own number for one of NumPy's, as torchvision's functions expect."""
    return value.item() if isinstance(value, np.generic) else value
