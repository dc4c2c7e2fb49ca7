"""The colour of what lies outside of an image, as torchvision takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["ByType", "Fill", "colour_for"]


@dataclass(frozen=True)
class ByType:
    """A colour for each type of image, as v2 takes it in a dict.

    Attributes:
        colours: (type or "others", number or tuple or None); in order.
    """

    colours: tuple[tuple[Any, Any], ...]


Fill: TypeAlias = "float | tuple[float, ...] | ByType | None"
"""A level, one a channel, torchvision's default (zero), or a colour for each type."""


def colour_for(fill: Fill, value: Any) -> Any:
    """The number, list or None that torchvision's v2 fills around ``value``."""
    if isinstance(fill, ByType):
        known = dict(fill.colours)
        fill = known[type(value)] if type(value) in known else known.get("others")
    return list(fill) if isinstance(fill, tuple) else fill
