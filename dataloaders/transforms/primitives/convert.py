"""Steps from a PIL image to a tensor, and between types of numbers, done by the members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataloaders.transforms.actions import Primitive

__all__ = ["Converted"]


@dataclass(frozen=True)
class Converted(Primitive):
    """What a deterministic member makes of it, by its own call: ToTensor, Normalize and the like.

    Attributes:
        name: torchvision's name of it.
        transform: the user's own object.
    """

    name: str
    transform: Any

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return self.transform(value)
