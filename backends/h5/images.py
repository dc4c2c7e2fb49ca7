"""Make the images of a batch: copy a window of each from the mapped file, and make floats of it.

    rows ──> images in the file ──> Windows, drawn for all ──> bytes ──> floats, if the tail ends so
                                                               └ a few threads, each its own images

A thread makes a few images at a time, so that their bytes are still in the core's cache when they
become floats.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from dataloaders.batches.memory import HostPool
from dataloaders.cache.read.columns import ColumnReader
from dataloaders.cache.read.files import Located
from dataloaders.recording.tail import Step as FloatStep
from dataloaders.recording.tail import Trailing
from dataloaders.replaying.pointwise import Pointwise
from dataloaders.transforms.read import CONVERTERS, Member, is_pointwise, read, trailing

from .draws import Draws
from .threads import Threads
from .windows import NotThisBatch, Obstacle, Step, Windows, steps_of

__all__ = ["KINDS", "Images", "empty", "obstacle_in", "read_column"]

KINDS = (
    *(f"image:{mode}" for mode in ("L", "RGB", "RGBA", "CMYK", "YCbCr")),
    *("tensor:uint8", "tv_tensor:Image:uint8"),
)
"""Kinds of leaves whose values are bytes [C, H, W], and that torch stacks to plain tensors.

ToTensor and ToImage take the planes of PIL images of these modes as they are.
"""

_AT_ONCE = 1 << 18  # values that become floats together: 1 MiB

with warnings.catch_warnings():  # torch's only warning that a tensor, of a file, is read-only
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"0", np.uint8))

_Image = npt.NDArray[np.uint8]
_Moved = tuple[_Image, int, int, bool, bool]
"""An image in the file; top and left of its window; whether it is upside down, and mirrored."""


def read_column(rows: Sequence[Located], number: int, read: Callable[..., Any]) -> list[Any]:
    """Return what ``read`` gives of a column's reader and each of these rows, in their order."""
    found: list[Any] = [None] * len(rows)
    for place, columns, row in rows:
        found[place] = read(columns[number], row)
    return found


def empty(pool: HostPool, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a column: shared in a worker, else from the pool if it is large."""
    if get_worker_info() is None:
        return pool.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]


def obstacle_in(tail: Any) -> str | None:
    """Return which member of ``tail`` cannot be done to a whole batch, and why; None: all can."""
    try:
        _read(tail)
    except Obstacle as error:
        return str(error)
    return None


def _read(tail: Any) -> tuple[list[Step], tuple[FloatStep, ...]]:
    """Return the crops and flips of ``tail``, and what makes floats; or raise `Obstacle`.

    Bytes are moved first and become floats last, in whatever order the tail has it. Only a crop
    after Normalize would differ: its border around the image is of zeros.
    """
    members = read(tail)
    run = trailing([member for member in members if is_pointwise(member)])
    steps = steps_of([member for member in members if not (run and is_pointwise(member))])
    names = [member.torchvision for member in members]
    if run and "Normalize" in names:
        crops = [name for name in names[names.index("Normalize") :] if name and "Crop" in name]
        if crops:
            raise Obstacle(f"{crops[0]} comes after Normalize")
    if not run and not any(name in CONVERTERS for name in names):
        raise Obstacle("its tail makes no tensors of images")
    floats = _float_steps(run)
    if any(step.dtype is torch.bfloat16 for step in floats):
        raise Obstacle("its tail makes bfloat16, which NumPy does not have")
    return steps, floats


def _float_steps(run: Sequence[Member]) -> tuple[FloatStep, ...]:
    """Return the members of ``run``, which is from `trailing`, as a recording has them."""
    steps: list[FloatStep] = []
    for member in run:
        transform: Any = member.transform
        name, is_v2 = member.torchvision, ".v2" in type(transform).__module__
        if name in CONVERTERS:
            continue
        if name == "Normalize":
            op, dtype = f"{'v2' if is_v2 else 'v1t'}.normalize", steps[-1].dtype
            numbers = ("mean", transform.mean), ("std", transform.std)
            steps.append(FloatStep(op, (), numbers, dtype, "Tensor"))
        elif name == "ToTensor" or not is_v2:
            dtype = torch.get_default_dtype() if name == "ToTensor" else transform.dtype
            steps.append(FloatStep("v1t.convert_image_dtype", (dtype,), (), dtype, "Tensor"))
        else:
            args = transform.dtype, getattr(transform, "scale", True)
            steps.append(FloatStep("v2.to_dtype", args, (), transform.dtype, "Tensor"))
    return tuple(steps)


class Images:
    """Makes batches [N, C, H, W] of a column of images with a tail.

    Args:
        number: of the column.
        tail: the transforms that run live.
        pool: gives memory for large tensors, outside workers.
        threads: share the images.
        puts_off: as in `Batches`.

    Raises:
        Obstacle: a member of ``tail`` cannot be done to a whole batch.
    """

    def __init__(
        self, number: int, tail: Any, pool: HostPool, threads: Threads, puts_off: bool
    ) -> None:
        self._number, self._pool, self._threads = number, pool, threads
        self._steps, self._floats = _read(tail)
        self._left = self._floats if puts_off else ()

    def __call__(self, rows: Sequence[Located], draws: Draws) -> Any:
        """Return the images of these rows.

        Raises:
            NotThisBatch: one is None, they differ in shape, or torchvision would raise.
        """
        stored = read_column(rows, self._number, ColumnReader.stored)
        images: list[Any] = [values for _, values in stored]
        if any(image is None for image in images):
            raise NotThisBatch
        channels, heights, widths = np.array([image.shape for image in images]).T
        windows = Windows(heights, widths)
        for step in self._steps:
            step(draws, windows)
        shape = channels, windows.height, windows.width
        if any((each != each[0]).any() for each in shape):
            raise NotThisBatch
        try:
            pointwise = Pointwise(self._floats, int(channels[0]))
        except ValueError as error:  # torchvision raises its own for the sample
            raise NotThisBatch from error
        if self._left:
            pointwise = Pointwise((), int(channels[0]))
        out = empty(self._pool, (len(images), *(int(each[0]) for each in shape)), pointwise.dtype)
        arrays = windows.top, windows.left, windows.upside_down, windows.mirrored
        moved = list(zip(images, *(each.tolist() for each in arrays), strict=True))
        self._threads.split(
            len(out),
            out.nbytes,
            lambda begin, end: _fill(out[begin:end], moved[begin:end], pointwise),
        )
        return Trailing(out, self._left) if self._left else out


def _fill(out: torch.Tensor, moved: Sequence[_Moved], pointwise: Pointwise) -> None:
    """Fill ``out`` with the windows, or with the floats that ``pointwise`` makes of them."""
    at_once = max(1, _AT_ONCE // max(1, out[0].numel()))
    places = zip(out.numpy(), moved, strict=True)
    for some in torch.split(out, at_once):
        for place, each in islice(places, at_once):
            _put(place, *each)
        pointwise.finish(some)


def _put(
    place: npt.NDArray[Any], image: _Image, top: int, left: int, upside_down: bool, mirrored: bool
) -> None:
    """Fill ``place`` with a window of ``image``, and with zeros where it is beyond the image."""
    bottom, right = top + place.shape[1], left + place.shape[2]
    part = image[:, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    if part.shape != place.shape:
        place[...] = 0
        above = max(bottom - image.shape[1], 0) if upside_down else max(-top, 0)
        beside = max(right - image.shape[2], 0) if mirrored else max(-left, 0)
        place = place[:, above : above + part.shape[1], beside : beside + part.shape[2]]
    if upside_down or mirrored:  # several times as fast as reversing lines in NumPy
        part = torch.flip(torch.from_numpy(part), [1] * upside_down + [2] * mirrored).numpy()
    place[...] = part
