"""A few samples of the very dataset, made its own way and out of a source, and compared.

    dataset[i] ──────────────────────────────────┐
    source.image(i) ──> transform ──> sample(i)  ── equal, to the bit?

Both ways see the same random states, which are put back at the end. What a broken file raises is
compared too.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from dataloaders.cache.cut import sample_of
from dataloaders.cache.study import same_samples
from dataloaders.random_states import random_states_kept
from dataloaders.seeding import seed_generators
from dataloaders.transforms.find import find_generators

from .source import Failed, Image, Source

__all__ = ["as_tensor", "attempts", "generators_kept", "proved", "spread"]

_PROVED = 4


def proved(dataset: Any, source: Source) -> str | None:
    """Why the samples of ``source`` are not those of ``dataset``; None: those compared are."""
    if type(dataset).__getitem__ is Dataset.__getitem__:
        return None  # it says what its files are, and nothing else
    with generators_kept(dataset) as restart:
        for index in spread(len(source), _PROVED):
            theirs, ours = attempts(
                index, restart, lambda at: sample_of(dataset, at), lambda at: _ours(source, at)
            )
            if isinstance(theirs, Exception) or isinstance(ours, Exception):
                if type(theirs) is not type(ours):
                    return f"sample {index} of it {_told(theirs)}, and by its parts {_told(ours)}"
            elif not same_samples(theirs, ours):
                return (
                    f"{type(dataset).__name__} does more than load an image and apply its "
                    f"transform: sample {index} is another one"
                )
    return None


def attempts(index: int, restart: Callable[[], None], *ways: Callable[[int], Any]) -> list[Any]:
    """What each of ``ways`` makes of ``index``, seeded alike; an exception where it raises."""
    found: list[Any] = []
    for way in ways:
        restart()
        seed_generators((2 * index + 1, 5, 7, 11))
        try:
            found.append(way(index))
        except Exception as error:
            found.append(error)
    return found


@contextmanager
def generators_kept(dataset: Any) -> Iterator[Callable[[], None]]:
    """Process-wide random states, and the dataset's own, put back on leaving.

    Gives what puts the dataset's own back in between.
    """
    own = [(put, get()) for get, put in find_generators(dataset)]

    def restart() -> None:
        for put, state in own:
            put(state)

    with random_states_kept(cuda=False):
        try:
            yield restart
        finally:
            restart()


def spread(samples: int, count: int) -> list[int]:
    """Up to ``count`` of them, evenly; the first and the last are among them."""
    last = min(samples, count) - 1
    return sorted({round(n * (samples - 1) / max(1, last)) for n in range(last + 1)})


def _ours(source: Source, index: int) -> Any:
    found = source.image(index)
    if isinstance(found, Failed):
        raise found.error
    image = opened(found, source)
    transform = source.transform
    return source.sample(index, image if transform is None else transform(image))


def opened(image: Image, source: Source) -> Any:
    """What the dataset hands to its transform, of an `Image` of ``source``."""
    from PIL import Image as Pillow

    if source.kind == "encoded":
        return Pillow.open(io.BytesIO(image.data.tobytes())).convert("RGB")
    if source.form == "bytes":
        return as_tensor(image.data, wraps=source.wraps)
    return Pillow.fromarray(image.data if source.channels == 3 else image.data[..., 0])


def as_tensor(pixels: npt.NDArray[np.uint8], *, wraps: bool) -> torch.Tensor:
    """uint8 [channels, height, width] of [height, width, channels]; a tv_tensor if it ``wraps``."""
    planes: torch.Tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()
    if not wraps:
        return planes
    from torchvision.tv_tensors import Image as Wrapped

    wrapped: torch.Tensor = planes.as_subclass(Wrapped)
    return wrapped


def _told(found: Any) -> str:
    if isinstance(found, Exception):
        return f"raises {type(found).__name__}: {found}"[:300]
    return "can be read"
