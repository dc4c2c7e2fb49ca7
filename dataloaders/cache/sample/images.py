"""How the images of a cache are kept: raw, encoded anew, or packed as the dataset's own files.

images="jpeg"                        every column of PIL images
images=Encoded("jpeg", max_side=512) the same, at a bounded size
images={"image": "jpeg"}             this column; the others raw
images="packed"                      the dataset's files, byte for byte
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dataloaders.errors import OptionError
from dataloaders.options import option

_FORMATS = ("jpeg", "png", "webp")
_QUALITY = 90
_LARGEST_SIDE = 65535


@dataclass(frozen=True)
class Encoded:
    """Store PIL images as files of this format, encoded when a cache is built.

    "jpeg" is lossy: samples are similar to the dataset's, not equal, and colours have half the
    resolution of brightness, as in photos. "png" and "webp" are lossless, unless ``max_side``
    shrinks an image.

    Attributes:
        format: "jpeg", "png" or "webp" (lossless).
        quality: the quality of JPEG, 1 to 100; None: 90.
        max_side: pixels. An image whose longer side has more is resized to it (Lanczos, same
            proportions) before it is encoded. None: images keep their size. Boxes and masks of the
            sample are not changed.

    Raises:
        OptionError: an option has a value that it cannot take.
    """

    format: Literal["jpeg", "png", "webp"]
    quality: int | None = None
    max_side: int | None = None

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise OptionError(f"{option('images', self)}: format must be 'jpeg', 'png' or 'webp'")
        if self.format == "jpeg":
            quality = _QUALITY if self.quality is None else self.quality
            object.__setattr__(self, "quality", quality)
            if type(quality) is not int or not 1 <= quality <= 100:
                raise OptionError(f"{option('quality', quality)}: it must be an int from 1 to 100")
        elif self.quality is not None:
            raise OptionError(
                f"{option('quality', self.quality)} of {self.format!r}: {self.format} is "
                "stored without loss and has no quality; leave it out, or use 'jpeg'"
            )
        if self.max_side is not None and (
            type(self.max_side) is not int or not 1 <= self.max_side <= _LARGEST_SIDE
        ):
            raise OptionError(
                f"{option('max_side', self.max_side)}: it must be None or a whole number of "
                f"pixels from 1 to {_LARGEST_SIDE}"
            )

    def __str__(self) -> str:
        parts: list[str] = [self.format]
        if self.quality is not None:
            parts.append(f"quality {self.quality}")
        if self.max_side is not None:
            parts.append(f"max_side {self.max_side}")
        return ", ".join(parts)


Choice: TypeAlias = (
    "Literal['raw', 'jpeg', 'png', 'webp', 'packed'] | Encoded | Mapping[str, str | Encoded] | None"
)
"""What a user gives as ``images=``."""


@dataclass(frozen=True)
class Images:
    """What ``images=`` comes to.

    Attributes:
        packed: whether the dataset's own files are kept.
        columns: how columns of PIL images are encoded, by name; "" is every column.
    """

    packed: bool = False
    columns: tuple[tuple[str, Encoded], ...] = ()

    @classmethod
    def of(cls, choice: Choice) -> Images:
        """Return what ``choice`` stands for; None is raw; OptionError: it is not a known one."""
        if choice is None or choice == "packed":
            return cls(packed=choice is not None)
        if not isinstance(choice, Mapping):
            choice = {"": choice}
        elif wrong := [name for name in choice if type(name) is not str or not name]:
            raise OptionError(f"images={{{wrong[0]!r}: ...}}: give the name of a column")
        columns = {name: _one(name, choice[name]) for name in sorted(choice)}
        return cls(columns=tuple((name, how) for name, how in columns.items() if how))

    @classmethod
    def like(cls, text: object) -> Images:
        """Return images with the same ``rows`` as those of a file with this in its fingerprint."""
        is_raw = text in ("raw", "packed") or type(text) is not str
        return cls(text == "packed", () if is_raw else (("", Encoded("png")),))

    @property
    def rows(self) -> Literal["any", "images", "files"]:
        """What rows consist of: PIL images where the dataset has some, its files, or anything."""
        if self.packed:
            return "files"
        return "images" if self.columns else "any"

    def of_column(self, name: str) -> Encoded | None:
        """Return how the images of this column are encoded; None: raw."""
        found = dict(self.columns)
        return found.get(name, found.get(""))

    def __str__(self) -> str:
        texts = [f"{name}: {how}" if name else str(how) for name, how in self.columns]
        return "packed" if self.packed else "; ".join(texts) or "raw"


def _one(name: str, choice: Any) -> Encoded | None:
    if choice == "raw":
        return None
    if isinstance(choice, str) and choice in _FORMATS:
        return Encoded(choice)  # type: ignore[arg-type]
    if not isinstance(choice, Encoded):
        given = {name: choice} if name else choice
        raise OptionError(
            f"{option('images', given)}: it must be 'raw', 'jpeg', 'png', 'webp', Encoded(...), "
            "a dict of these by column, or 'packed'"
        )
    return choice
