"""Options of torchvision's transforms, read exactly or not at all."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.primitives.fills import ByType, Fill

from .table import NotRead

__all__ = [
    "affine32",
    "center_of",
    "fill_of",
    "padding_of",
    "pair_of",
    "range_of",
    "times32",
    "whole",
]


def whole(value: Any, name: str) -> int:
    """``value`` as an int.

    Raises:
        NotRead: it is no whole number.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise NotRead(f"{name}={value!r}: a whole number is read; give an int") from None


def pair_of(size: Any, name: str = "size") -> tuple[int, int]:
    """(height, width) of a size that torchvision has made a pair.

    Raises:
        NotRead: they are no whole numbers above 0.
    """
    height, width = (whole(side, name) for side in size)
    if height < 1 or width < 1:
        raise NotRead(f"{name}={tuple(size)}: a size is at least 1 x 1 pixels")
    return height, width


def range_of(
    values: Any, name: str, lowest: float = -np.inf, *, above: bool = False
) -> tuple[float, float]:
    """(low, high) of a range that torchvision draws from.

    Args:
        values: as given.
        name: of the option.
        lowest: what no bound may be below.
        above: whether the bounds must be above it.

    Raises:
        NotRead: it is no range, and torchvision would fail at each image.
    """
    try:
        low, high = (float(bound) for bound in values)
    except (TypeError, ValueError):
        raise NotRead(f"{name}={values!r}: two numbers are read; give (low, high)") from None
    inside = low > lowest if above else low >= lowest
    # torch compares them as float32.
    if not (inside and np.float32(low) <= np.float32(high) and np.isfinite(high)):
        limit = "" if lowest == -np.inf else f" {'above' if above else 'not below'} {lowest:g}"
        raise NotRead(f"{name}={values!r} is no range to draw from; give (low, high){limit}")
    return low, high


def fill_of(transform: Any, v2: bool) -> Fill:
    """The colour of what lies outside, as ``transform`` has it.

    Raises:
        NotRead: it is of a type that torchvision does not know.
    """
    if not v2:
        return _colour(transform.fill)
    colours = transform._fill
    if set(colours) == {"others"}:
        return _colour(colours["others"])
    return ByType(tuple((key, _colour(colour)) for key, colour in colours.items()))


def center_of(center: Any) -> tuple[float, float] | None:
    """``center`` of a turn, as given: (x, y) or None.

    Raises:
        NotRead: torchvision does not take it.
    """
    if center is None:
        return None
    if not isinstance(center, (list, tuple)) or len(center) != 2:
        raise NotRead(f"center={center!r}: a list or tuple (x, y) is read; give one")
    return center[0], center[1]


def _colour(fill: Any) -> float | tuple[float, ...] | None:
    if fill is None or isinstance(fill, (int, float)):
        return fill
    if isinstance(fill, Sequence) and all(isinstance(level, (int, float)) for level in fill):
        return tuple(fill)
    raise NotRead(f"fill={fill!r}: a number, or a list or tuple of numbers, is read; give one")


def padding_of(padding: Any) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of torchvision's 1, 2 or 4 numbers."""
    sides = list(padding) if isinstance(padding, (list, tuple)) else [padding]
    sides = [whole(side, "padding") for side in sides]
    if len(sides) not in (1, 2, 4):
        raise NotRead(f"padding={padding!r}: an int, or 1, 2 or 4 of them, are read; give those")
    left, top, right, bottom = (sides * 4)[:4]
    return left, top, right, bottom


def affine32(value: npt.NDArray[np.float32], by: float, plus: float) -> npt.NDArray[np.float32]:
    """``plus + value * by`` as a tensor of float32 does it with numbers of Python's."""
    return np.asarray(np.float32(plus) + value * np.float32(by), np.float32)


def times32(side: npt.NDArray[np.int64], factor: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """``int(side * factor)``: an int times a tensor of float32."""
    return np.asarray((side.astype(np.float32) * factor).astype(np.int64))
