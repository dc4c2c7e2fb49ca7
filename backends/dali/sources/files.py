"""Datasets of encoded files: as they are where DALI decodes them as Pillow does, else decoded here.

files.Source ────bytes──> peek ── plain ─────────────────────────> Image
                           └─ anything else ──Pillow──> as_file ──> Image, or Failed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dataloaders.datasets.files import Source as EncodedFiles

from ..header import peek
from ..odd import as_file
from .source import Failed, Found, Image, Source

__all__ = ["FileSource"]


class FileSource(Source):
    """The files of a dataset with one transform."""

    kind = "encoded"

    def __init__(self, files: EncodedFiles) -> None:
        self._files = files

    @property
    def transform(self) -> Any:
        """See `Source`."""
        return self._files.transforms[0]

    @property
    def user_code(self) -> bool:
        """See `Source`."""
        return self._files.user_code

    def __len__(self) -> int:
        return len(self._files)

    def image(self, index: Any, *, decode: bool = False) -> Found:
        """See `Source`."""
        name = ""
        try:
            file = self._files.encoded(index)
            name = file.name
            found = None if decode else plain(file.data, name, modes=file.modes)
            del file
        except Exception:
            found = None  # what the dataset's own way raises counts
        return found or decoded(lambda: self._files.image(index), name)

    def sample(self, index: Any, image: Any) -> Any:
        """See `Source`."""
        return self._files.sample(index, image)


def plain(data: bytes, name: str, *, modes: Sequence[str] = ()) -> Image | None:
    """This file for DALI to decode; None if Pillow has to.

    Args:
        data: the whole file.
        name: of the file.
        modes: of which the file has to have one; none of them: any will do.
    """
    header = peek(data)
    if header is None or not header.plain or (modes and header.mode not in modes):
        return None
    if header.height * header.width > _most_pixels():
        return None
    pixels = np.frombuffer(data, np.uint8)
    return Image(pixels, header.height, header.width, name, header.format)


def decoded(load: Any, name: str) -> Found:
    """What Pillow makes of a file, as a file that DALI reads.

    Args:
        load: gives a PIL image of mode RGB, or raises what the dataset raises.
        name: of the file.
    """
    try:
        image = load()
        return Image(as_file(image), image.height, image.width, name, "PPM")
    except Exception as error:
        return Failed(error, name or str(getattr(error, "filename", None) or ""))


def _most_pixels() -> float:
    """Of larger ones Pillow warns, or it refuses them."""
    from PIL import Image as Pillow

    return float("inf") if Pillow.MAX_IMAGE_PIXELS is None else Pillow.MAX_IMAGE_PIXELS
