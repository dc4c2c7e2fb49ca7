"""PIL images of mode P as PNG files, with the very palette; and back again.

    <PIL P 500x375, 256 colours> ──> PNG ──> the same indices, palette and transparency

A PNG file has at least one colour, and indices of no more bits than its colours need. An image of
fewer colours than its indices ask for is written with 256, and its text ``palette`` says how many
there really are: ``RGB 21``. Other readers of the file see the right colours.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

PALETTE = "encoded:PNG:P"
"""The kind of their leaves."""

_MOST = 256  # colours
_TEXT = "palette"


class Contents(NamedTuple):
    """All that is kept of an image of mode P."""

    size: tuple[int, int]
    indices: bytes
    mode: str  # of the palette
    colours: bytes
    transparency: Any  # ``info["transparency"]``, or None


def contents(image: Any) -> Contents:
    """Return what is kept of an image of mode P."""
    image.load()
    mode = image.palette.mode if image.palette else "RGB"  # a PNG file may lack it
    colours = bytes(image.getpalette(mode) or ())
    return Contents(image.size, image.tobytes(), mode, colours, image.info.get("transparency"))


def file_of(image: Any) -> bytes:
    """Return a PNG file from which exactly ``image``, of mode P, comes back.

    Raises:
        OSError, ValueError: PNG cannot give its palette and transparency back.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    if 0 in image.size:
        raise ValueError("it has no pixels")
    kept = contents(image)
    count = PngInfo()
    count.add_text(_TEXT, f"RGB {len(kept.colours) // 3}")
    padded = kept.colours.ljust(3 * _MOST, b"\0")
    for colours, options in ((kept.colours, {}), (padded, {"pnginfo": count})):
        # Made anew, so that nothing else gets into the file.
        made = Image.frombytes("P", kept.size, kept.indices)
        made.putpalette(colours)
        if kept.transparency is not None:
            made.info["transparency"] = kept.transparency
        file = io.BytesIO()
        made.save(file, "PNG", **options)
        again = Image.open(file)
        if kept.mode == "RGB" and again.mode == "P" and contents(restored(again)) == kept:
            return file.getvalue()
    raise ValueError("PNG does not give its palette and transparency back")


def restored(image: Any) -> Any:
    """Return ``image``, decoded from a file that `file_of` made, as it was before.

    Raises:
        ValueError: its text is not one that is written.
    """
    image.load()  # texts may stand after the pixels
    said, transparency = image.info.get(_TEXT), image.info.get("transparency")
    image.info = {} if transparency is None else {"transparency": transparency}
    if said is not None:
        colours = bytes(image.getpalette())
        counts = {f"RGB {count}": count for count in range(len(colours) // 3 + 1)}
        if said not in counts:
            raise ValueError("what it says of its palette cannot be")
        image.putpalette(colours[: 3 * counts[said]])
        image.load()
    return image
