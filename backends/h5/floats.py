"""Floats of the bytes of a batch: what ToTensor and Normalize at the end of a chain make of them.

chain ──split──> the members before │ ToTensor, Normalize ──Floats──> a way to write them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dataloaders.recording.tail import Step, planes
from dataloaders.replaying.pointwise import Tails
from dataloaders.replaying.ways import Way
from dataloaders.transforms.kinds import torchvision_name
from dataloaders.transforms.read import Member, read
from dataloaders.transforms.trailing import CONVERTERS, trailing

__all__ = ["MAKE_TENSORS", "Floats", "split"]

MAKE_TENSORS = ("PILToTensor", "ToImage", "ToTensor")


class Floats:
    """What ``run``, which `trailing` found, makes of bytes.

    Attributes:
        run: the user's own transforms.
        steps: the same, as recorded ones.
        makes_bytes: what makes tensors of bytes of images before.
    """

    def __init__(self, run: Sequence[Member]) -> None:
        self.run = tuple(member.transform for member in run)
        self.makes_bytes = [
            planes if member.torchvision == "ToTensor" else member.transform
            for member in run
            if member.torchvision in ("ToTensor", *CONVERTERS)
        ]
        self.steps: tuple[Step, ...] = ()
        for member in run:
            if member.torchvision not in CONVERTERS:
                self.steps += (_step(member.transform, self.steps),)
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


def split(tail: Any) -> tuple[tuple[Member, ...], Floats | None]:
    """Return the members of ``tail`` before those that end it with floats of bytes, and these."""
    members = read(tail)
    run = trailing(members)
    return members[: len(members) - len(run)], Floats(run) if run else None


def _step(transform: Any, before: tuple[Step, ...]) -> Step:
    name, v2 = torchvision_name(transform), ".v2" in type(transform).__module__
    if name == "Normalize":
        numbers = ("mean", transform.mean), ("std", transform.std)
        op = "v2.normalize" if v2 else "v1t.normalize"
        return Step(op, (), numbers, before[-1].dtype, "Tensor")
    if name == "ToTensor" or not v2:
        dtype = torch.get_default_dtype() if name == "ToTensor" else transform.dtype
        return Step("v1t.convert_image_dtype", (dtype,), (), dtype, "Tensor")
    scale = getattr(transform, "scale", True)
    return Step("v2.to_dtype", (transform.dtype, scale), (), transform.dtype, "Tensor")
