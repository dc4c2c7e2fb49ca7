"""PIL images of mode P as PNG files, with the very indices, palette and transparency."""

from __future__ import annotations

import io
from typing import Any

__all__ = ["PALETTE", "Contents", "contents", "png_of"]

PALETTE = "encoded:PNG:P"
"""The kind of their cells."""

Contents = tuple[tuple[int, int], bytes, str, bytes, Any]
"""Size, indices, the palette's mode and colours, and ``info["transparency"]`` or None."""


def contents(image: Any) -> Contents:
    """All that is kept of an image of mode P."""
    image.load()
    mode = image.palette.mode if image.palette else "RGB"  # a PNG file may lack it
    colours = bytes(image.getpalette(mode) or ())
    return image.size, image.tobytes(), mode, colours, image.info.get("transparency")


def png_of(kept: Contents) -> bytes:
    """A PNG file of an image with these contents and of nothing else; it may lack some of them.

    Raises:
        OSError, ValueError: Pillow cannot write it.
    """
    from PIL import Image

    size, indices, mode, colours, transparency = kept
    image = Image.frombytes("P", size, indices)
    image.putpalette(colours, mode)
    if transparency is not None:
        image.info["transparency"] = transparency
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
