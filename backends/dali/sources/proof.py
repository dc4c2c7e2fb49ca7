"""A few samples of the very dataset, made its own way and out of a source, and compared.

    dataset[i] ─────────────────────────────────────────────┐
    source.image(i) ──> transform, as read ──> sample(i)  ── equal, to the bit?

Both ways see the same random states, which are put back at the end. What a broken file raises is
compared too. As read: its numbers drawn beforehand, its steps done one by one, by torchvision's
functions.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from dataloaders.cache.build.study import same_samples
from dataloaders.cache.sample.cut import sample_of
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.actions import SampleError, Sizes, applied, drawn
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.find import find_generators
from dataloaders.transforms.operators import chain_of

from .source import Failed, Image, Source

__all__ = ["as_read", "as_tensor", "attempts", "generators_kept", "proved", "spread", "words_of"]

_PROVED = 4


def proved(dataset: Any, source: Source) -> str | None:
    """Why the samples of ``source`` are not those of ``dataset``; None: those compared are."""
    name = type(dataset).__name__

    def theirs(index: int) -> Any:
        if type(dataset).__getitem__ is Dataset.__getitem__:
            return called(index)  # it says what its files are, and nothing else
        return sample_of(dataset, index)

    def called(index: int) -> Any:
        return _made(source, index, lambda transform, image: transform(image))

    def ours(index: int) -> Any:
        def read(transform: Any, image: Any) -> Any:
            try:
                return as_read(transform, image, Draws([words_of(index)]), source.channels)
            except Exception as error:
                raise _Raised from error

        return _made(source, index, read)

    with generators_kept(dataset) as restart:
        for index in spread(len(source), _PROVED):
            wanted, found = attempts(index, restart, theirs, ours)
            if _alike(wanted, found):
                continue
            (by_parts,) = attempts(index, restart, called)
            if _alike(wanted, by_parts):
                return (
                    f"its transform makes another sample {index} than it is read to make; have "
                    "nothing of torchvision's replaced, or use backend='prefetch'"
                )
            if isinstance(wanted, Exception) or isinstance(by_parts, Exception):
                return f"sample {index} of it {_told(wanted)}, and by its parts {_told(by_parts)}"
            return (
                f"{name} does more than load an image and apply its "
                f"transform: sample {index} is another one"
            )
    return None


def as_read(transform: Any, image: Any, draws: Draws, channels: int) -> Any:
    """What ``transform`` makes of one image by the operators it is read as; by itself if it is not.

    Torch's and Python's generators then stand where ``transform`` itself would have left them.

    Args:
        transform: a chain.
        image: a PIL image or a tensor [C, H, W].
        draws: the streams of this one sample.
        channels: of the image.
    """
    chain = chain_of(transform)
    if chain.rest:
        return transform(image)
    is_tensor = isinstance(image, torch.Tensor)
    height, width = image.shape[-2:] if is_tensor else (image.height, image.width)
    try:
        actions = drawn(chain.operators, draws, Sizes([height], [width], channels, is_tensor))
    except SampleError as refused:
        raise refused.error from None
    made = applied(actions, 0, image)
    with draws.generator(0) as generator:
        torch.default_generator.set_state(generator.get_state())
    random.setstate(draws.python(0).getstate())
    return made


def words_of(index: int) -> tuple[int, int, int, int]:
    """What `attempts` seeds the generators with around sample ``index``."""
    return 2 * index + 1, 5, 7, 11


def attempts(index: int, restart: Callable[[], None], *ways: Callable[[int], Any]) -> list[Any]:
    """What each of ``ways`` makes of ``index``, seeded alike; an exception where it raises."""
    found: list[Any] = []
    for way in ways:
        restart()
        seed_generators(words_of(index))
        try:
            found.append(_kept(way(index)))
        except Exception as error:
            found.append(error)
    return found


def _kept(sample: Any) -> Any:
    """A copy of ``sample``, whose memory the dataset may give to the next one."""
    try:
        return copy.deepcopy(sample)
    except Exception:  # what cannot be copied is compared as it is
        return sample


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


def _made(source: Source, index: int, done: Callable[[Any, Any], Any]) -> Any:
    found = source.image(index)
    if isinstance(found, Failed):
        raise found.error
    image, transform = opened(found, source), source.transform
    return source.sample(index, image if transform is None else done(transform, image))


class _Raised(Exception):
    """One of the steps raised; the dataset is asked then, and its error is the one that counts."""


def _alike(one: Any, other: Any) -> bool:
    if isinstance(other, _Raised):
        return isinstance(one, Exception)
    if isinstance(one, Exception) or isinstance(other, Exception):
        return type(one) is type(other)
    return same_samples(one, other)


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
