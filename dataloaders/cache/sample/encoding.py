"""Encode the images of a row as files of a format, in a worker, before the row is written.

    Leaf("image:RGB", uint8 (3, 480, 640))
        ──max_side──> smaller ──Pillow──> Leaf("encoded:JPEG:RGB", uint8 (41_337,))
    Leaf("encoded:PNG:P", uint8 (2_345,))       as it is, or smaller

An image is made of the leaf's own pixels, so that a file holds nothing else: no EXIF, no colour
profile, no time. The same pixels give the same bytes in every process.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from dataloaders.cache.sample.decode import KEPT
from dataloaders.cache.sample.images import Encoded, Images
from dataloaders.cache.sample.leaf import Leaf, leaf_of, value_of
from dataloaders.cache.sample.sample import Structure, column_names
from dataloaders.errors import CacheError
from dataloaders.options import option

_LONGEST_SIDE = {"JPEG": 65500, "PNG": 2**31 - 1, "WEBP": 16383}


def images_encoded(
    images: Images, index: int, structure: Structure, leaves: list[Leaf]
) -> list[Leaf]:
    """Return the leaves of sample ``index``, with its images encoded as ``images`` says.

    Raises:
        CacheError: an image cannot be kept so; the message names it, and what to do.
    """
    if images.rows != "images":
        return leaves
    made = []
    for name, leaf in zip(column_names(structure), leaves, strict=True):
        how = images.of_column(name)
        try:
            made.append(encoded(leaf, how) if how and leaf.is_image else leaf)
        except CacheError as error:
            raise CacheError(
                f"sample {index} cannot be kept: column {name!r} is {error}"
            ) from error
    return made


def encoded(leaf: Leaf, how: Encoded) -> Leaf:
    """Return the leaf of an image, encoded; CacheError: this format cannot keep it."""
    from PIL import Image

    name, mode = how.format.upper(), leaf.kind.rpartition(":")[2]
    image = value_of(leaf.kind, leaf.values)
    width, height = image.size
    which = f"an image of mode {mode!r}, {width} x {height} pixels, which {how.format} cannot keep"
    if mode not in KEPT[name]:
        others = [other.lower() for other, modes in KEPT.items() if mode in modes]
        rest = f"; {' and '.join(others)} can" if others else ""
        # RGB would change what a palette's indices, such as those of a mask, mean.
        convert = "Name" if mode == "P" else 'Call .convert("RGB") in the dataset, or name'
        raise CacheError(
            f"{which}{rest}. {convert} the columns to encode and leave this one out: "
            'images={"image": ...}'
        )
    if 0 in image.size:
        raise CacheError(
            f"{which}: it is empty. Leave it out, {option('on_error', 'skip')}, or keep images raw"
        )
    longest, limit = max(image.size), Image.MAX_IMAGE_PIXELS
    if how.max_side is not None and longest > how.max_side:
        width, height = (max(1, round(side * how.max_side / longest)) for side in image.size)
    if max(width, height) > _LONGEST_SIDE[name] or (limit and width * height > 2 * limit):
        raise CacheError(f"{which}: it is too large. Give max_side, or keep images raw")
    is_smaller = image.size != (width, height)
    if mode == "P":  # Pillow takes the nearest pixel, since there are none in between
        return leaf_of(image.resize((width, height)), "it") if is_smaller else leaf
    file = io.BytesIO()
    try:
        if is_smaller:
            image = image.resize((width, height), Image.Resampling.LANCZOS)
        image.save(file, name, **_options(how))  # as WebP, L and LA become RGB and RGBA
    except (OSError, ValueError, MemoryError, SystemError) as error:
        raise CacheError(f"{which}: {type(error).__name__}: {error}") from error
    values = np.frombuffer(file.getvalue(), "|u1")
    return Leaf(f"encoded:{name}:{mode}", values, width * height)


def _options(how: Encoded) -> dict[str, Any]:
    if how.format == "webp":
        return {"lossless": True, "exact": True}  # the colours of pixels that cannot be seen, too
    return {} if how.format == "png" else {"quality": how.quality}
