"""Tabulate what a trailing run makes of each byte, by running it: 256 values a channel.

[C, 16, 16] uint8, every byte in every channel ──the user's own members──> [C, 256] floats
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dataloaders.transforms.kinds import torchvision_name

__all__ = ["Step", "Table", "every_byte", "same_bits", "tables_of"]

Step = tuple[str, torch.Tensor]
""""div", "mul" or "sub", and by what: a float32 tensor of shape [C or 1, 1, 1]."""


@dataclass(frozen=True)
class Table:
    """The run as numbers.

    Attributes:
        values: [channels, 256] in the dtype that the run makes; on the CPU.
        steps: the same in float32 arithmetic as torchvision's own code does it, for trying on a
            device; None where the run has no such form. Nothing relies on it untried.
    """

    values: torch.Tensor
    steps: tuple[Step, ...] | None


def tables_of(arithmetic: Sequence[Any]) -> tuple[dict[int, Table], dict[int, int]]:
    """Return channels of the output -> table, and channels of the image -> of the output.

    ``arithmetic`` is a run without its converters. Tried are 1 to 4 channels and as many as a
    Normalize has means; what raises has no entry. One channel that becomes three (v2's Normalize
    with three means) is listed only if each of the three is what it is for a coloured image.
    """
    counts = {1, 2, 3, 4, *(_means(transform) for transform in arithmetic)} - {0}
    made = {count: values for count in counts if (values := _values(arithmetic, count)) is not None}
    tables = {
        count: Table(values, _steps(arithmetic))
        for count, values in made.items()
        if len(values) == count
    }
    channels = {
        count: len(values)
        for count, values in made.items()
        if len(values) in tables and same_bits(values, tables[len(values)].values)
    }
    return tables, channels


def every_byte(channels: int) -> torch.Tensor:
    """Return a uint8 image [channels, 16, 16] with every byte in every channel, on the CPU."""
    row = torch.arange(256, dtype=torch.uint8, device="cpu")
    return row.reshape(1, 16, 16).repeat(channels, 1, 1)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two CPU tensors are equal to the bit: NaN equals itself, 0.0 is not -0.0."""
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def _values(arithmetic: Sequence[Any], channels: int) -> torch.Tensor | None:
    image: Any = every_byte(channels)
    if torchvision_name(arithmetic[0]) == "ToTensor":
        image = image.permute(1, 2, 0).numpy()
    try:
        for transform in arithmetic:
            image = transform(image)
        return image.reshape(-1, 256).contiguous()  # type: ignore[no-any-return]
    except Exception:  # as for a greyscale image and three means: such samples are not moved
        return None


def _means(transform: Any) -> int:
    mean = getattr(transform, "mean", ())
    return len(mean) if isinstance(mean, (list, tuple)) or getattr(mean, "ndim", 0) == 1 else 1


def _steps(arithmetic: Sequence[Any]) -> tuple[Step, ...] | None:
    steps: list[Step] = []
    for position, transform in enumerate(arithmetic):
        name = torchvision_name(transform)
        if name == "Normalize":
            steps.append(("sub", _column(transform.mean)))
            steps.append(("div", _column(transform.std)))
        elif position:
            return None
        elif name == "ToTensor" or type(transform).__module__.endswith("transforms.transforms"):
            steps.append(("div", _column(255)))
        elif name == "ConvertImageDtype" or transform.scale:
            steps.append(("mul", _column(1 / 255)))  # v2 multiplies where v1 divides
    return tuple(steps)


def _column(numbers: Any) -> torch.Tensor:
    return torch.as_tensor(numbers, dtype=torch.float32, device="cpu").reshape(-1, 1, 1)
