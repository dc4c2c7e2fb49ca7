"""Run the code of datasets as it is and on stand-ins, and compare to the bit."""

from __future__ import annotations

import functools
import hashlib
import io
import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate

from dataloaders.recording import context, hooks, ops, program, worker
from dataloaders.replaying.tail import DeviceTail
from dataloaders.specification import view_of

from .compare import same, seed_everything
from .datasets import MapDataset, as_list
from .pictures import saved, smooth

_FOLDER = tempfile.TemporaryDirectory(prefix="dataloaders-recorded-")


@functools.cache
def encoded(number: int, format: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """An encoded image, one of five sizes."""
    size = ((60, 50), (70, 45), (45, 70), (64, 64), (90, 61))[number % 5]
    image = smooth(number % 5).resize(size)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 200)
    elif mode != "RGB":
        image = image.convert(mode)
    return saved(image, format, **options)


@functools.cache
def path(number: int, format: str = "JPEG", mode: str = "RGB") -> str:
    """A file of `encoded`, for the time of this process."""
    file = Path(_FOLDER.name) / f"{number}-{mode.replace(';', '')}.{format.lower()}"
    file.write_bytes(encoded(number, format, mode))
    return str(file)


class Code(MapDataset):
    """A dataset whose sample is what a function of the index returns, or raises, and the states."""

    def __init__(self, function: Callable[[int], Any], size: int = 5) -> None:
        super().__init__(None, size, function=function)

    def sample(self, index: int) -> Any:
        seed_everything(index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                value = self.function(index)
            except Exception as error:
                value = type(error).__name__
        states = torch.get_rng_state().numpy().tobytes(), np.random.get_state(), random.getstate()
        return value, hashlib.sha256(repr(states).encode()).hexdigest()


class Photos(MapDataset):
    """``make(image)`` of each file, opened by Pillow as RGB."""

    def __init__(self, files: Sequence[bytes], make: Callable[[Any], Any]) -> None:
        super().__init__(None, len(files), files=list(files), make=make)

    def sample(self, index: int) -> Any:
        return self.make(Image.open(io.BytesIO(self.files[index])).convert("RGB"))


def both(
    dataset: Dataset[Any], collate_fn: Callable[[Any], Any] = default_collate, seed: int = 0
) -> tuple[Any, Any]:
    """Return ``dataset`` as one batch of stock's, and as it is recorded, with equal draws."""
    loader = DataLoader(dataset, batch_size=len(dataset), collate_fn=collate_fn)  # type: ignore[arg-type]
    found = []
    for each in (loader, recording(loader)):
        seed_everything(seed)
        found.append(next(iter(each)))
    stock, recorded = found
    assert is_recorded(recorded)
    return stock, recorded


def replayed(batch: Any) -> Any:
    """Return a recorded batch, made step by step by the very calls that were recorded.

    As in torch's workers, one thread of torch must run it: sums of floats depend on their number.
    """
    return program.filled(batch, ops.run)


def recording(loader: Any, upto: str = "files") -> Any:
    """Return a loader like this one that yields what it records."""
    return view_of(loader, **worker.recording_changes(loader, upto))


def looks_of(dataset: Any, index: int) -> list[str]:
    """Return what needed pixels when a sample was recorded."""
    hooks.install()
    own = context.Recorder()
    with context.recording(own):
        dataset[index]
    return own.looks


def is_recorded(batch: Any) -> bool:
    return hasattr(batch, "program")


def as_recorded(dataset: Any, upto: str = "files") -> tuple[list[Any], int]:
    """Return what a loader of ``dataset`` yields if it records, and how many were replayed."""
    loader = DataLoader(dataset, batch_size=None, collate_fn=as_list)
    made, count = [], 0
    for batch in list(recording(loader, upto)):
        try:
            made.append(
                replayed(batch) if is_recorded(batch) else DeviceTail().apply(batch, as_list)
            )
            count += is_recorded(batch)
        except Exception:  # the dataset's mistake, which it may catch itself
            made.append(worker.ask_again(batch.again, as_list, False, dataset))
    return made, count


equal = functools.partial(same, info=True)
"""Whether two samples are the same, with the classes and ``info`` of images."""
