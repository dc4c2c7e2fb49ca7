"""Operators that draw nothing and change no size: from images to tensors, from bytes to floats."""

from __future__ import annotations

from typing import Any

from dataloaders.transforms.actions import Fixed, Operator
from dataloaders.transforms.primitives.convert import Converted

from .table import reads


@reads(
    "ConvertImageDtype",
    "Identity",
    "Normalize",
    "PILToTensor",
    "ToDtype",
    "ToImage",
    "ToPureTensor",
    "ToTensor",
)
def _converted(transform: Any, v2: bool) -> Operator:
    return Fixed(Converted(type(transform).__name__, transform))
