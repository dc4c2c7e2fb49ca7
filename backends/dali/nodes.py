"""Which steps of a chain DALI does, and how each of them becomes a node of its graph.

    Primitive ──node_for──> Node, or why there is none
                            ├─ inputs, values    what each sample has of its own, as DALI takes it
                            └─ build             the operators of DALI, given those as inputs

A sample that a step leaves out (`Action.where`) gets numbers that change nothing: the graph is the
same for every batch. Where DALI computes something else than torchvision does, there is a node
only if its name is among ``fast``. DALI is imported when a graph is built, not here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Action, Primitive, Sizes
from dataloaders.transforms.primitives.erasing import Erase
from dataloaders.transforms.primitives.geometry import (
    Crop,
    HorizontalFlip,
    Pad,
    Resize,
    VerticalFlip,
)

__all__ = [
    "FAST",
    "Form",
    "Images",
    "Input",
    "Maker",
    "Node",
    "Values",
    "Window",
    "node_for",
    "operator_of",
    "own_or",
    "taken",
]

Images: TypeAlias = Any
"""A ``DataNode`` of DALI's: uint8 images [H, W, C] of a batch, or what each of them has."""

Form: TypeAlias = str
"""What an image would be in torchvision's hands: "pil", "bytes" (a uint8 tensor) or "floats"."""

Maker: TypeAlias = "Callable[[Any, Form, str, Collection[str]], Node | str]"
"""(primitive, form, device, fast) -> its node, or why there is none."""

Values: TypeAlias = Mapping[str, npt.NDArray[Any]]

FAST = {
    "blur": "1 level",
    "equalize": "levels are spread in another way: most are off, by up to 20",
    "hue": "turned in another colour space: mostly a few levels, strong colours up to 130 off",
    "perspective": "1 level, in few of 10,000 (DALI 2.0: in 6 of 100), or the pixel beside it",
    "resize": "99 % of levels within 1 of torchvision's, single ones up to 19 off",
    "turn": "nearest: 2 pixels of 1,000 are those beside them; bilinear: 5 levels of 1,000 1 off",
}
"""Names of operators of DALI that compute something else than torchvision, and how far off."""


@dataclass(frozen=True)
class Input:
    """What a node is given for each sample.

    Attributes:
        name: among the inputs of its node.
        dtype: of the numbers: int32, uint8 or float32.
        ndim: 0 for one number a sample, 1 for several.
    """

    name: str
    dtype: type[np.generic] = np.int32
    ndim: int = 0


@dataclass(frozen=True)
class Node(ABC):
    """How DALI does a primitive.

    Attributes:
        primitive: what is done.
        exact: "exact" if its pixels are torchvision's; else how far they are off, in words.
        inputs: what it is given for each sample.
    """

    primitive: Primitive
    exact: str = "exact"
    inputs: ClassVar[tuple[Input, ...]] = ()

    @abstractmethod
    def values(self, action: Action, sizes: Sizes) -> Values:
        """An array [n, ...] for each of its inputs, contiguous; moves ``sizes`` on."""

    @abstractmethod
    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """The images after this step; called while a pipeline of DALI is being defined.

        Args:
            images: of a batch.
            given: for each of its inputs.
            channels: of the images, 1 or 3.
        """

    def used(self, channels: int) -> tuple[Input, ...]:
        """Those of its inputs that `build` makes use of, given so many channels."""
        return self.inputs

    def channels_of(self, channels: int) -> int:
        """How many channels images have then that had so many before."""
        return channels


@dataclass(frozen=True)
class Window(Node):
    """A part of the image, and what lies around it.

    Attributes:
        fill: the levels outside of the image: one, or one a channel.
    """

    fill: tuple[int, ...] = (0,)
    inputs: ClassVar[tuple[Input, ...]] = (
        Input("anchor", np.int32, 1),
        Input("shape", np.int32, 1),
    )

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        top, left, height, width = self._part(action.numbers, sizes)
        top, left = own_or(action, top, 0), own_or(action, left, 0)
        height = own_or(action, height, sizes.height)
        width = own_or(action, width, sizes.width)
        sizes.become(height, width)
        return {
            "anchor": np.stack((top, left), 1).astype(np.int32),
            "shape": np.stack((height, width), 1).astype(np.int32),
        }

    def _part(self, numbers: Values, sizes: Sizes) -> Sequence[npt.NDArray[Any]]:
        return [numbers[name] for name in Crop.numbers]

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn

        return fn.slice(
            images,
            start=given["anchor"],
            shape=given["shape"],
            axis_names="HW",
            out_of_bounds_policy="pad",
            fill_values=list(self.fill),
        )


@dataclass(frozen=True)
class Bordered(Window):
    """So many pixels more on each side."""

    def _part(self, numbers: Values, sizes: Sizes) -> Sequence[npt.NDArray[Any]]:
        left, top, right, bottom = (numbers[name] for name in Pad.numbers)
        return [-top, -left, sizes.height + top + bottom, sizes.width + left + right]


@dataclass(frozen=True)
class Flip(Node):
    """Mirrored, those samples that are."""

    inputs: ClassVar[tuple[Input, ...]] = (Input("flipped"),)

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        return {"flipped": taken(action, len(sizes)).astype(np.int32)}

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn

        upright = isinstance(self.primitive, HorizontalFlip)
        along = {"horizontal": given["flipped"]} if upright else {"vertical": given["flipped"]}
        # An argument that is left out is 1 for the one and 0 for the other.
        return fn.flip(images, **{"horizontal": 0, "vertical": 0, **along})


@dataclass(frozen=True)
class Erased(Node):
    """A box of one colour; an empty box for who is left out.

    Attributes:
        levels: of the box: one, or one a channel.
    """

    levels: tuple[int, ...] = (0,)
    inputs: ClassVar[tuple[Input, ...]] = (
        Input("anchor", np.float32, 1),
        Input("shape", np.float32, 1),
    )

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        top, left, height, width = (own_or(action, action.numbers[n], 0) for n in Crop.numbers)
        return {
            "anchor": np.stack((top, left), 1).astype(np.float32),
            "shape": np.stack((height, width), 1).astype(np.float32),
        }

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn

        return fn.erase(
            images,
            anchor=given["anchor"],
            shape=given["shape"],
            axis_names="HW",
            fill_value=list(map(float, self.levels)),
        )


@dataclass(frozen=True)
class Resized(Node):
    """Another size, by one of DALI's filters.

    Attributes:
        filter: its name among DALI's ``INTERP_...``.
        antialias: whether the filter grows where an image shrinks.
    """

    filter: str = "TRIANGULAR"
    antialias: bool = True
    inputs: ClassVar[tuple[Input, ...]] = (Input("size", np.float32, 1),)

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        height = own_or(action, action.numbers["height"], sizes.height)
        width = own_or(action, action.numbers["width"], sizes.width)
        sizes.become(height, width)
        return {"size": np.stack((height, width), 1).astype(np.float32)}

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn, types

        return fn.resize(
            images,
            size=given["size"],
            interp_type=getattr(types, f"INTERP_{self.filter}"),
            antialias=self.antialias,
        )


def node_for(
    primitive: Primitive, *, form: Form, device: str, fast: Collection[str] = ()
) -> Node | str:
    """The node that does ``primitive``; or, in words, why DALI does not do it.

    Args:
        primitive: a step of a chain.
        form: what an image would be at this place of the chain.
        device: "cpu" or "cuda": where DALI's operators run.
        fast: names out of `FAST`: operators that may do what they do otherwise than torchvision.
    """
    if form == "floats":
        return "images are floats at this place, and DALI is given bytes"
    from . import colour_nodes, turn_nodes  # which need this file

    kind = type(primitive)
    maker = (_MAKERS | colour_nodes.MAKERS | turn_nodes.MAKERS).get(kind)
    if maker is None:
        return f"{kind.__name__} is not among what DALI does as torchvision does it"
    return maker(primitive, form, device, fast)


_FILTERS = {"bilinear": "TRIANGULAR", "bicubic": "CUBIC", "lanczos": "LANCZOS3"}


def _resize(primitive: Any, form: Form, device: str, fast: Collection[str]) -> Node | str:
    mode = primitive.interpolation
    smooth = form == "pil" or bool(primitive.antialias)
    if device == "cpu":
        return (
            "on the CPU DALI's filters take longer than Pillow's and torch's, and differ from them "
            "by up to 19 levels"
        )
    if form == "bytes" and mode == "bilinear" and not smooth:
        return Resized(primitive, "1 level", "LINEAR", antialias=False)
    if mode not in _FILTERS or not smooth:
        filtered = mode if smooth else f"{mode} without antialias"
        return f"DALI has no filter that is torchvision's {filtered}"
    if "resize" not in fast:
        return f"DALI's filters are not torchvision's: {FAST['resize']}; allow them by fast="
    return Resized(primitive, FAST["resize"], _FILTERS[mode])


def _pad(primitive: Any, form: Form, device: str, fast: Collection[str]) -> Node | str:
    if primitive.mode != "constant":
        return f"DALI has no border that is torchvision's padding_mode={primitive.mode!r}"
    fill = primitive.fill if isinstance(primitive.fill, tuple) else (primitive.fill or 0,)
    if not all(isinstance(level, (int, float)) and level in range(256) for level in fill):
        return f"fill={primitive.fill!r} is no level of a byte"
    return Bordered(primitive, fill=tuple(map(int, fill)))


def _erase(primitive: Any, form: Form, device: str, fast: Collection[str]) -> Node | str:
    if device == "cpu" and form == "bytes":
        return "torchvision does it in less time on the CPU, and as exactly"
    if not all(0 <= level < 256 for level in primitive.levels):
        return f"value={primitive.levels!r} is no level of a byte"
    return Erased(primitive, levels=tuple(map(int, primitive.levels)))


_MAKERS: dict[type[Primitive], Maker] = {
    Erase: _erase,
    Crop: lambda primitive, *_: Window(primitive),
    Pad: _pad,
    HorizontalFlip: lambda primitive, *_: Flip(primitive),
    VerticalFlip: lambda primitive, *_: Flip(primitive),
    Resize: _resize,
}


def operator_of(name: str) -> Callable[..., Images]:
    """An operator of DALI's, from where this version of it has it."""
    from nvidia.dali import fn

    found: Callable[..., Images] = getattr(fn, name, None) or getattr(fn.experimental, name)
    return found


def taken(action: Action, count: int) -> npt.NDArray[np.bool_]:
    """For each sample whether the action is done to it."""
    return np.ones(count, np.bool_) if action.where is None else action.where


def own_or(action: Action, value: npt.NDArray[Any], neutral: Any) -> npt.NDArray[Any]:
    """``value`` for the samples that take the action, ``neutral`` for the others."""
    return value if action.where is None else np.where(action.where, value, neutral)
