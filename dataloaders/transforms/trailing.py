"""Find the trailing members of a chain that make floats of bytes, each value by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dataloaders.transforms.kinds import torchvision_name
from dataloaders.transforms.read import Member

__all__ = ["CONVERTERS", "trailing"]

CONVERTERS = ("PILToTensor", "ToImage", "ToPureTensor")
"""They change the type of a sample and no value of it."""


def trailing(members: Sequence[Member]) -> tuple[Member, ...]:
    """Return the longest trailing run that makes floats of bytes one by one; () if there is none.

    It consists of converters, one member that makes floats (ToTensor, ConvertImageDtype or ToDtype
    with a float dtype), and Normalize.
    """
    begin = len(members)
    while begin and _is_pointwise(members[begin - 1].transform):
        begin -= 1
    run = tuple(members[begin:])
    return run if any(_makes_floats(member.transform) for member in run) else ()


def _is_pointwise(transform: Any) -> bool:
    name = torchvision_name(transform)
    return name in (*CONVERTERS, "Normalize") or _makes_floats(transform)


def _makes_floats(transform: Any) -> bool:
    name = torchvision_name(transform)
    if name in ("ConvertImageDtype", "ToDtype"):
        dtype = transform.dtype
        return isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return name == "ToTensor"
