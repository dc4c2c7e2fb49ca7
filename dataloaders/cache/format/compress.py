"""Say how `precompute` compresses columns, and which of them are worth it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dataloaders.cache.format.entries import LARGEST_ROW, ColumnEntry, Extent, Packing
from dataloaders.cache.sample.decode import is_encoded
from dataloaders.errors import OptionError
from dataloaders.options import option

_LEVELS = {"zstd": (range(1, 23), 3), "gzip": (range(1, 10), 4)}  # those that are, the usual one
_LEAST = 1 << 16  # bytes of a column that is worth compressing
_LEAST_ROW = 64  # bytes of its mean row: reading one label would decode thousands
_PIECE = 1 << 16  # bytes; where all rows have one shape, a larger one is a piece by itself


@dataclass(frozen=True)
class Compressed:
    """Compress columns that are large enough with ``codec``.

    Attributes:
        codec: "zstd": smaller and faster; "gzip": reads and builds without further packages.
        level: 1 to 22 for zstd, 1 to 9 for gzip. Higher is smaller and slower to build, but not
            slower to read. None: 3 and 4.
    """

    codec: str = "zstd"
    level: int | None = None

    def __post_init__(self) -> None:
        if self.codec not in tuple(_LEVELS):  # it may be anything
            known = " or ".join(map(repr, _LEVELS))
            raise OptionError(f"{option('compress', self.codec)}: it must be None, {known}")
        levels, usual = _LEVELS[self.codec]
        if type(self.chosen_level) is not int or self.chosen_level not in levels:
            raise OptionError(
                f"{option('level', self.level)} of {self.codec!r}: it must be an int from "
                f"{levels[0]} to {levels[-1]}, or None for {usual}"
            )

    @classmethod
    def like(cls, text: object) -> Compressed | None:
        """Return what this text of a fingerprint stands for; None: not compressed."""
        known = (cls(codec, level) for codec, (levels, _) in _LEVELS.items() for level in levels)
        return next((each for each in known if str(each) == text), None)

    @property
    def chosen_level(self) -> int:
        """The level, also where none was given."""
        return _LEVELS[self.codec][1] if self.level is None else self.level

    def applied(self, entry: ColumnEntry, rows: int) -> ColumnEntry:
        """Return ``entry`` of a file of so many rows, compressed if that is worth it."""
        width, size = np.dtype(entry.dtype).itemsize, entry.values.size
        largest = entry.largest_row or 0
        is_small = size * width < max(_LEAST, rows * _LEAST_ROW)
        is_done = any(is_encoded(kind) for kind, _ in entry.variants)
        if is_small or is_done or largest * width > LARGEST_ROW:
            return entry
        piece = min(size, _PIECE // width)
        if entry.shape is not None:
            piece = largest * min(rows, max(1, _PIECE // (largest * width)))
        packing = Packing(self.codec, piece, Extent(0, 2 * -(-size // piece)))
        return replace(entry, packing=packing)

    def __str__(self) -> str:
        return f"{self.codec}, level {self.chosen_level}"
