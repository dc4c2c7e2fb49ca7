"""PIL images of mode P as PNG files, with the very palette; and back again.

    <PIL P 500x375, 256 colours> ──> PNG ──> the same indices, palette and transparency

A PNG file has at least one colour, and indices of no more bits than its colours need. So the file
has 256, and its text ``palette`` says how many there really are: ``RGB 21``. Other readers see the
right colours.
"""

from __future__ import annotations

import io
import re
from typing import Any

PALETTE = "encoded:PNG:P"
"""The kind of their leaves."""

_MOST = 256  # colours
_TEXT = "palette"


def contents(image: Any) -> tuple[Any, ...]:
    """Return all that is kept of an image of mode P.

    Its size, indices, the mode and the colours of its palette, ``info["transparency"]`` or None.
    """
    image.load()
    mode = image.palette.mode if image.palette else "RGB"  # a PNG file may lack it
    colours = bytes(image.getpalette(mode) or ())
    return image.size, image.tobytes(), mode, colours, image.info.get("transparency")


def file_of(image: Any) -> bytes:
    """Return a PNG file from which exactly ``image``, of mode P, comes back.

    Raises:
        OSError, ValueError: PNG cannot give its palette and transparency back.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    if 0 in image.size:
        raise ValueError("it has no pixels")
    size, indices, _, colours, transparency = kept = contents(image)
    made = Image.frombytes("P", size, indices)  # anew, so that nothing else gets into the file
    made.putpalette(colours.ljust(3 * _MOST, b"\0"))
    if transparency is not None:
        made.info["transparency"] = transparency
    count, file = PngInfo(), io.BytesIO()
    count.add_text(_TEXT, f"RGB {len(colours) // 3}")
    made.save(file, "PNG", pnginfo=count)
    again = Image.open(file)
    if again.mode != "P" or contents(restored(again)) != kept:
        raise ValueError("PNG does not give its palette and transparency back")
    return file.getvalue()


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
        count = re.fullmatch("RGB (0|[1-9][0-9]{0,2})", said)
        if count is None or 3 * int(count[1]) > len(colours):
            raise ValueError("what it says of its palette cannot be")
        image.putpalette(colours[: 3 * int(count[1])])
        image.load()
    return image
