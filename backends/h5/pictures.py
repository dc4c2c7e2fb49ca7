"""Make images that are decoded, or need more than windows, one by one in a team's threads.

    rows ──headers──> sizes ──operators──> actions      of the whole batch, before any pixel
                                             │
    file ──Pillow──> image ──torchvision's functions──> planes ──> the batch
                                                         └──> floats at once, if a tail makes them

Pillow releases the GIL while it decodes most formats and transforms images, so threads can share a
batch. An image is released as soon as it is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from dataloaders.cache.read.files import Column
from dataloaders.cache.sample.cell import leaf_of
from dataloaders.cache.sample.decode import Undecoded, is_encoded, undecoded
from dataloaders.cache.sample.planes import has_planes, put_planes
from dataloaders.recording.tail import planes
from dataloaders.replaying.ways import Way
from dataloaders.transforms.actions import Action, Operator, Sizes, applied, drawn
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.kinds import torchvision_name
from dataloaders.transforms.operators import chain_of
from dataloaders.transforms.read import Run
from dataloaders.transforms.trailing import CONVERTERS

from .floats import MAKE_TENSORS, Floats, split
from .team import Team

__all__ = ["Made", "Steps", "header_of", "is_image", "steps_of"]

_AS_LONG = 16  # copying a byte is this much faster than decoding it


class _Planes:
    """An image that is stored as its planes."""

    def __init__(self, kind: str, values: Any) -> None:
        self.mode = kind.partition(":")[2]
        self.size = (values.shape[2], values.shape[1])
        self._kind, self._values = kind, values

    def decode(self) -> Any:
        return leaf_of(self._kind, self._values)


Header: TypeAlias = "Undecoded | _Planes"
"""An image whose size is known, and whose pixels are not decoded yet."""


def is_image(kind: str) -> bool:
    """Whether cells of this kind are PIL images, stored in any way."""
    return kind.startswith("image:") or is_encoded(kind)


def header_of(column: Column, row: int) -> Header:
    """Return the image of this row.

    Raises:
        Exception: it is not an image.
    """
    kind, values = column.cell(row)
    if values is None:
        raise ValueError(f"row {row} has no image")
    if is_encoded(kind):
        return undecoded(kind, values, column.entry.most_pixels)
    return _Planes(kind, values)


class Steps:
    """A chain whose members are all known, up to the tensors at its end.

    Args:
        operators: the members without the last ones.
        ending: the last members, which draw nothing and turn images into tensors of bytes.
        floats: what is made of these bytes at last; None: nothing.
        takes_planes: whether the ending only turns PIL images into their own planes.
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        ending: Sequence[Any],
        floats: Floats | None,
        takes_planes: bool,
    ) -> None:
        self._operators = tuple(operators)
        self._ending = tuple(ending)
        self._takes_planes = takes_planes
        self.floats = floats

    @property
    def random(self) -> bool:
        """Whether two batches of the same images may differ."""
        return any(operator.random for operator in self._operators)

    def draw(self, headers: Sequence[Header], draws: Draws) -> tuple[list[Action], Sizes]:
        """Draw what is done to each image of a batch, and return it with the final sizes.

        Raises:
            SampleError: torchvision would raise for one of them.
        """
        from PIL import Image

        sides = np.array([header.size for header in headers], np.int64).reshape(-1, 2)
        channels = [Image.getmodebands(header.mode) for header in headers]
        sizes = Sizes(sides[:, 1], sides[:, 0], channels)
        return drawn(self._operators, draws, sizes), sizes

    def has_planes(self, image: Any) -> bool:
        """Whether the end of the chain only turns the image into its own planes."""
        return self._takes_planes and not isinstance(image, torch.Tensor) and has_planes(image)

    def ended(self, image: Any) -> torch.Tensor:
        """Return the tensor that the last members make of it."""
        for transform in self._ending:
            image = transform(image)
        if not isinstance(image, torch.Tensor):
            raise TypeError(f"the chain ends in {type(image).__name__}")
        return image


def steps_of(tail: Any) -> Steps | str:
    """Return ``tail`` as `Steps`, or say which member is not known and why."""
    before, floats = split(tail)
    chain = chain_of(Run(member.transform for member in before))
    if chain.rest:
        return f"{chain.rest[0]} is not supported for a whole batch: {chain.why}"
    members = list(chain.members)
    ending = [] if floats is None else floats.makes_bytes
    while floats is None and members and members[-1].torchvision in CONVERTERS:
        ending.insert(0, members.pop().transform)
    takes_planes = planes in ending or any(torchvision_name(e) in MAKE_TENSORS for e in ending)
    if not takes_planes and not any(member.torchvision in MAKE_TENSORS for member in members):
        return "its tail makes no tensors of images"
    return Steps(chain.operators[: len(members)], ending, floats, takes_planes)


class Made:
    """Images of a batch whose random numbers are drawn, and which are not made yet.

    Args:
        steps: what is done to each.
        headers: the images; each is released when it is made.
        draws: the random numbers of each.

    Attributes:
        sizes: the final sizes.
    """

    def __init__(self, steps: Steps, headers: Sequence[Header], draws: Draws) -> None:
        self._steps = steps
        self._headers: list[Header | None] = list(headers)
        self._sides = [header.size for header in headers]
        self._actions, self.sizes = steps.draw(headers, draws)
        self._nbytes = _AS_LONG * sum(3 * width * height for width, height in self._sides)

    def first(self) -> torch.Tensor:
        """Return the first image alone."""
        return self._steps.ended(self._image(0))

    def into(self, out: torch.Tensor, team: Team) -> None:
        """Fill ``out`` [n, C, H, W], of the type that the chain makes.

        Raises:
            Exception: an image cannot be made, or is of another type or shape.
        """
        team.each(len(out), self._nbytes, lambda number: self._put(number, out[number]))

    def through(self, way: Way, out: torch.Tensor, team: Team) -> None:
        """Fill ``out`` with the result of ``way`` for each image while it is in the core's cache.

        Raises:
            Exception: an image cannot be made, or is of another type or shape.
        """

        def one(number: int) -> None:
            bytes_ = torch.empty((1, *out.shape[1:]), dtype=torch.uint8)
            self._put(number, bytes_[0])
            way.run(bytes_, out[number : number + 1])

        team.each(len(out), self._nbytes, one)

    def _put(self, number: int, place: torch.Tensor) -> None:
        image = self._image(number)
        if place.dtype is torch.uint8 and self._steps.has_planes(image):
            put_planes(image, place.numpy())
        else:
            made = self._steps.ended(image)
            if made.shape != place.shape or made.dtype is not place.dtype:
                raise ValueError(f"it is {made.dtype} {list(made.shape)}, unlike the others")
            place.copy_(made)
        self._headers[number] = None  # release the file's bytes and the pixels

    def _image(self, number: int) -> Any:
        header = self._headers[number]
        assert header is not None
        image = header.decode()
        if image.size != self._sides[number]:  # the size for which the numbers were drawn
            raise ValueError(f"it is {image.size}, and its header says {self._sides[number]}")
        return applied(self._actions, number, image)
