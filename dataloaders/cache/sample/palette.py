"""PIL images of mode P as PNG files, with the very palette; and back again.

    <PIL P 500x375, 256 colours> ──> PNG ──> the same indices, palette and transparency

A PNG file has at least one colour, indices of no more bits than its colours need, and alpha apart
from them. An image for which this is not the whole truth (no palette, indices beyond it, colours
with alpha) is written with 256 colours, and its text ``palette`` says which there really are:
``RGB 0``, ``RGB 21``, ``RGBA 16``. Anybody else who reads the file sees the right colours.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

PALETTE = "encoded:PNG:P"
"""The kind of their leaves."""

_MOST = 256  # colours
_TEXT = "palette"

Contents = tuple[tuple[int, int], bytes, str, bytes, Any]
"""Size, indices, the palette's mode and colours, and ``info["transparency"]`` or None."""


def contents(image: Any) -> Contents:
    """All that is kept of an image of mode P."""
    image.load()
    mode = image.palette.mode if image.palette else "RGB"  # a PNG file may lack it
    colours = bytes(image.getpalette(mode) or ())
    return image.size, image.tobytes(), mode, colours, image.info.get("transparency")


def files(kept: Contents) -> Iterator[bytes]:
    """PNG files that may give an image with these contents back, the best one first.

    Raises:
        OSError, ValueError: Pillow cannot write it.
    """
    from PIL.PngImagePlugin import PngInfo

    size, indices, mode, colours, transparency = kept
    if mode == "RGB" and colours:
        yield _saved(size, indices, colours, transparency)
    if mode not in ("RGB", "RGBA"):
        return
    count = len(colours) // len(mode)
    if mode == "RGBA":
        planes = [colours[band::4] for band in range(4)]
        colours = bytes(value for colour in zip(*planes[:3], strict=True) for value in colour)
        transparency = planes[3].ljust(_MOST, b"\xff") if transparency is None else transparency
    said = PngInfo()
    said.add_text(_TEXT, f"{mode} {count}")
    yield _saved(size, indices, colours.ljust(3 * _MOST, b"\0"), transparency, pnginfo=said)


def _saved(
    size: tuple[int, int], indices: bytes, colours: bytes, transparency: Any, **options: Any
) -> bytes:
    from PIL import Image

    # Made anew, so that nothing else gets into the file.
    image = Image.frombytes("P", size, indices)
    image.putpalette(colours)
    if transparency is not None:
        image.info["transparency"] = transparency
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def restored(image: Any) -> Any:
    """``image``, decoded from such a file and nobody else's, as it was before.

    Raises:
        ValueError: what its text says cannot be.
    """
    said, transparency = image.info.get(_TEXT), image.info.get("transparency")
    image.info = {}
    if said is not None:
        mode, _, number = said.partition(" ")
        colours = bytes(image.getpalette())
        counts = {str(count): count for count in range(len(colours) // 3 + 1)}
        if mode not in ("RGB", "RGBA") or number not in counts:
            raise ValueError("what it says of its palette cannot be")
        count = counts[number]
        if mode == "RGBA":
            alpha = _alpha(transparency)
            colours = b"".join(
                colours[3 * place : 3 * place + 3] + alpha[place : place + 1]
                for place in range(count)
            )
            transparency = None
        image.putpalette(colours[: count * len(mode)], mode)
        image.load()
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def _alpha(transparency: int | bytes | None) -> bytes:
    """Of each of 256 colours, as Pillow has what a PNG file says of it."""
    if transparency is None:
        return b"\xff" * _MOST
    if isinstance(transparency, int):
        transparency = b"\xff" * transparency + b"\0"
    return transparency.ljust(_MOST, b"\xff")
