"""An image as the encoded file that it came from, and what may be opened at all."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FORMATS", "EncodedFile", "opened", "refuse_larger"]

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded, by Pillow's names: no format that runs another program, as EPS does."""


@dataclass(frozen=True)
class EncodedFile:
    """An image as the file that it came from."""

    data: bytes

    @property
    def pixels(self) -> int:
        """Width times height, as its header says.

        Raises:
            ValueError: it cannot be opened.
        """
        width, height = opened(self.data, FORMATS).size
        return int(width * height)

    def check(self) -> None:
        """Nothing if it can be decoded to its end; of a JPEG faster than decoding it.

        Raises:
            ValueError: it cannot.
        """
        image = opened(self.data, FORMATS)
        image.draft("RGB", (1, 1))  # all of the data is read, and an eighth of each side is made
        try:
            image.convert("RGB")
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


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
