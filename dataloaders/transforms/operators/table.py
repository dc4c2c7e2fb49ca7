"""Which operator stands for which transform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataloaders.transforms.actions import Action, Operator, SampleError, Sizes
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.kinds import changed_by_hand
from dataloaders.transforms.read import Member, read

__all__ = ["Chain", "NotRead", "chain_of", "mode_of", "operator_of", "reads"]

Reader = Callable[[Any, bool], Operator]
"""(the user's transform, whether it is of v2) -> its operator; may raise `NotRead`."""

_READERS: dict[str, Reader] = {}


class NotRead(Exception):
    """This transform cannot be read; the message says why and what to do."""


def reads(*names: str) -> Callable[[Reader], Reader]:
    """A function that reads torchvision's transforms of these names."""

    def added(reader: Reader) -> Reader:
        _READERS.update(dict.fromkeys(names, reader))
        return reader

    return added


def operator_of(member: Member) -> Operator | str:
    """The operator that stands for ``member``; or why there is none, in words."""
    # They fill the table.
    from . import (  # noqa: F401
        auto,
        colour,
        containers,
        convert,
        crops,
        elastic,
        erasing,
        geometry,
        refused,
        sizes,
        turns,
    )

    name = member.torchvision
    if name is None:
        changed = changed_by_hand(member.transform)
        return "it is code of your own" if changed is None else f"{changed}, and may do anything"
    reader = _READERS.get(name)
    if reader is None:
        return f"torchvision's {name} is not among the transforms that are read"
    try:
        operator = reader(member.transform, ".v2" in type(member.transform).__module__)
    except NotRead as error:
        return str(error)
    return operator if not operator.random else _drawn_elsewhere() or operator


def _drawn_elsewhere() -> str | None:
    """Why torchvision draws other numbers than those of torch's own settings, if it does."""
    if torch.get_default_dtype() is not torch.float32:
        return (
            f"torch.set_default_dtype({torch.get_default_dtype()}) makes torchvision draw numbers "
            "of that type; the numbers of torch.float32 are read, so leave the default as it is"
        )
    if torch.get_default_device().type != "cpu":
        return (
            f"torch.set_default_device({str(torch.get_default_device())!r}) makes torchvision draw "
            "from that device's generator; the CPU's is read, so set the default for the model only"
        )
    return None


def mode_of(interpolation: Any, v2: bool = True) -> str:
    """torchvision's name of an interpolation, such as "bilinear", given in any of its ways.

    Raises:
        NotRead: it is none that torchvision knows; v1 knows no names.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import _interpolation_modes_from_int

    if isinstance(interpolation, int):
        interpolation = _interpolation_modes_from_int(interpolation)
    if isinstance(interpolation, str) and not v2:
        raise NotRead(
            f"interpolation={interpolation!r}: torchvision.transforms takes names in its v2 "
            f"only; give InterpolationMode({interpolation!r})"
        )
    try:
        return str(InterpolationMode(interpolation).value)
    except ValueError:
        raise NotRead(f"interpolation={interpolation!r} is none of torchvision's") from None


@dataclass(frozen=True)
class Chain:
    """A chain of transforms, as far as it could be read from its beginning.

    Attributes:
        members: those that were read.
        operators: one for each.
        rest: the members from the first one on that could not be read.
        why: why that one could not, in words; None if there is no rest.
    """

    members: tuple[Member, ...]
    operators: tuple[Operator, ...]
    rest: tuple[Member, ...] = ()
    why: str | None = None

    @property
    def random(self) -> bool:
        """Whether two calls on the same image may differ."""
        return any(operator.random for operator in self.operators)

    def draw(
        self,
        words: Any,
        heights: Any,
        widths: Any,
        channels: Any = 3,
        tensors: Any = False,
    ) -> tuple[list[list[Action]], Sizes]:
        """The actions of each member on a batch of n images, and the sizes that they end with.

        Args:
            words: [n, 4], as `Draws` takes them.
            heights, widths: of the images before the first member, in pixels; [n].
            channels: how many they have; a number or [n].
            tensors: whether they are tensors; else they are PIL images. One for all, or [n].

        Raises:
            SampleError: torchvision would raise for one of them; the first such is told.
        """
        seeds = np.asarray(words)
        draws, sizes = Draws(seeds), Sizes(heights, widths, channels, tensors)
        try:
            return [operator.draw(draws, sizes) for operator in self.operators], sizes
        except SampleError as error:
            if error.sample:
                # One before it may fail further down the chain.
                sizes = Sizes(heights, widths, channels, tensors)
                shown = (sizes.height, sizes.width, sizes.channels, sizes.tensors)
                self.draw(seeds[: error.sample], *(array[: error.sample] for array in shown))
            raise


def chain_of(transform: Any, where: str = "transform") -> Chain:
    """``transform``, read member by member."""
    members = read(transform, where) if transform is not None else ()
    operators: list[Operator] = []
    for position, member in enumerate(members):
        found = operator_of(member)
        if isinstance(found, str):
            return Chain(members[:position], tuple(operators), members[position:], found)
        operators.append(found)
    return Chain(members, tuple(operators))
