"""Operators that draw nothing and leave the size: from images to tensors, from bytes to floats."""

from __future__ import annotations

from typing import Any

from dataloaders.transforms.actions import Action, Fixed, Operator, Sizes
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.convert import Converted

from .table import NotRead, reads


class _Made(Fixed):
    """A member's own call, which makes tensors, PIL images or so many channels of it."""

    def __init__(
        self, primitive: Converted, *, tensors: bool | None = None, channels: int | None = None
    ) -> None:
        super().__init__(primitive)
        self._tensors = tensors
        self._channels = channels

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        if self._tensors is not None:
            sizes.become_tensors(self._tensors, where)
        if self._channels is not None:
            sizes.become_channels(self._channels, where)
        return super().draw(draws, sizes, where)


@reads(
    "ConvertImageDtype",
    "Identity",
    "LinearTransformation",
    "Normalize",
    "ToDtype",
    "ToPureTensor",
)
def _converted(transform: Any, v2: bool) -> Operator:
    return _Made(_own(transform))


@reads("PILToTensor", "ToImage", "ToTensor")
def _to_tensor(transform: Any, v2: bool) -> Operator:
    return _Made(_own(transform), tensors=True)


@reads("ToPILImage")
def _to_pil(transform: Any, v2: bool) -> Operator:
    return _Made(_own(transform), tensors=False)


@reads("RGB")
def _to_rgb(transform: Any, v2: bool) -> Operator:
    return _Made(_own(transform), channels=3)


@reads("Lambda")
def _lambda(transform: Any, v2: bool) -> Operator:
    raise NotRead("Lambda runs a function of your own")


def _own(transform: Any) -> Converted:
    return Converted(type(transform).__name__, transform)
