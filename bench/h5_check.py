"""Whether batches are what was asked for, to the pixel: nobody is timed who does less work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.h5_peers import MEAN, STD, Job

__all__ = ["WrongBatches", "check"]

_TOLERANCE = 1e-5  # of a normalised value, about 2: some round after each step, some once
_CORNER = 4  # pixels a side of a window by which its place is found
_ENOUGH = 300  # images from which on the windows of an epoch show that they are random


class WrongBatches(Exception):
    """A way gave something else than it was asked for."""


def check(name: str, job: Job, batches: Iterable[Any], *, kept: bool = True) -> None:
    """Looks at all batches of an epoch.

    Args:
        name: of the way, for messages.
        job: what was asked for.
        batches: pairs of images and labels.
        kept: look at all of them only when the epoch has ended.

    Raises:
        WrongBatches: they are of another shape or dtype; an image is no window of the one that its
            label names, or came twice or never; the order or the windows are not random.
    """
    try:
        _check(job, list(batches) if kept else batches)
    except WrongBatches as error:
        raise WrongBatches(f"{name}: {error}") from None


def _check(job: Job, batches: Iterable[Any]) -> None:
    seen: list[int] = []
    windows: list[tuple[int, int, bool]] = []
    for images, labels in batches:
        count = min(job.batch, len(job) - len(seen))
        if images.dtype != job.dtype or images.shape != (count, 3, job.side, job.side):
            raise WrongBatches(
                f"images are {images.dtype} {tuple(images.shape)}, and not {job.dtype} "
                f"{(count, 3, job.side, job.side)}"
            )
        if labels.dtype != torch.int64 or labels.shape != (count,):
            raise WrongBatches(f"labels are {labels.dtype} {tuple(labels.shape)}")
        numbers = labels.tolist()
        windows += [_window(job, *pair) for pair in zip(numbers, images.numpy(), strict=True)]
        seen += numbers
    if sorted(seen) != list(range(len(job))):
        raise WrongBatches(f"{len(seen)} images, {len(set(seen))} different, of {len(job)}")
    if len(seen) < _ENOUGH:
        return
    if seen == sorted(seen):
        raise WrongBatches("the images are not shuffled")
    free = job.images.shape[2] - job.side
    for what, values, last in (("top", 0, free), ("left", 1, free), ("mirrored", 2, 1)):
        found = np.array([window[values] for window in windows])
        if not (0.4 < found.mean() / last < 0.6 and found.min() == 0 and found.max() == last):
            raise WrongBatches(f"{what} of the windows is not uniform from 0 to {last}")


def _window(job: Job, number: int, image: npt.NDArray[Any]) -> tuple[int, int, bool]:
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (MEAN, STD))
    whole, pixels = job.images[number], image
    if job.floats:
        pixels = np.rint((image * std + mean) * 255).astype(np.uint8)
    for mirrored in (False, True):
        seen = pixels[:, :, ::-1] if mirrored else pixels
        for top, left in _places(whole[0], seen[0]):
            stored = whole[:, top : top + job.side, left : left + job.side]
            if np.array_equal(stored, seen):
                wanted = (stored[:, :, ::-1] if mirrored else stored).astype(np.float32)
                if job.floats and np.abs((wanted / 255 - mean) / std - image).max() > _TOLERANCE:
                    raise WrongBatches(f"image {number} is not normalised as it should be")
                return top, left, mirrored
    raise WrongBatches(f"what is labelled {number} is no window of image {number}")


def _places(
    whole: npt.NDArray[np.uint8], window: npt.NDArray[np.uint8]
) -> Iterable[tuple[int, int]]:
    """Where the window may be, by its corner."""
    down, right = whole.shape[0] - window.shape[0], whole.shape[1] - window.shape[1]
    same = np.ones((down + 1, right + 1), np.bool_)
    for y in range(min(_CORNER, len(window))):
        for x in range(min(_CORNER, len(window))):
            same &= whole[y : y + down + 1, x : x + right + 1] == window[y, x]
    return [(int(top), int(left)) for top, left in np.argwhere(same)]
