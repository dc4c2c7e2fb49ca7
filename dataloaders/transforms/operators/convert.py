"""Operators that draw nothing and leave the size: from images to tensors, from bytes to floats."""

from __future__ import annotations

from typing import Any

from dataloaders.transforms.actions import Action, Fixed, Operator, Sizes
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.convert import Converted

from .table import NotRead, reads


class _Made(Fixed):
    """A member's own call, which makes tensors or PIL images."""

    def __init__(self, primitive: Converted, *, tensors: bool) -> None:
        super().__init__(primitive)
        self._tensors = tensors

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        sizes.become_tensors(self._tensors, where)
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
    return Fixed(_own(transform))


@reads("PILToTensor", "ToImage", "ToTensor")
def _to_tensor(transform: Any, v2: bool) -> Operator:
    return _Made(_own(transform), tensors=True)


@reads("ToPILImage")
def _to_pil(transform: Any, v2: bool) -> Operator:
    return _Made(_own(transform), tensors=False)


@reads("Lambda")
def _lambda(transform: Any, v2: bool) -> Operator:
    raise NotRead("Lambda runs a function of your own")


def _own(transform: Any) -> Converted:
    return Converted(type(transform).__name__, transform)
