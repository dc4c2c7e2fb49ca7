"""A cache of this package, its images by column: raw pixels, or encoded files.

train.h5 ──column of images──> Image ──graph──> ┐
         ──the other columns───────────────────> sample
                 the tail that the cache applies to the column is the chain
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dataloaders.cache import CachedDataset
from dataloaders.cache.sample.decode import KEPT

from .files import decoded, plain
from .source import Failed, Found, Image, Source

__all__ = ["CachedSource", "cached_source"]

_CHANNELS = {"L": 1, "RGB": 3}
_WRAPPED = "tv_tensor:Image:uint8"
_TENSORS = ("tensor:uint8", _WRAPPED)


def cached_source(cached: CachedDataset) -> Source | str:
    """The images of ``cached``; or why they cannot be used, in words."""
    name = cached.path.name
    images = [
        number
        for number, entry in enumerate(cached.columns)
        if any(_read_as(kind) for kind, _ in entry.variants)
    ]
    calls = dict(cached.calls)
    transform: Any = None
    if cached.transform is not None:
        if calls or len(cached.columns) != 1 or cached.index.structure != 0:
            return (
                f"{name}: its transform= is applied to whole samples; have the chain "
                "for images in the dataset when the cache is built, and leave transform= out"
            )
        transform = cached.transform
    elif len(calls) > 1:
        return f"{name}: {len(calls)} columns have transforms, and a graph serves one"
    elif calls:
        images, transform = [*calls], next(iter(calls.values()))
    if len(images) != 1:
        return f"{name}: {len(images)} of its columns have images, and a graph serves one"
    entry = cached.columns[images[0]]
    kinds = [kind for kind, _ in entry.variants]
    if len(kinds) != 1:
        return f"column {entry.name!r} of {name} has cells of kinds {', '.join(kinds)}"
    reading = _read_as(kinds[0])
    if reading is None:
        return f"column {entry.name!r} of {name} has cells of kind {kinds[0]}, no images"
    found = CachedSource(cached, images[0], transform, reading)
    if found.form == "bytes" and (entry.shape is None or entry.shape[0] not in (1, 3)):
        return f"column {entry.name!r} of {name} has tensors of no 1 or 3 channels"
    if found.form == "bytes":
        found.channels = entry.shape[0] if entry.shape else 3
        found.wraps = kinds[0] == _WRAPPED
    return found


_Reading = tuple[Literal["raw", "bytes", "file", "decoded"], int, tuple[str, ...]]
"""How a cell is read, the channels of its image, and (format, modes) that its file must have."""


def _read_as(kind: str) -> _Reading | None:
    family, _, detail = kind.partition(":")
    if family == "image" and detail in _CHANNELS:
        return "raw", _CHANNELS[detail], ()
    if kind in _TENSORS:
        return "bytes", 3, ()
    if kind == "file:RGB":
        return "file", 3, ()
    format, _, mode = detail.partition(":")
    if family == "encoded" and mode == "RGB":
        return "file", 3, (format, *KEPT[format][mode])
    if family == "encoded" and mode == "L":  # as Pillow reads it, whatever the format keeps
        return "decoded", 1, ()
    return None


class CachedSource(Source):
    """One column of a cache."""

    def __init__(
        self, cached: CachedDataset, number: int, transform: Any, reading: _Reading
    ) -> None:
        how, self.channels, self._must_be = reading
        self.kind = "encoded" if how == "file" else "pixels"
        self.form = "bytes" if how == "bytes" else "pil"
        self._cached = cached
        self._number = number
        self._transform = transform
        self._read: Callable[[int], Image] = {
            "raw": self._planes,
            "bytes": self._planes,
            "file": self._file,
            "decoded": self._decoded,
        }[how]

    @property
    def transform(self) -> Any:
        """See `Source`."""
        return self._transform

    @property
    def user_code(self) -> bool:
        """See `Source`."""
        return False

    def __len__(self) -> int:
        return len(self._cached)

    def image(self, index: Any, *, decode: bool = False) -> Found:
        """See `Source`."""
        try:
            return self._own(index) if decode and self.kind == "encoded" else self._read(index)
        except Exception as error:
            return Failed(error, self._name(index))

    def sample(self, index: Any, image: Any) -> Any:
        """See `Source`."""
        return self._cached.with_leaf(index, self._number, image)

    def _planes(self, index: int) -> Image:
        planes = self._cached.readers[self._number].view(range(len(self))[index])
        if planes is None or planes.ndim != 3:
            raise TypeError(f"{self._name(index)} has no image")
        _, height, width = planes.shape
        return Image(_interleaved(planes), height, width, self._name(index))

    def _file(self, index: int) -> Image:
        row = range(len(self))[index]
        data = self._cached.readers[self._number].file(row)
        format, *modes = self._must_be or ("",)
        found = None if data is None else plain(data, self._name(row), modes=modes)
        return found if found is not None and format in ("", found.format) else self._own(index)

    def _own(self, index: int) -> Image:
        row = range(len(self))[index]
        found = decoded(lambda: self._cached.readers[self._number].leaf(row), self._name(row))
        if isinstance(found, Failed):
            raise found.error
        return found

    def _decoded(self, index: int) -> Image:
        image = self._cached.readers[self._number].leaf(range(len(self))[index])
        return Image(np.array(image)[..., None], image.height, image.width, self._name(index))

    def _name(self, index: Any) -> str:
        return f"row {index} of {self._cached.path}"


def _interleaved(planes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[height, width, channels] of [channels, height, width], faster than a transpose."""
    pixels = np.empty((*planes.shape[1:], planes.shape[0]), np.uint8)
    for number, plane in enumerate(planes):
        pixels[..., number] = plane
    return pixels
