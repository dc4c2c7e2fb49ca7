"""torchvision's crops, flips and resizes, v1 and v2, read as operators that draw for a whole batch.

    read(Compose) ──> members ──operator_of──> Operator, or why it is none

They draw what torchvision does for the same state of torch's generator, to the bit. All other
random transforms are left to torchvision, sample by sample.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.transforms.actions import (
    Action,
    Crop,
    HorizontalFlip,
    Operator,
    Primitive,
    Resize,
    SampleError,
    Sizes,
    VerticalFlip,
)
from dataloaders.transforms.draws import Draws, between
from dataloaders.transforms.kinds import changed_by_hand
from dataloaders.transforms.read import Member, read

__all__ = ["Chain", "NotRead", "chain_of", "operator_of"]

_ATTEMPTS = 10
_Ints: TypeAlias = npt.NDArray[np.int64]


class NotRead(Exception):
    """Options that are not drawn for a batch; a proof finds those that torchvision refuses."""


@dataclass(frozen=True)
class Chain:
    """A chain of transforms, as far as it could be read from its beginning.

    Attributes:
        members: those that were read.
        operators: one for each.
        rest: the members from the first one on that could not be read.
        why: why that one could not; None if there is no rest.
    """

    members: tuple[Member, ...]
    operators: tuple[Operator, ...]
    rest: tuple[Member, ...] = ()
    why: str | None = None


def chain_of(transform: Any) -> Chain:
    """Read ``transform`` member by member."""
    members = read(transform) if transform is not None else ()
    operators: list[Operator] = []
    for position, member in enumerate(members):
        found = operator_of(member)
        if isinstance(found, str):
            return Chain(members[:position], tuple(operators), members[position:], found)
        operators.append(found)
    return Chain(members, tuple(operators))


def operator_of(member: Member) -> Operator | str:
    """Return the operator that stands for ``member``, or say why there is none."""
    name = member.torchvision
    if name is None:
        changed = changed_by_hand(member.transform)
        return "it is code of your own" if changed is None else f"{changed}, and may do anything"
    make = _OPERATORS.get(name)
    if make is None:
        return "only torchvision's crops, flips, resizes and conversions to tensors are"
    try:
        found = make(member.transform, ".v2" in type(member.transform).__module__)
    except (NotRead, RuntimeError, TypeError, ValueError) as error:
        return f"not with its options ({error})"
    return found if not found.random else _drawn_elsewhere() or found


def _drawn_elsewhere() -> str | None:
    """Say why torchvision draws other numbers than with torch's own settings, if it does."""
    if torch.get_default_dtype() is not torch.float32:
        return (
            f"torch.set_default_dtype({torch.get_default_dtype()}) makes torchvision draw numbers "
            "of that type; the numbers of torch.float32 are read, so leave the default as it is"
        )
    if torch.get_default_device().type != "cpu":
        return (
            f"torch.set_default_device({str(torch.get_default_device())!r}) makes torchvision draw "
            "from that device's generator; the CPU's is read, so set the default for the model only"
        )
    return None


class _Resize(Operator):
    """Resize to a pair of sides, to a shorter side, or to a longer one."""

    def __init__(self, transform: Any, v2: bool) -> None:
        size = transform.size
        self._size = [size] if isinstance(size, int) else size
        self._longest = transform.max_size
        self._resize = Resize(v2, _mode_of(transform.interpolation), transform.antialias)
        self.primitives = (self._resize,)

    def draw(self, draws: Draws, sizes: Sizes) -> list[Action]:
        """See `Operator`."""
        from torchvision.transforms.functional import _compute_resized_output_size as resized

        sides = zip(sizes.height.tolist(), sizes.width.tolist(), strict=True)
        try:
            made = [resized(side, self._size, self._longest, True) for side in sides]
        except ValueError as error:
            raise SampleError(str(error)) from error
        return [_resized(self._resize, sizes, *np.array(made, np.int64).reshape(-1, 2).T)]


class _CenterCrop(Operator):
    """The middle; with zeros around it where the image is smaller."""

    def __init__(self, transform: Any, v2: bool) -> None:
        self._size = _pair_of(transform.size)
        self.primitives = (Crop(v2),)

    def draw(self, draws: Draws, sizes: Sizes) -> list[Action]:
        """See `Operator`."""
        height, width = self._size
        top, left = _middle(sizes.height - height), _middle(sizes.width - width)
        return [_cropped(self.primitives[0], sizes, top, left, height, width)]


def _middle(room: _Ints) -> _Ints:
    return np.where(room < 0, -(-room // 2), np.rint(room / 2.0).astype(np.int64))


class _RandomCrop(Operator):
    """A window of ``size`` that may reach into a border of zeros: `Crop` gives zeros there."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._v2 = v2
        self._size = _pair_of(transform.size)
        self._if_needed = bool(transform.pad_if_needed)
        self._padding = _padding_of(transform.padding, v2)
        left, top, right, bottom = self._padding
        if transform.padding is not None or self._if_needed:
            fill = transform.fill
            zero = fill is None or (isinstance(fill, (int, float)) and fill == 0)
            if transform.padding_mode != "constant" or not zero:
                raise NotRead("only borders of zeros are read")
        # torchvision's crop of a tensor must reach into it.
        height, width = self._size
        if min(self._padding) < 0 or max(left, right) >= width or max(top, bottom) >= height:
            raise NotRead("only a padding from 0 to below size is read")
        self.primitives = (Crop(v2),)

    def draw(self, draws: Draws, sizes: Sizes) -> list[Action]:
        """See `Operator`."""
        left, top, right, bottom = self._padding
        row, down = self._side(sizes.height, top, bottom, self._size[0])
        column, across = self._side(sizes.width, left, right, self._size[1])
        if (down < 0).any() or (across < 0).any():
            raise SampleError(f"a crop of {self._size} is larger than an image")
        tall, wide = down > 0, across > 0
        if not self._v2:
            tall = wide = tall | wide
        row = row + np.where(tall, draws.randint(down + 1, tall), 0)
        column = column + np.where(wide, draws.randint(across + 1, wide), 0)
        return [_cropped(self.primitives[0], sizes, row, column, *self._size)]

    def _side(self, side: _Ints, before: int, after: int, wanted: int) -> tuple[_Ints, _Ints]:
        """Return the first position of a window, and how many further ones there are."""
        room = side + before + after - wanted
        lacking = np.maximum(-room, 0) if self._if_needed else np.zeros_like(side)
        return -before - lacking, room + 2 * lacking  # torchvision adds as much on both sides


class _RandomResizedCrop(Operator):
    """A window of random area and shape, tried up to ten times, resized to ``size``.

    words ahead  a0 r0 a1 r1 a2 r2 ...      area and shape of each attempt
                       └ the first that fits: top and left are the two words after it
    """

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._size = _pair_of(transform.size)
        self._scale, self._ratio = _range_of(transform.scale), _range_of(transform.ratio)
        if self._ratio[0] == 0:
            raise NotRead("only ratios above 0 are read")
        # In float32, as torchvision takes it.
        self._log_ratio = torch.log(torch.tensor(transform.ratio)).tolist()
        resize = Resize(v2, _mode_of(transform.interpolation), transform.antialias)
        self.primitives = (Crop(v2), resize)

    def draw(self, draws: Draws, sizes: Sizes) -> list[Action]:
        """See `Operator`."""
        height, width = sizes.height, sizes.width
        words = draws.ahead(2 * _ATTEMPTS + 2)
        scale = between(words[:, 0 : 2 * _ATTEMPTS : 2], *self._scale)
        logarithm = between(words[:, 1 : 2 * _ATTEMPTS : 2], *self._log_ratio)
        shape = torch.exp(torch.from_numpy(logarithm)).numpy().astype(np.float64)
        area = (height * width).astype(np.float64)[:, None] * scale
        tried_w = np.rint(np.sqrt(area * shape)).astype(np.int64)
        tried_h = np.rint(np.sqrt(area / shape)).astype(np.int64)
        fits = (tried_w > 0) & (tried_w <= width[:, None])
        fits &= (tried_h > 0) & (tried_h <= height[:, None])
        rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
        found = fits[rows, first]
        h, w = tried_h[rows, first], tried_w[rows, first]
        after = 2 * first + 2
        top = words[rows, after].astype(np.int64) % np.maximum(height - h + 1, 1)
        left = words[rows, after + 1].astype(np.int64) % np.maximum(width - w + 1, 1)
        draws.skip(np.where(found, after + 2, 2 * _ATTEMPTS))
        for sample in np.flatnonzero(~found).tolist():
            central = _central(int(height[sample]), int(width[sample]), self._ratio)
            top[sample], left[sample], h[sample], w[sample] = central
        if (h < 1).any() or (w < 1).any():
            raise SampleError("a window has no pixels")
        crop, resize = self.primitives
        return [_cropped(crop, sizes, top, left, h, w), _resized(resize, sizes, *self._size)]


def _central(height: int, width: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return the largest window in the middle whose shape is allowed: if no attempt fits."""
    h, w = height, width
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return (height - h) // 2, (width - w) // 2, h, w


class _Flip(Operator):
    """A mirror image with probability ``p``."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._probability = float(transform.p)
        upright = type(transform).__name__ == "RandomVerticalFlip"
        self.primitives = (VerticalFlip(v2) if upright else HorizontalFlip(v2),)

    def draw(self, draws: Draws, sizes: Sizes) -> list[Action]:
        """See `Operator`."""
        return [Action(self.primitives[0], {}, draws.below(self._probability))]


@dataclass(frozen=True)
class _Called(Primitive):
    """A deterministic member's own call."""

    transform: Any = None

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return self.transform(value)


class _Fixed(Operator):
    """A member that draws nothing and changes no size: ToTensor, Normalize and the like."""

    def __init__(self, transform: Any, v2: bool) -> None:
        self.primitives = (_Called(v2, transform),)

    def draw(self, draws: Draws, sizes: Sizes) -> list[Action]:
        """See `Operator`."""
        return [Action(self.primitives[0])]


_OPERATORS: dict[str, Callable[[Any, bool], Operator]] = {
    "CenterCrop": _CenterCrop,
    "RandomCrop": _RandomCrop,
    "RandomHorizontalFlip": _Flip,
    "RandomResizedCrop": _RandomResizedCrop,
    "RandomVerticalFlip": _Flip,
    "Resize": _Resize,
    **dict.fromkeys(
        (
            "ConvertImageDtype", "Grayscale", "Identity", "Normalize", "PILToTensor", "RGB",
            "ToDtype", "ToImage", "ToPureTensor", "ToTensor",
        ),
        _Fixed,
    ),
}  # fmt: skip


def _cropped(
    crop: Primitive, sizes: Sizes, top: _Ints, left: _Ints, height: Any, width: Any
) -> Action:
    sizes.become(height, width)
    window = {"top": top, "left": left, "height": sizes.height, "width": sizes.width}
    return Action(crop, window)


def _resized(resize: Primitive, sizes: Sizes, height: Any, width: Any) -> Action:
    if np.less(height, 1).any() or np.less(width, 1).any():
        raise SampleError("an image would have no pixels")
    sizes.become(height, width)
    return Action(resize, {"height": sizes.height, "width": sizes.width})


def _pair_of(size: Sequence[Any]) -> tuple[int, int]:
    """Return (height, width)."""
    height, width = map(operator.index, size)
    if height < 1 or width < 1:
        raise NotRead("only sizes of at least 1 x 1 are read")
    return height, width


def _range_of(values: Sequence[Any]) -> tuple[float, float]:
    low, high = map(float, values)
    if not 0 <= low <= high < float("inf"):
        raise NotRead("only ranges (low, high) not below 0 are read")
    return low, high


def _padding_of(padding: Any, v2: bool) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of the numbers that RandomCrop keeps."""
    sides = list(padding) if isinstance(padding, (list, tuple)) else [padding or 0]
    first, second, third, last = (list(map(operator.index, sides)) * 4)[:4]
    return (first, third, second, last) if v2 else (first, second, third, last)


def _mode_of(interpolation: Any) -> str:
    """Return torchvision's name of an interpolation, such as "bilinear", given in any way."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import _interpolation_modes_from_int

    if isinstance(interpolation, int):
        interpolation = _interpolation_modes_from_int(interpolation)
    return str(InterpolationMode(interpolation).value)
