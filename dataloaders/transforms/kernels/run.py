"""The actions of a chain on a batch that is already where it shall be worked on.

Action ──its kernel──> all samples at once                          none or all take it, one size
                   └─> those that take it, put back among the rest  some do
                   └─> size by size                                 sizes differ
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dataloaders.transforms.actions import Action

from .kernel import Array, Form, Images, Kernel, there
from .table import form_after, kernel_for

__all__ = ["run"]


def run(
    actions: Iterable[Action], images: Images, form: Form = "pil", ours: bool = False
) -> Images:
    """What ``actions``, one after the other, make of the images of a batch, on their device.

    Args:
        actions: of n samples; there must be a kernel for each (`kernel_for`).
        images: uint8 [n, C, H, W], or n tensors [C, H, W] where sizes differ. C is 1 or 3.
        form: what they are to the first action: with "pil", what torchvision makes of PIL images
            is computed. Behind ToImage or PILToTensor they are "bytes".
        ours: whether a tensor ``images`` may be written into; a list never is.

    Returns:
        uint8 [n, C, H, W] if they are all of one size then, else a list. The very ``images`` if no
        sample takes an action; views of them from some steps; else new memory.

    Raises:
        TypeError: no kernel computes one of the actions.
    """
    batch = _Batch(images, ours)
    for action in actions:
        kernel = kernel_for(action.primitive, form)
        if kernel is None:
            name = type(action.primitive).__name__
            raise TypeError(
                f"{name}: no kernel computes it on a batch; ask kernel_for() before, and do it "
                "sample by sample: dataloaders.transforms.actions.applied"
            )
        if action.where is None or action.where.all():
            batch.all(kernel, action.numbers)
        elif action.where.any():
            chosen = np.flatnonzero(action.where)
            batch.some(kernel, {n: a[chosen] for n, a in action.numbers.items()}, chosen)
        form = form_after(action.primitive, form)
    return batch.images


class _Batch:
    """Images on their way, and whether their memory is ours to write into."""

    def __init__(self, images: Images, ours: bool) -> None:
        self.images = images
        self._ours = ours

    def all(self, kernel: Kernel, numbers: Mapping[str, Array]) -> None:
        """Every sample takes it."""
        if not len(self.images):
            return
        if isinstance(self.images, Tensor) or kernel.ragged:
            done = kernel(self.images, numbers)
        else:
            done = _by_size(kernel, self.images, numbers)
        self._become(done)

    def some(self, kernel: Kernel, numbers: Mapping[str, Array], chosen: Array) -> None:
        """Only ``chosen`` take it; ``numbers`` are theirs."""
        if isinstance(self.images, Tensor):
            places = there(chosen, self.images.device)
            done = kernel(self.images.index_select(0, places), numbers)
            if isinstance(done, Tensor) and done.shape[1:] == self.images.shape[1:]:
                if not self._ours:
                    self.images, self._ours = self.images.clone(), True
                self.images.index_copy_(0, places, done)
                return
        else:
            taking = [self.images[sample] for sample in chosen.tolist()]
            done = kernel(taking, numbers) if kernel.ragged else _by_size(kernel, taking, numbers)
        images = list(self.images)
        for sample, image in zip(chosen.tolist(), done, strict=True):
            images[sample] = image
        self._become(images)

    def _become(self, done: Images) -> None:
        if done is self.images:
            return
        joined = joined_if_alike(done)
        # A view, such as a crop's, is not ours; what was put together just now is.
        self._ours = joined is not done or _own_memory(joined, self.images)
        self.images = joined


def joined_if_alike(images: Images) -> Images:
    """[n, C, H, W] if all are of one size."""
    if isinstance(images, Tensor) or any(image.shape != images[0].shape for image in images[1:]):
        return images
    return torch.stack(images) if images else images


def _own_memory(done: Images, before: Images) -> bool:
    if not isinstance(done, Tensor):
        return False
    start = done.untyped_storage().data_ptr()
    return all(image.untyped_storage().data_ptr() != start for image in _tensors(before))


def _tensors(images: Images) -> Sequence[Tensor]:
    return [images] if isinstance(images, Tensor) else images


def _by_size(kernel: Kernel, images: list[Tensor], numbers: Mapping[str, Array]) -> list[Tensor]:
    """A kernel for images of one size, on images of several."""
    groups: dict[torch.Size, list[int]] = {}
    for sample, image in enumerate(images):
        groups.setdefault(image.shape, []).append(sample)
    found = list(images)
    for samples in groups.values():
        own = {name: array[samples] for name, array in numbers.items()}
        done = kernel(torch.stack([images[sample] for sample in samples]), own)
        for sample, image in zip(samples, done, strict=True):
            found[sample] = image
    return found
