"""Leaves that hold an encoded image, and how they become PIL images again.

    encoded:PNG:RGBA   bytes of a PNG file   ──Pillow, PNG only──> mode RGBA
    encoded:PNG:P      the same              ──Pillow, palette.py──> mode P, with its palette
    file:RGB           bytes of any file     ──Pillow──> convert("RGB"), as torchvision's loader

The bytes are not trusted. Only the format that the kind names is tried, its size is held
against the most that the index says, and against Pillow's limit, before pixels are made, and
whatever goes wrong is one kind of error.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from dataloaders.cache.sample.palette import restored

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded, by Pillow's names: no format that runs another program, as EPS does."""

_TILE_WIDTH, _TILE_LENGTH = 322, 323  # tags of a TIFF file

KEPT: dict[str, dict[str, tuple[str, ...]]] = {
    "JPEG": {"L": ("L",), "RGB": ("RGB",), "CMYK": ("CMYK",)},
    "PNG": {
        "1": ("1",),
        "L": ("L",),
        "LA": ("LA",),
        "RGB": ("RGB",),
        "RGBA": ("RGBA",),
        "I;16": ("I;16", "I"),  # the second one in older versions of Pillow
        "P": ("P",),
    },
    # WebP knows colours only, and leaves out an alpha channel that is opaque everywhere.
    "WEBP": {"L": ("RGB",), "LA": ("RGBA", "RGB"), "RGB": ("RGB",), "RGBA": ("RGBA", "RGB")},
}
"""Formats, the modes that each keeps, and the modes that such a file then opens in."""


def is_encoded(kind: str) -> bool:
    """Return whether a leaf of this kind holds the bytes of an encoded image, as in a file."""
    family, _, detail = kind.partition(":")
    if family == "encoded":
        name, _, mode = detail.partition(":")
        return mode in KEPT.get(name, ())
    return kind == "file:RGB"


def decoded(kind: str, values: npt.NDArray[Any], most_pixels: int | None = None) -> Any:
    """Return the PIL image of a leaf of this kind, in memory of its own.

    Args:
        kind: of the leaf, for which `is_encoded` is true.
        values: of the leaf, bytes.
        most_pixels: that it may have; None: as many as Pillow decodes.

    Raises:
        ValueError: it is none, or has more pixels.
        ImportError: Pillow is not installed.
    """
    family, _, detail = kind.partition(":")
    name, _, mode = detail.rpartition(":")
    image = _opened(values.tobytes(), FORMATS if family == "file" else (name,))
    if family == "encoded" and (image.format != name or image.mode not in KEPT[name][mode]):
        raise ValueError(f"it is a {image.format} of mode {image.mode}")
    if most_pixels is not None and (pixels := _pixels_of(image)) > most_pixels:
        raise ValueError(f"it has {pixels} pixels, and it may have {most_pixels} at most")
    made = _converted(image, mode)
    if mode == "P":
        return restored(made)
    if family == "encoded":
        made.info = {}  # as other images of a cache: pixels only
    return made


def _converted(image: Any, mode: str) -> Any:
    try:
        return image.convert(mode)
    except Exception as error:  # of untrusted bytes: any of Pillow's
        raise ValueError(f"it cannot be decoded ({type(error).__name__}: {error})") from error


@dataclass(frozen=True)
class EncodedFile:
    """An image as the file that it came from."""

    data: bytes

    @property
    def pixels(self) -> int:
        """The pixels for which decoding takes memory, as its header says.

        Raises:
            ValueError: it cannot be opened.
        """
        return _pixels_of(_opened(self.data, FORMATS))

    def check(self) -> None:
        """Check that it can be decoded to its end; of a JPEG this is faster than decoding it.

        Raises:
            ValueError: it cannot.
        """
        image = _opened(self.data, FORMATS)
        image.draft("RGB", (1, 1))  # all of the data is read, and an eighth of each side is made
        _converted(image, "RGB")


def _pixels_of(image: Any) -> int:
    """Return width times height; of a TIFF file with larger tiles, those of a tile.

    libtiff allocates a whole tile, however small the image is.

    Raises:
        ValueError: the tiles have no size.
    """
    width, height = image.size
    tags = getattr(image, "tag_v2", {})
    tile = tags.get(_TILE_WIDTH, 0), tags.get(_TILE_LENGTH, 0)
    if any(type(side) is not int for side in tile):
        raise ValueError("its tiles have no size")
    return int(max(width * height, tile[0] * tile[1]))


def _opened(data: bytes, formats: Sequence[str]) -> Any:
    """Open a PIL image of one of these formats, without decoding its pixels.

    Raises:
        ValueError: it is of another one, damaged, or larger than Pillow allows.
        ImportError: Pillow is not installed.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=tuple(formats))
    except UnidentifiedImageError as error:
        raise ValueError(f"it is no file of format {', '.join(formats)}") from error
    except Exception as error:  # of untrusted bytes: any of Pillow's
        raise ValueError(f"it cannot be opened ({type(error).__name__}: {error})") from error
