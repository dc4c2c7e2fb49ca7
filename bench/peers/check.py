"""Check batches to the pixel: a way that does less work is not timed.

Images show where a window of them lies: their first channel counts rows, the second columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.peers.readers import MEAN, STD, Job

_TOLERANCE = 1e-5  # of a normalised value of about 2: some ways round after each step, some once
_ENOUGH = 300  # from this many images on, an epoch's windows show whether they are random


class WrongBatches(Exception):
    """The batches differ from what was asked for."""


def check(job: Job, batches: Iterable[Any]) -> None:
    """Compare all batches of an epoch, once it has ended, with what ``job`` asks for.

    Raises:
        WrongBatches: shape or dtype differ; an image is no window of the one that its label names,
            or came twice or never; the order or the windows are not random.
    """
    seen: list[int] = []
    windows: list[tuple[int, int, bool]] = []
    for images, labels in list(batches):  # a way's later batches must leave the earlier ones alone
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
    """Return the top and left of the window that ``image`` is, and whether it is mirrored."""
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (MEAN, STD))
    pixels = image
    if job.floats:
        pixels = np.rint((image * std + mean) * 255).astype(np.uint8)
    top, left, right = int(pixels[0, 0, 0]), int(pixels[1, 0, 0]), int(pixels[1, 0, -1])
    mirrored = left > right
    left = min(left, right)
    wanted = job.images[number, :, top : top + job.side, left : left + job.side]
    wanted = wanted[:, :, ::-1] if mirrored else wanted
    if np.array_equal(wanted, pixels):
        exact = (wanted.astype(np.float32) / 255 - mean) / std
        if job.floats and np.abs(exact - image).max() > _TOLERANCE:
            raise WrongBatches(f"image {number} is not normalised as it should be")
        return top, left, mirrored
    raise WrongBatches(f"what is labelled {number} is no window of image {number}")
