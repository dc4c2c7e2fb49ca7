"""RandomErasing: a rectangle overwritten by a colour, or by noise of torch's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Action, Operator, SampleError, Sizes, taking
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.erasing import Erase, EraseByNoise

from .attempts import Rectangles
from .table import NotRead, reads


class RandomErasing(Operator):
    """Where ten attempts find no rectangle, nothing is erased."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._v2 = v2
        self._probability = float(transform.p)
        self._rectangles = Rectangles(transform)
        self._levels = _levels_of(transform.value)
        self.primitives = (EraseByNoise(v2) if self._levels is None else Erase(self._levels, v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        where = draws.below(self._probability, where)
        self._refuse(sizes, where)
        tried = self._rectangles.tried(draws, sizes.height * sizes.width)
        h, w = tried.long, tried.short
        fits = (h < sizes.height[:, None]) & (w < sizes.width[:, None])
        found, (h, w) = tried.first(fits, h, w)
        numbers: dict[str, npt.NDArray[Any]] = {"height": h, "width": w}
        if self._levels is None:
            draws.skip(tried.attempted, where)
            where = taking(where, found)
            shapes = np.stack([sizes.channels, h, w], axis=1)
            numbers["noise"] = draws.normal(shapes, where)
            numbers["top"] = draws.randint(0, sizes.height - h + 1, where)
            numbers["left"] = draws.randint(0, sizes.width - w + 1, where)
        else:
            numbers["top"] = tried.below(0, sizes.height - h + 1)
            numbers["left"] = tried.below(1, sizes.width - w + 1)
            tried.take(draws, where)
            where = taking(where, found)
        return [Action(self.primitives[0], numbers, where)]

    def _refuse(self, sizes: Sizes, where: Any) -> None:
        """Raise what torchvision raises for images that it cannot erase a part of."""
        images = where & ~sizes.tensors
        if not self._v2 and images.any():
            raise SampleError(
                int(np.flatnonzero(images)[0]),
                AttributeError("'Image' object has no attribute 'shape'"),
            )
        if self._levels is None or len(self._levels) == 1:
            return
        others = where & (sizes.channels != len(self._levels))
        if others.any():
            sample = int(np.flatnonzero(others)[0])
            kind = "inpt" if self._v2 else "input"
            text = (
                "If value is a sequence, it should have either a single value or "
                f"{sizes.channels[sample]} (number of {kind} channels)"
            )
            raise SampleError(sample, ValueError(text))


def _levels_of(value: Any) -> tuple[float, ...] | None:
    """One level or one a channel; None: noise."""
    if value is None or value == "random":
        return None
    if isinstance(value, (int, float)):
        return (float(value),)
    if isinstance(value, (list, tuple)) and value:
        return tuple(float(level) for level in value)
    raise NotRead(
        f"value={value!r}: a number, numbers for each channel or 'random' are read; give those"
    )


@reads("RandomErasing")
def _random_erasing(transform: Any, v2: bool) -> Operator:
    return RandomErasing(transform, v2)
