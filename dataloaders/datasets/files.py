"""The encoded files behind a dataset: what it would decode, as bytes, and the target beside it.

    torchvision's own (torchvision_files.py) ─> path ───────┐
    one with encoded(), target()  ──> bytes or path ─────┼──> EncodedFile ──> RGB ──transform──┐
    Subset, ConcatDataset         of these, nested ──────┘    target ──────────────────────> sample

For whoever keeps such files, or decodes them elsewhere. That these files and transforms give the
dataset's own samples is not known here: whoever relies on it compares a few. ``encoded()`` may be
called on any thread, several at once, and should draw no random numbers.
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

from dataloaders.datasets.nested import is_own, read_nested
from dataloaders.datasets.torchvision_files import Files, files_of
from dataloaders.errors import BackendUnavailable, CacheError
from dataloaders.transforms.read import read

__all__ = [
    "FORMATS",
    "SUFFIXES",
    "EncodedFile",
    "Source",
    "opened",
    "refuse_larger",
    "source_of",
]

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


_OTHER_MODE = "which the dataset hands on as it is, and only RGB is known to come out the same"


class EncodedFile:
    """An image as the file that it came from.

    Args:
        data: the file's bytes.
        name: of the file, for messages.
        modes: of Pillow's, which the file has to have one of: the dataset hands the image on as it
            is. None of them: any will do.
    """

    def __init__(self, data: bytes, name: str = "", *, modes: Sequence[str] = ()) -> None:
        self.data = data
        self.name = name
        self.modes = modes

    @property
    def format(self) -> str:
        """Pillow's name of the format, a key of `SUFFIXES`.

        Raises:
            ValueError: it is none of `FORMATS`.
        """
        return str(opened(self.data, FORMATS).format)

    @property
    def pixels(self) -> int:
        """Width times height, as its header says.

        Raises:
            ValueError: it cannot be opened.
        """
        width, height = opened(self.data, FORMATS).size
        return int(width * height)

    def decode(self, most_pixels: int | None = None) -> Any:
        """The PIL image of mode RGB that torchvision's default loader makes of it: not turned.

        Args:
            most_pixels: of an image that is decoded at all; None: as many as Pillow decodes.

        Raises:
            ValueError: it cannot be decoded, or has more pixels.
        """
        image = opened(self.data, FORMATS)
        refuse_larger(image, most_pixels)
        return self._decoded(image)

    def check(self) -> None:
        """Nothing if it can be decoded to its end; of a JPEG faster than decoding it.

        Raises:
            ValueError: it cannot.
        """
        image = opened(self.data, FORMATS)
        image.draft("RGB", (1, 1))  # all of the data is read, and an eighth of each side is made
        self._decoded(image)

    def _decoded(self, image: Any) -> Any:
        if self.modes and image.mode not in self.modes:
            raise ValueError(f"it is of mode {image.mode}, {_OTHER_MODE}")
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


def refuse_larger(image: Any, most_pixels: int | None) -> None:
    """Nothing if the header of ``image`` says no more pixels than these; None are any.

    Raises:
        ValueError: it says more; none has been decoded.
    """
    width, height = image.size
    if most_pixels is not None and width * height > most_pixels:
        raise ValueError(f"it has {width} x {height} pixels, and it may have {most_pixels} at most")


class Source(ABC):
    """The encoded files of a dataset, by index."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def encoded(self, index: int) -> EncodedFile:
        """The file of sample ``index``, read from where it is."""

    @abstractmethod
    def image(self, index: int) -> Any:
        """The PIL image of mode RGB that the dataset itself loads for sample ``index``.

        Raises:
            BaseException: what the dataset raises, of the same type and text.
            BackendUnavailable: it is of another mode, and the dataset hands it on so.
        """

    @abstractmethod
    def target(self, index: int) -> Any:
        """What sample ``index`` has beside its image; nothing is decoded for it."""

    @property
    @abstractmethod
    def user_code(self) -> bool:
        """Whether `target` or `sample` run code of the user's."""

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
    return read_nested(dataset, _read_one, part=_Part, row=_Row)


def _read_one(dataset: Any) -> Source | str:
    return _Own(dataset) if is_own(dataset) else _folder_of(dataset)


def _folder_of(dataset: Any) -> Source | str:
    name = type(dataset).__name__
    unknown = f"{name} is not known to decode files; give it the methods {_OWN}"
    try:
        from torchvision import get_image_backend
        from torchvision.datasets.folder import default_loader, pil_loader

        files = files_of(dataset)
    except ImportError:
        return unknown
    if files is None:
        return unknown
    loader = getattr(dataset, files.loader, None)
    if loader is not None and (
        loader not in (default_loader, pil_loader) or get_image_backend() != "PIL"
    ):
        loads = getattr(loader, "__name__", repr(loader))
        return (
            f"{name} loads files by {loads} (image backend {get_image_backend()!r}), and what is "
            "known is torchvision's default loader with Pillow; use that one, or give the dataset "
            f"the methods {_OWN}"
        )
    obstacle = files.obstacle(dataset) or _joint_obstacle(dataset, files)
    if obstacle is not None:
        return f"{name}: {obstacle}"
    return _Known(dataset, files, loader)


def _joint_obstacle(dataset: Any, files: Files) -> str | None:
    from torchvision.datasets.vision import StandardTransform

    if not files.joint or not dataset.transforms or type(dataset.transforms) is StandardTransform:
        return None
    return (
        "its transforms= is applied to image and target at once; give what is for the image as "
        "transform=, and what is for the target as target_transform="
    )


class _Known(Source):
    """One of torchvision's datasets.

    Args:
        dataset: the user's.
        files: how it finds its samples.
        loader: what loads a file; None: Pillow, by the file's name.
    """

    def __init__(self, dataset: Any, files: Files, loader: Callable[[Any], Any] | None) -> None:
        self._dataset = dataset
        self._files = files
        self._loader = loader
        self._as_it_is = files.as_it_is and loader is None
        self._last: tuple[Any, tuple[str, ...]] | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def encoded(self, index: int) -> EncodedFile:
        return _read(self._files.path(self._dataset, index), modes=self._modes())

    def image(self, index: int) -> Any:
        path = self._files.path(self._dataset, index)
        if self._loader is not None:
            return self._loader(path)
        from PIL import Image

        with Image.open(path) as image:
            made, modes = image.convert("RGB"), self._modes()
            if modes and image.mode not in modes:
                first = "put v2.RGB() in front of the transform, or " * (image.mode == "L")
                raise BackendUnavailable(
                    f"{os.fspath(path)} is an image of mode {image.mode}, {_OTHER_MODE}; {first}"
                    "use backend='prefetch'"
                )
            return made

    def target(self, index: int) -> Any:
        target, change = self._files.target(self._dataset, index), self._of("target_transform")
        return target if change is None else change(target)

    @property
    def user_code(self) -> bool:
        return self._of("target_transform") is not None

    def transform(self, index: int) -> Callable[[Any], Any] | None:
        found: Callable[[Any], Any] | None = self._of("transform")
        return found

    @property
    def transforms(self) -> list[Any]:
        return [self._of("transform")]

    def sample(self, index: int, image: Any) -> Any:
        return image, self.target(index)

    def _modes(self) -> tuple[str, ...]:
        """Those of which the transform makes the same as of the image in RGB."""
        if not self._as_it_is:
            return ()
        transform = self._of("transform")
        if self._last is None or self._last[0] is not transform:
            first = next(iter(read(transform)), None)
            colours = first is not None and first.torchvision == "RGB"
            self._last = transform, ("RGB", "L") if colours else ("RGB",)
        return self._last[1]

    def _of(self, name: str) -> Any:
        holder = self._dataset.transforms if self._files.joint else self._dataset
        return getattr(holder, name, None)


class _Own(Source):
    """A dataset that says itself what its files are."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def encoded(self, index: int) -> EncodedFile:
        return self._file(index, self._dataset.encoded(index))

    def _file(self, index: int, found: Any) -> EncodedFile:
        if isinstance(found, (str, os.PathLike)):
            return _read(found)
        if isinstance(found, (bytes, bytearray, memoryview)):
            return EncodedFile(bytes(found))
        raise CacheError(
            f"{type(self._dataset).__name__}.encoded({index}) gives {type(found).__name__}; it "
            "must give the bytes of an encoded file, or its path"
        )

    def image(self, index: int) -> Any:
        from PIL import Image

        found = self._dataset.encoded(index)
        if not isinstance(found, (str, os.PathLike)):
            found = io.BytesIO(self._file(index, found).data)
        with Image.open(found, formats=FORMATS) as image:
            return image.convert("RGB")

    def target(self, index: int) -> Any:
        return self._dataset.target(index)

    @property
    def user_code(self) -> bool:
        return True

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

    def image(self, index: int) -> Any:
        return self._source.image(self._indices[index])

    @property
    def user_code(self) -> bool:
        return self._source.user_code

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

    def image(self, index: int) -> Any:
        source, inner = self._at(index)
        return source.image(inner)

    @property
    def user_code(self) -> bool:
        return any(source.user_code for source in self._sources)

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
        if index < 0:
            index += len(self)
        number = bisect_right(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return self._sources[number], index - before


def _read(path: str | os.PathLike[str], *, modes: Sequence[str] = ()) -> EncodedFile:
    return EncodedFile(Path(path).read_bytes(), os.fspath(path), modes=modes)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
