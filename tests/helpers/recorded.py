"""Codes of datasets, run as they are and on stand-ins, and compared to the bit."""

from __future__ import annotations

import functools
import hashlib
import io
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from dataloaders.recording.worker import ask_again, describe_sample, recording_changes
from dataloaders.replaying.evaluate import replayed
from dataloaders.replaying.tail import DeviceTail
from dataloaders.specification import view_of

from .pictures import smooth

__all__ = [
    "Code",
    "as_recorded",
    "ask_again",
    "describe_sample",
    "encoded",
    "equal",
    "finished",
    "is_recorded",
    "path",
    "recording",
    "replayed",
    "states",
]


@functools.cache
def encoded(number: int, format: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """An encoded image, one of five sizes."""
    size = ((60, 50), (70, 45), (45, 70), (64, 64), (90, 61))[number % 5]
    file = io.BytesIO()
    image = smooth(number % 5).resize(size)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 200)
    elif mode != "RGB":
        image = image.convert(mode)
    image.save(file, format, **options)
    return file.getvalue()


@functools.cache
def _folder() -> Any:
    return tempfile.TemporaryDirectory(prefix="dataloaders-recorded-")


@functools.cache
def path(number: int, format: str = "JPEG", mode: str = "RGB", **options: Any) -> str:
    """A file of `encoded`, for the time of this process."""
    name = f"{number}-{mode.replace(';', '')}-{len(options)}.{format.lower()}"
    file = Path(_folder().name) / name
    file.write_bytes(encoded(number, format, mode, **options))
    return str(file)


def states() -> str:
    """What tells the states of the three generators apart."""
    now = (torch.get_rng_state().numpy().tobytes(), np.random.get_state(), random.getstate())
    return hashlib.sha256(repr(now[:1]).encode() + repr(now[1:]).encode()).hexdigest()


class Code(Dataset[Any]):
    """A dataset whose sample is what a function of the index returns, or raises, and the states."""

    def __init__(self, function: Callable[[int], Any], count: int = 5) -> None:
        self.function = function
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        np.random.seed(index)
        random.seed(index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                value = self.function(index)
            except Exception as error:
                value = type(error).__name__
        return value, states()


def finished(batch: Any) -> Any:
    """Return what becomes of a batch that a worker has sent."""
    if is_recorded(batch):
        return replayed(batch)
    return DeviceTail().apply(batch, move=lambda each: each, empty_like=torch.empty_like)


def first(batch: Any) -> Any:
    return batch


def recording(loader: Any, upto: str = "files") -> Any:
    """Return a loader like this one that yields what it records."""
    return view_of(loader, **recording_changes(loader, upto))


def is_recorded(batch: Any) -> bool:
    return hasattr(batch, "program")


def as_recorded(dataset: Any, upto: str = "files", **options: Any) -> tuple[list[Any], int]:
    """Return what a loader of ``dataset`` yields if it records, and how many were recorded."""
    options = {"batch_size": None, "collate_fn": first, **options}
    loader = DataLoader(dataset, **options)
    batches = list(recording(loader, upto))
    kinds = list(map(is_recorded, batches))
    made = []
    for batch in batches:
        try:
            made.append(finished(batch))
        except Exception:  # the dataset's mistake, which it may catch itself
            made.append(ask_again(batch.again, loader))
    return made, sum(kinds)


def equal(one: Any, other: Any) -> bool:
    """Whether two samples are equal: classes, types, strides, pixels and ``info``."""
    if isinstance(one, torch.Tensor):
        same = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return same and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Image.Image):
        same = type(one) is type(other) and one.mode == other.mode and one.info == other.info
        return same and one == other
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)
