"""A rectangle of a tensor overwritten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dataloaders.transforms.actions import Primitive

from .geometry import functional_of

__all__ = ["Erase", "EraseByNoise"]


@dataclass(frozen=True)
class Erase(Primitive):
    """The part of ``height`` x ``width`` from row ``top``, column ``left`` set to one colour.

    Attributes:
        levels: one for all channels, or one for each; as float32.
        v2: whether it is done by torchvision's v2, which takes PIL images too.
    """

    levels: tuple[float, ...] = (0.0,)
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("top", "left", "height", "width")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        import torch

        return _erased(value, torch.tensor(self.levels)[:, None, None], self.v2, numbers)


@dataclass(frozen=True)
class EraseByNoise(Primitive):
    """That part set to ``noise``, a `dataloaders.transforms.draws.Normal` of [C, height, width].

    Attributes:
        v2: see `Erase`.
    """

    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("top", "left", "height", "width", "noise")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return _erased(value, numbers.pop("noise").values(), self.v2, numbers)


def _erased(value: Any, levels: Any, v2: bool, part: dict[str, int]) -> Any:
    # Never in place: a sample may be somebody's own memory. The pixels are the same.
    place = (part["top"], part["left"], part["height"], part["width"])
    return functional_of(v2).erase(value, *place, levels, inplace=False)
