"""What a value of a sample may take in memory, where whoever opens a file says so."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from dataloaders.cache.format.disk import size_of
from dataloaders.cache.format.entries import ColumnEntry
from dataloaders.cache.printable import shown
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.errors import CacheError

_BYTES_PER_PIXEL = 4  # as Pillow has colours in memory
_MEMORY_PER_BYTE = {"json": 64, "str": 4}  # of what the file has: of JSON, ``[],`` is a list


def limited(entry: ColumnEntry, largest: int | None) -> ColumnEntry:
    """Return ``entry`` with no row of more than ``largest`` bytes in memory; None: as it is.

    Raises:
        CacheError: the file says that it has larger ones.
    """
    if largest is None:
        return entry
    width = np.dtype(entry.dtype).itemsize
    width *= max((_MEMORY_PER_BYTE.get(kind, 1) for kind, _ in entry.variants), default=1)
    values = entry.most_values if entry.shape is None else math.prod(entry.shape)
    says = max(width * (values or 0), _BYTES_PER_PIXEL * (entry.most_pixels or 0))
    if says > largest:
        raise CacheError(
            f"column {shown(entry.name)} has values that take {size_of(says)} in memory, and "
            f"largest={largest} allows {size_of(largest)}; give more if you trust the file"
        )
    if values is None:
        entry = replace(entry, most_values=largest // width)
    if entry.most_pixels is None and any(is_encoded(kind) for kind, _ in entry.variants):
        entry = replace(entry, most_pixels=largest // _BYTES_PER_PIXEL)
    return entry
