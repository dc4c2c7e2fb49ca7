"""Floats of a batch's bytes: what ToTensor and Normalize at the end of a chain make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dataloaders.recording.tail import Step
from dataloaders.replaying.pointwise import Tails
from dataloaders.replaying.ways import Way
from dataloaders.transforms.read import CONVERTERS, Member

__all__ = ["Floats"]


class Floats:
    """What ``run``, which `trailing` found, makes of bytes.

    Attributes:
        steps: the same, as recorded ones.
    """

    def __init__(self, run: Sequence[Member]) -> None:
        self.steps: tuple[Step, ...] = ()
        for member in run:
            if member.torchvision not in CONVERTERS:
                self.steps += (_step(member, self.steps),)
        self._tails = Tails()

    def way(self, channels: int) -> tuple[Way, torch.dtype]:
        """Return how to write the floats of images of so many channels, and their dtype.

        Raises:
            Exception: there are no such floats.
        """
        tail = self._tails.of(self.steps, channels)
        if tail.channels != channels:
            raise ValueError(f"{channels} channels become {tail.channels}")
        return tail.way(torch.device("cpu")), tail.dtype


def _step(member: Member, before: tuple[Step, ...]) -> Step:
    transform: Any = member.transform
    name, v2 = member.torchvision, ".v2" in type(transform).__module__
    if name == "Normalize":
        numbers = ("mean", transform.mean), ("std", transform.std)
        op = "v2.normalize" if v2 else "v1t.normalize"
        return Step(op, (), numbers, before[-1].dtype, "Tensor")
    if name == "ToTensor" or not v2:
        dtype = torch.get_default_dtype() if name == "ToTensor" else transform.dtype
        return Step("v1t.convert_image_dtype", (dtype,), (), dtype, "Tensor")
    scale = getattr(transform, "scale", True)
    return Step("v2.to_dtype", (transform.dtype, scale), (), transform.dtype, "Tensor")
