"""Say how `precompute` compresses columns."""

from __future__ import annotations

from dataclasses import dataclass

from dataloaders.cache.codecs import LEVELS
from dataloaders.errors import OptionError

__all__ = ["Compressed", "compressed_of"]


@dataclass(frozen=True)
class Compressed:
    """Compress columns that are large enough with ``codec``.

    Attributes:
        codec: "zstd": smaller and faster; "gzip": reads and builds without further packages.
        level: 1 to 22 for zstd, 1 to 9 for gzip. Higher is smaller and slower to build, but not
            slower to read. None: 3 and 4.

    Raises:
        OptionError: an option has a value that it cannot take.
    """

    codec: str = "zstd"
    level: int | None = None

    def __post_init__(self) -> None:
        if self.codec not in LEVELS:
            known = " or ".join(map(repr, LEVELS))
            raise OptionError(f"compress={self.codec!r}: it must be None, {known}")
        levels, usual = LEVELS[self.codec]
        if type(self.chosen_level) is not int or self.chosen_level not in levels:
            raise OptionError(
                f"Compressed({self.codec!r}, level={self.level!r}): the level must be an int from "
                f"{levels[0]} to {levels[-1]}, or None for {usual}"
            )

    @classmethod
    def like(cls, told: object) -> Compressed | None:
        """Return what this text of a fingerprint stands for; None: not compressed."""
        codec, _, level = str(told).partition(", level ")
        return cls(codec, int(level)) if codec in LEVELS and level.isdecimal() else None

    @property
    def chosen_level(self) -> int:
        """The level, also where none was given."""
        return LEVELS[self.codec][1] if self.level is None else self.level

    def __str__(self) -> str:
        return f"{self.codec}, level {self.chosen_level}"


def compressed_of(compress: str | Compressed | None) -> Compressed | None:
    """What ``compress=`` stands for.

    Raises:
        OptionError: it is no codec.
    """
    if compress is None or isinstance(compress, Compressed):
        return compress
    if not isinstance(compress, str):
        raise OptionError(
            f"compress={compress!r}: it must be None, a codec's name, or Compressed(codec, level)"
        )
    return Compressed(compress)
