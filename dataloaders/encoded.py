"""The encoded files behind a dataset: what it would decode, as bytes, and the target beside it.

    ImageFolder, DatasetFolder    samples[i] ──> path ──┐
    one with encoded(), target()  ──> bytes or path ────┼──> EncodedFile ──> RGB ──transform──┐
    Subset, ConcatDataset         of these, nested ─────┘    target ──────────────────────> sample

For whoever keeps such files, or decodes them elsewhere. That these files and transforms give the
dataset's own samples is not known here: whoever relies on it compares a few.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from dataloaders.errors import CacheError

__all__ = ["FORMATS", "SUFFIXES", "EncodedFile", "Source", "opened", "source_of"]

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded, by Pillow's names: no format that runs another program, as EPS does."""

SUFFIXES = {
    "BMP": "bmp",
    "GIF": "gif",
    "JPEG": "jpg",
    "MPO": "jpg",  # a JPEG file with several images, of which the first one counts
    "PNG": "png",
    "PPM": "ppm",
    "TIFF": "tiff",
    "WEBP": "webp",
}
"""How the names of such files end."""

_OWN = (
    "encoded(index) that returns the file's bytes or path, and target(index); the sample is then "
    "(image, target), or what its assemble(image, target) makes of them"
)


class EncodedFile:
    """An image as the file that it came from.

    Args:
        data: the file's bytes.
        name: of the file, for messages.
    """

    def __init__(self, data: bytes, name: str = "") -> None:
        self.data = data
        self.name = name

    @property
    def format(self) -> str:
        """Pillow's name of the format, a key of `SUFFIXES`.

        Raises:
            ValueError: it is none of `FORMATS`.
        """
        return str(opened(self.data, FORMATS).format)

    def decode(self) -> Any:
        """The PIL image of mode RGB that torchvision's default loader makes of it: not turned.

        Raises:
            ValueError: it cannot be decoded.
        """
        return self._decoded(opened(self.data, FORMATS))

    def check(self) -> None:
        """Nothing if it can be decoded to its end; of a JPEG faster than decoding it.

        Raises:
            ValueError: it cannot.
        """
        image = opened(self.data, FORMATS)
        image.draft("RGB", (1, 1))  # all of the data is read, and an eighth of each side is made
        self._decoded(image)

    def _decoded(self, image: Any) -> Any:
        try:
            return image.convert("RGB")
        except Exception as error:  # of bytes that anybody may have written: any of Pillow's
            raise ValueError(f"it cannot be decoded ({_told(error)})") from error


def opened(data: bytes, formats: Sequence[str]) -> Any:
    """A PIL image whose pixels are not decoded yet, of one of these formats.

    Raises:
        ValueError: it is of another one, damaged, or larger than Pillow allows.
        ImportError: Pillow is not installed.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=tuple(formats))
    except UnidentifiedImageError as error:
        raise ValueError(f"it is no file of format {', '.join(formats)}") from error
    except Exception as error:  # of bytes that anybody may have written: any of Pillow's
        raise ValueError(f"it cannot be opened ({_told(error)})") from error


class Source(ABC):
    """The encoded files of a dataset, by index."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encoded(self, index: int) -> EncodedFile:
        """The file of sample ``index``, read from where it is."""

    @abstractmethod
    def target(self, index: int) -> Any:
        """What sample ``index`` has beside its image; nothing is decoded for it."""

    @abstractmethod
    def transform(self, index: int) -> Callable[[Any], Any] | None:
        """What is applied to the decoded image of sample ``index``."""

    @property
    @abstractmethod
    def transforms(self) -> list[Any]:
        """Each object that `transform` gives for some sample, in order; None may be among them."""

    @abstractmethod
    def sample(self, index: int, image: Any) -> Any:
        """Sample ``index`` with ``image`` as its image."""


def source_of(dataset: Any) -> Source | str:
    """The encoded files of ``dataset``; or why there are none, in words."""
    kind = type(dataset)
    if callable(getattr(dataset, "encoded", None)) and callable(getattr(dataset, "target", None)):
        return _Own(dataset)
    if kind.__getitem__ is Subset.__getitem__ and _gets_many_as(kind, Subset):
        inner = source_of(dataset.dataset)
        return inner if isinstance(inner, str) else _Part(inner, dataset.indices)
    if kind.__getitem__ is ConcatDataset.__getitem__ and _gets_many_as(kind, ConcatDataset):
        parts = []
        for each in dataset.datasets:
            part = source_of(each)
            if isinstance(part, str):
                return part
            parts.append(part)
        return _Row(parts)
    return _folder_of(dataset)


def _folder_of(dataset: Any) -> Source | str:
    name = type(dataset).__name__
    unknown = f"{name} is not known to decode files; give it the methods {_OWN}"
    try:
        from torchvision import get_image_backend
        from torchvision.datasets.folder import DatasetFolder, default_loader, pil_loader
    except ImportError:
        return unknown
    kind = type(dataset)
    if kind.__getitem__ is not DatasetFolder.__getitem__ or not _gets_many_as(kind, DatasetFolder):
        return unknown
    if dataset.loader not in (default_loader, pil_loader) or get_image_backend() != "PIL":
        loader = getattr(dataset.loader, "__name__", repr(dataset.loader))
        return (
            f"{name} loads files by {loader} (image backend {get_image_backend()!r}), and what is "
            "known is torchvision's default loader with Pillow; use that one, or give the dataset "
            f"the methods {_OWN}"
        )
    return _Folder(dataset)


def _gets_many_as(kind: type, base: type) -> bool:
    """Whether a loader's way to ask for many samples is that of ``base``."""
    return getattr(kind, "__getitems__", None) is getattr(base, "__getitems__", None)


class _Folder(Source):
    """torchvision's ImageFolder and DatasetFolder."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def encoded(self, index: int) -> EncodedFile:
        return _read(self._dataset.samples[index][0])

    def target(self, index: int) -> Any:
        target, change = self._dataset.samples[index][1], self._dataset.target_transform
        return target if change is None else change(target)

    def transform(self, index: int) -> Callable[[Any], Any] | None:
        found: Callable[[Any], Any] | None = self._dataset.transform
        return found

    @property
    def transforms(self) -> list[Any]:
        return [self._dataset.transform]

    def sample(self, index: int, image: Any) -> Any:
        return image, self.target(index)


class _Own(Source):
    """A dataset that says itself what its files are."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def encoded(self, index: int) -> EncodedFile:
        found = self._dataset.encoded(index)
        if isinstance(found, (str, os.PathLike)):
            return _read(found)
        if isinstance(found, (bytes, bytearray, memoryview)):
            return EncodedFile(bytes(found))
        raise CacheError(
            f"{type(self._dataset).__name__}.encoded({index}) gives {type(found).__name__}; it "
            "must give the bytes of an encoded file, or its path"
        )

    def target(self, index: int) -> Any:
        return self._dataset.target(index)

    def transform(self, index: int) -> Callable[[Any], Any] | None:
        return getattr(self._dataset, "transform", None)

    @property
    def transforms(self) -> list[Any]:
        return [getattr(self._dataset, "transform", None)]

    def sample(self, index: int, image: Any) -> Any:
        assemble = getattr(self._dataset, "assemble", None)
        target = self.target(index)
        return (image, target) if assemble is None else assemble(image, target)


class _Part(Source):
    """A Subset of another source."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self._source = source
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def encoded(self, index: int) -> EncodedFile:
        return self._source.encoded(self._indices[index])

    def target(self, index: int) -> Any:
        return self._source.target(self._indices[index])

    def transform(self, index: int) -> Callable[[Any], Any] | None:
        return self._source.transform(self._indices[index])

    @property
    def transforms(self) -> list[Any]:
        return self._source.transforms

    def sample(self, index: int, image: Any) -> Any:
        return self._source.sample(self._indices[index], image)


class _Row(Source):
    """Several sources, one behind the other: a ConcatDataset."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._ends = list(accumulate(map(len, sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def encoded(self, index: int) -> EncodedFile:
        source, inner = self._at(index)
        return source.encoded(inner)

    def target(self, index: int) -> Any:
        source, inner = self._at(index)
        return source.target(inner)

    def transform(self, index: int) -> Callable[[Any], Any] | None:
        source, inner = self._at(index)
        return source.transform(inner)

    @property
    def transforms(self) -> list[Any]:
        return [transform for source in self._sources for transform in source.transforms]

    def sample(self, index: int, image: Any) -> Any:
        source, inner = self._at(index)
        return source.sample(inner, image)

    def _at(self, index: int) -> tuple[Source, int]:
        number = bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return self._sources[number], index - before


def _read(path: str | os.PathLike[str]) -> EncodedFile:
    return EncodedFile(Path(path).read_bytes(), os.fspath(path))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
