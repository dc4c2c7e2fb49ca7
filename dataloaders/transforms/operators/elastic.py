"""ElasticTransform: a random field over the image, made where the image is."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataloaders.transforms.actions import Action, Operator, Sizes
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.elastic import Elastic

from .colour import refuse
from .options import fill_of
from .table import mode_of, reads


class ElasticTransform(Operator):
    """A field for each sample; as many numbers as two channels have pixels."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._sigma = _pair(transform.sigma)
        mode, fill = mode_of(transform.interpolation, v2), fill_of(transform, v2)
        self.primitives = (Elastic(_pair(transform.alpha), self._sigma, mode, fill, v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        ones = np.ones(len(sizes), np.int64)
        shapes = np.stack([ones, ones, sizes.height, sizes.width], axis=1)
        numbers = {"across": draws.field(shapes, where), "down": draws.field(shapes, where)}
        action = Action(self.primitives[0], numbers, where)
        # So little cannot be mirrored that far when the field is blurred.
        reach = int(8 * max(self._sigma) + 1) // 2
        refuse(action, np.minimum(sizes.height, sizes.width) <= reach, sizes)
        return [action]


def _pair(values: Any) -> tuple[float, float]:
    one, other = values
    return float(one), float(other)


@reads("ElasticTransform")
def _elastic(transform: Any, v2: bool) -> Operator:
    return ElasticTransform(transform, v2)
