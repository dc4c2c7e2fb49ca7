"""What torchvision makes of PIL images by turning them into tensors first: its own functions.

    AugMix            steps of one name and level, of all chains ──> torchvision, once for them
                      weights, float32 ──> added up, cut off to bytes
    ElasticTransform  fields made on the host ──> torchvision, image by image, on the device

No arithmetic of Pillow's is in the way, so there is nothing to repeat: on the CPU the bytes are the
same, elsewhere they are what torchvision gives there. A CUDA device is waited for: these functions
make their few constants on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dataloaders.transforms.actions import Action
from dataloaders.transforms.primitives.auto import AugMixed
from dataloaders.transforms.primitives.colour import Contrast
from dataloaders.transforms.primitives.elastic import Elastic

from .kernel import Array, Images, column, there

__all__ = ["OWN", "elastic", "mixed", "one_by_one"]

OWN = "torchvision's own functions on tensors, on the device of the batch: on the CPU to the bit"
"""How far a kernel is that runs torchvision's functions on tensors."""

_Numbers: TypeAlias = Mapping[str, Array]


def one_by_one(primitive: Any) -> Callable[[Images, _Numbers], Images]:
    """torchvision's function on each image, as a tensor."""

    def done(images: Images, numbers: _Numbers) -> Images:
        action = Action(primitive, numbers)
        found = [action.apply(sample, image) for sample, image in enumerate(images)]
        if all(image.shape == found[0].shape for image in found):
            return torch.stack(found)
        return found

    return done


def mixed(primitive: AugMixed) -> Callable[[Tensor, _Numbers], Tensor]:
    """AugMix: each image added to others that were made of it, with weights."""

    def done(images: Tensor, numbers: _Numbers) -> Tensor:
        weights, operations, levels = (np.asarray(numbers[name]) for name in AugMixed.numbers[1:])
        # The others of all images, one chain behind the other: they share their calls.
        others = images.repeat(weights.shape[1], 1, 1, 1)
        for place in range(operations.shape[2]):
            chosen = operations[:, :, place].T.reshape(-1), levels[:, :, place].T.reshape(-1)
            for operation, level, rows in _groups(*chosen):
                _step(primitive, others, operation, level, rows)
        out = column(numbers["original"], images) * images
        for weight, some in zip(weights.T, others.chunk(weights.shape[1]), strict=True):
            out.add_(column(weight, images) * some)
        return out.to(images.dtype)

    return done


def _groups(operations: Array, levels: Array) -> Iterator[tuple[int, float, Array]]:
    """Each operation and level that occurs, and where."""
    pairs = np.stack([operations, levels], 1)
    every, place = np.unique(pairs, axis=0, return_inverse=True)
    for number, (operation, level) in enumerate(every.tolist()):
        if operation >= 0:
            yield int(operation), level, np.flatnonzero(place.reshape(-1) == number)


def _step(primitive: AugMixed, others: Tensor, operation: int, level: float, rows: Array) -> None:
    """One step, done to these rows of ``others``, in place."""
    # torchvision's mean of an image is a sum of floats: threads share it if the image is alone.
    alone = isinstance(primitive.steps[operation], Contrast)
    for some in rows.reshape(-1, 1) if alone else [rows]:
        index = there(some, others.device)
        before = others.index_select(0, index)
        others.index_copy_(0, index, primitive.stepped(before, operation, np.asarray(level)))


def elastic(primitive: Elastic) -> Callable[[Tensor, _Numbers], Tensor]:
    """ElasticTransform: the fields blurred and the pixels moved on the device of the images."""

    def done(images: Tensor, numbers: _Numbers) -> Tensor:
        found = []
        for image, across, down in zip(images, numbers["across"], numbers["down"], strict=True):
            fields = (there(field.values(), image.device) for field in (across, down))
            found.append(primitive.moved(image, *fields))
        return torch.stack(found)

    return done
