"""The images of a row, encoded as files of a format: in a worker, before the row is written.

    Cell("image:RGB", uint8 (3, 480, 640))
        ──max_side──> smaller ──Pillow──> Cell("encoded:JPEG:RGB", uint8 (41_337,))
    Cell("encoded:PNG:P", uint8 (2_345,))       as it is, or smaller: see palette.py

An image is made of the cell's own pixels, so that a file holds nothing else: no EXIF, no colour
profile, no time. The same pixels give the same bytes, whoever encodes them.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from dataloaders.cache.sample.decode import KEPT
from dataloaders.cache.sample.images import Encoded, Images
from dataloaders.cache.sample.palette import PALETTE
from dataloaders.cache.sample.sample import Cell, Structure, cell_of, column_names, leaf_of
from dataloaders.errors import CacheError

__all__ = ["Encoder", "encoded"]

_LONGEST_SIDE = {"JPEG": 65500, "PNG": 2**31 - 1, "WEBP": 16383}
# What a format has no mode for, and what keeps its pixels.
_SAVED_AS = {("WEBP", "L"): "RGB", ("WEBP", "LA"): "RGBA"}


class Encoder:
    """Encodes the images of rows as `Images` says."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self._structure: Structure | None = None
        self._how: list[Encoded | None] = []

    def cells(self, index: int, structure: Structure, cells: list[Cell]) -> list[Cell]:
        """The cells of sample ``index``, the images among them encoded.

        Raises:
            CacheError: an image cannot be kept so; the message names it, and what to do.
        """
        if self._images.rows != "images":
            return cells
        if structure != self._structure:
            self._names = column_names(structure)
            self._how = [self._images.of_column(name) for name in self._names]
            self._structure = structure
        found = []
        for name, how, cell in zip(self._names, self._how, cells, strict=True):
            if how is None or not cell.is_image:
                found.append(cell)
                continue
            try:
                found.append(encoded(cell, how))
            except CacheError as error:
                raise CacheError(
                    f"sample {index} cannot be kept: column {name!r} is {error}"
                ) from error
        return found


def encoded(cell: Cell, how: Encoded) -> Cell:
    """An image's cell, encoded.

    Raises:
        CacheError: this format cannot keep it.
    """
    from PIL import Image

    name, mode = how.format.upper(), cell.kind.rpartition(":")[2]
    palette = leaf_of(cell.kind, cell.values) if cell.kind == PALETTE else None
    width, height = palette.size if palette is not None else cell.values.shape[:0:-1]
    told = f"an image of mode {mode!r}, {width} x {height} pixels, which {how.format} cannot keep"
    if mode not in KEPT[name]:
        others = [other.lower() for other, modes in KEPT.items() if mode in modes]
        rest = f"; {' and '.join(others)} can" if others else ""
        # Of a palette's indices, those of a mask, RGB would change what they mean.
        convert = 'Call .convert("RGB") in the dataset, or name' if palette is None else "Name"
        raise CacheError(
            f"{told}{rest}. {convert} the columns to encode and leave this one out: "
            'images={"image": ...}'
        )
    if 0 in (height, width):
        raise CacheError(
            f'{told}: it is empty. Leave it out (on_error="skip", --skip), or keep images raw'
        )
    width, height = _size(width, height, how.max_side)
    limit = Image.MAX_IMAGE_PIXELS
    if max(width, height) > _LONGEST_SIDE[name] or (limit and width * height > 2 * limit):
        raise CacheError(f"{told}: it is too large. Give max_side, or keep images raw")
    if palette is not None:  # Pillow takes the nearest pixel, since there are none in between
        smaller = (width, height) != palette.size
        return cell_of(palette.resize((width, height)), "it") if smaller else cell
    try:
        image = leaf_of(cell.kind, cell.values)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.LANCZOS)
        data = _saved(image.convert(_SAVED_AS.get((name, mode), mode)), name, how)
    except (OSError, ValueError, MemoryError, SystemError) as error:
        raise CacheError(f"{told}: {type(error).__name__}: {error}") from error
    return Cell(f"encoded:{name}:{mode}", np.frombuffer(data, "|u1"), width * height)


def _size(width: int, height: int, max_side: int | None) -> tuple[int, int]:
    longest = max(width, height)
    if max_side is None or longest <= max_side:
        return width, height
    return max(1, round(width * max_side / longest)), max(1, round(height * max_side / longest))


def _saved(image: Any, name: str, how: Encoded) -> bytes:
    file = io.BytesIO()
    if name == "JPEG":
        image.save(file, name, quality=how.quality)
    elif name == "WEBP":
        # exact: the colours of pixels that cannot be seen are kept too.
        image.save(file, name, lossless=True, exact=True)
    else:
        image.save(file, name)
    return file.getvalue()
