"""Cells that hold an encoded image, and how they become PIL images again.

    encoded:PNG:RGBA   bytes of a PNG file   ──Pillow, PNG only──> mode RGBA
    file:RGB           bytes of any file     ──Pillow──> convert("RGB"), as torchvision's loader

The bytes may come from anybody. Only the format that the kind names is tried, its size is held
against the most that the index says, and against Pillow's limit, before pixels are made, and
whatever goes wrong is one kind of error.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from dataloaders.encoded import EncodedFile, opened, refuse_larger

__all__ = ["KEPT", "decoded", "decoded_file", "is_encoded"]

KEPT: dict[str, dict[str, tuple[str, ...]]] = {
    "JPEG": {"L": ("L",), "RGB": ("RGB",), "CMYK": ("CMYK",)},
    "PNG": {
        "1": ("1",),
        "L": ("L",),
        "LA": ("LA",),
        "RGB": ("RGB",),
        "RGBA": ("RGBA",),
        "I;16": ("I;16", "I"),  # the second one in older versions of Pillow
    },
    # WebP knows colours only, and leaves out an alpha channel that is opaque everywhere.
    "WEBP": {"L": ("RGB",), "LA": ("RGBA", "RGB"), "RGB": ("RGB",), "RGBA": ("RGBA", "RGB")},
}
"""Formats, the modes that each keeps, and the modes that such a file then opens in."""


def is_encoded(kind: str) -> bool:
    """Whether a cell of this kind holds the bytes of an encoded image, as in a file."""
    family, _, detail = kind.partition(":")
    if family == "encoded":
        name, _, mode = detail.partition(":")
        return mode in KEPT.get(name, ())
    return kind == "file:RGB"


def decoded(detail: str, values: npt.NDArray[Any], most_pixels: int | None = None) -> Any:
    """The image of a cell of kind ``encoded:<detail>``, of ``most_pixels`` unless that is None.

    Raises:
        KeyError, ValueError: it is none.
        ImportError: Pillow is not installed.
    """
    name, _, mode = detail.partition(":")
    modes = KEPT[name][mode]
    image = opened(_bytes(values), (name,))
    if image.format != name or image.mode not in modes:
        raise ValueError(f"it is a {image.format} of mode {image.mode}")
    refuse_larger(image, most_pixels)
    try:
        # As other images of a cache: pixels only, and no class of a file's format.
        made = image.convert(mode)
    except Exception as error:  # of bytes that anybody may have written: any of Pillow's
        raise ValueError(f"it cannot be decoded ({type(error).__name__}: {error})") from error
    made.info = {}
    return made


def decoded_file(detail: str, values: npt.NDArray[Any], most_pixels: int | None = None) -> Any:
    """The image of a cell of kind ``file:<detail>``, of ``most_pixels`` unless that is None.

    Raises:
        KeyError, ValueError: it is none.
        ImportError: Pillow is not installed.
    """
    if detail != "RGB":
        raise KeyError(detail)
    return EncodedFile(_bytes(values)).decode(most_pixels)


def _bytes(values: npt.NDArray[Any]) -> bytes:
    if values.ndim != 1 or values.dtype.str != "|u1":
        raise ValueError("not bytes")
    return values.tobytes()
