"""Steps that change levels and colours, as nodes of DALI's graph: Pillow's arithmetic, to the bit.

    Brightness Contrast Saturation Grayscale    a blend with black, the mean grey, each pixel's own
    Sharpness                                   a blend with a mean of 3 x 3 pixels
    Invert Posterize Solarize                   bits of each level
    Autocontrast                                from the lowest and highest level of a channel
    GaussianBlur Hue Equalize                   DALI's own operators, if asked for

Pillow blends in float32 and cuts the rest off: ``grey + factor * (level - grey)``. A grey level is
(19595 R + 38470 G + 7471 B + 32768) // 65536. DALI's own operators for these round otherwise and
weigh otherwise; its arithmetic does what it is told.

Only for a device: on the CPU Pillow takes a tenth to a half of the time of such arithmetic. (Of
Invert and Posterize it takes less where some samples only take them, or where it has more to do.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dataloaders.transforms.actions import Action, Primitive, Sizes
from dataloaders.transforms.primitives.colour import (
    Autocontrast,
    Brightness,
    Contrast,
    Equalize,
    GaussianBlur,
    Grayscale,
    Hue,
    Invert,
    Posterize,
    Saturation,
    Sharpness,
    Solarize,
)

from .nodes import FAST, Form, Images, Input, Maker, Node, Values, operator_of, own_or, taken

__all__ = ["MAKERS"]


@dataclass(frozen=True)
class Blend(Node):
    """Each level moved away from black, ``factor`` times as far; a factor of 1 changes nothing."""

    inputs: ClassVar[tuple[Input, ...]] = (Input("factor", np.float32),)

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        return {"factor": own_or(action, action.numbers["factor"], 1.0).astype(np.float32)}

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn, types
        from nvidia.dali.math import clamp, floor

        start, factor = self.start(images, given, channels), given["factor"]
        blended = images * factor if start is None else start + factor * (images - start)
        return fn.cast(clamp(floor(blended), 0.0, 255.0), dtype=types.UINT8)

    def start(self, images: Images, given: Mapping[str, Images], channels: int) -> Images | None:
        """What a factor of 0 gives, as float32; None: black."""
        return None


@dataclass(frozen=True)
class BlendWithMean(Blend):
    """Away from the mean grey level of the image."""

    def start(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Blend`."""
        from nvidia.dali import fn, types

        grey = _grey(images, channels)
        # In whole numbers: a mean of exactly a half must not depend on the order of a sum.
        total = fn.reductions.sum(grey, axes=[0, 1, 2], dtype=types.INT64)
        shape = images.shape(dtype=types.INT64)
        pixels = shape[0] * shape[1]
        return fn.cast((2 * total + pixels) // (2 * pixels), dtype=types.FLOAT)


@dataclass(frozen=True)
class BlendWithGrey(Blend):
    """Away from each pixel's own grey level."""

    def start(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Blend`."""
        from nvidia.dali import fn, types

        return fn.cast(_grey(images, channels), dtype=types.FLOAT)


@dataclass(frozen=True)
class Grey(BlendWithGrey):
    """Grey; three channels of a grey image if that is asked for."""

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        return {"factor": np.where(taken(action, len(sizes)), 0, 1).astype(np.float32)}

    def used(self, channels: int) -> tuple[Input, ...]:
        """See `Node`."""
        return self.inputs if channels == 3 else ()

    def channels_of(self, channels: int) -> int:
        """See `Node`."""
        wanted: int | None = getattr(self.primitive, "channels", None)
        return channels if wanted is None else wanted

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn

        if channels == 3:
            return super().build(images, given, channels)
        return images if self.channels_of(channels) == 1 else fn.cat(*[images] * 3, axis=2)


@dataclass(frozen=True)
class BlendWithSmooth(Blend):
    """Away from the smoothed image, whose outermost pixels are the image's own."""

    inputs: ClassVar[tuple[Input, ...]] = (
        *Blend.inputs,
        Input("anchor", np.float32, 1),
        Input("shape", np.float32, 1),
    )

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        # Of an image with less than three rows or columns nothing is inside.
        inside = np.maximum(np.stack((sizes.height, sizes.width), 1) - 2, 0)
        own = {"anchor": np.minimum(inside, 1), "shape": inside}
        return {
            **super().values(action, sizes),
            **{n: a.astype(np.float32) for n, a in own.items()},
        }

    def start(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Blend`."""
        from nvidia.dali import fn, types
        from nvidia.dali.math import floor

        around = types.Constant(
            np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32), device=images.device
        )
        # Whole numbers; no thirteenth of one is near enough to a half to be rounded otherwise.
        total = operator_of("filter")(images, around, dtype=types.FLOAT, border="clamp")
        smooth = floor(total * (1.0 / 13.0) + 0.5)
        edge = fn.erase(
            images[:, :, 0:1] * types.Constant(0, types.UINT8) + types.Constant(1, types.UINT8),
            anchor=given["anchor"],
            shape=given["shape"],
            axis_names="HW",
            fill_value=[0.0],
        )
        return smooth + edge * (images - smooth)


@dataclass(frozen=True)
class Stretched(Node):
    """Each channel from its darkest to its lightest level, as Pillow computes it in float64."""

    inputs: ClassVar[tuple[Input, ...]] = (Input("taken", np.float32),)

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        return {"taken": taken(action, len(sizes)).astype(np.float32)}

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn, types
        from nvidia.dali.math import clamp, floor

        low, high = (
            fn.cast(extreme(images, axes=[0, 1], keep_dims=True), dtype=types.FLOAT64)
            for extreme in (fn.reductions.min, fn.reductions.max)
        )
        done = fn.cast((high > low) * given["taken"], dtype=types.FLOAT64)
        span = (high - low) * done + (1.0 - done) * 255.0
        scale = types.Constant(255.0, types.FLOAT64) / span
        offset = -low * scale * done
        values = floor(clamp(images * scale + offset, 0.0, 255.0))
        return fn.cast(values, dtype=types.UINT8)


@dataclass(frozen=True)
class Equalized(Node):
    """DALI's equalize, which spreads levels by shares, where Pillow counts in whole steps."""

    inputs: ClassVar[tuple[Input, ...]] = (Input("kept", np.uint8),)

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        return {"kept": np.where(taken(action, len(sizes)), 0, 1).astype(np.uint8)}

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import types

        done = operator_of("equalize")(images)
        kept = given["kept"]
        return images * kept + done * (types.Constant(1, types.UINT8) - kept)


@dataclass(frozen=True)
class Bits(Node):
    """Bits of each level kept, or turned over."""

    inputs: ClassVar[tuple[Input, ...]] = (Input("bits", np.uint8),)

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        if isinstance(self.primitive, Invert):
            return {"bits": np.where(taken(action, len(sizes)), 255, 0).astype(np.uint8)}
        cut = 8 - own_or(action, action.numbers["bits"], 8)
        return {"bits": (256 - 2**cut).astype(np.uint8)}

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        if isinstance(self.primitive, Invert):
            return images ^ given["bits"]
        return images & given["bits"]


@dataclass(frozen=True)
class Solarized(Node):
    """Levels from ``threshold`` on turned over."""

    inputs: ClassVar[tuple[Input, ...]] = (Input("threshold"),)

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        threshold = action.numbers["threshold"]
        if isinstance(self.primitive, Solarize) and self.primitive.share:
            threshold = 255.0 * threshold
        # A level is at least a threshold if it is at least the next whole number.
        whole = np.ceil(own_or(action, threshold, 256)).clip(0, 256)
        return {"threshold": whole.astype(np.int32)}

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn, types

        over = (images >= given["threshold"]) * types.Constant(255, types.UINT8)
        return images ^ fn.cast(over, dtype=types.UINT8)


@dataclass(frozen=True)
class Blurred(Node):
    """A Gaussian blur; so narrow a one that it changes nothing for samples that are left out."""

    inputs: ClassVar[tuple[Input, ...]] = (Input("sigma", np.float32),)

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        return {"sigma": own_or(action, action.numbers["sigma"], 0.01).astype(np.float32)}

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn

        kernel: Any = self.primitive
        window = [kernel.height, kernel.width]
        return fn.gaussian_blur(images, sigma=given["sigma"], window_size=window)


@dataclass(frozen=True)
class HueTurned(Node):
    """DALI's hue: a turn in a linear colour space, where Pillow's is a shift in HSV."""

    inputs: ClassVar[tuple[Input, ...]] = (Input("degrees", np.float32),)

    def used(self, channels: int) -> tuple[Input, ...]:
        """See `Node`."""
        return self.inputs if channels == 3 else ()

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        turned = 360.0 * own_or(action, action.numbers["factor"], 0.0)
        return {"degrees": turned.astype(np.float32)}

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn

        return images if channels == 1 else fn.hue(images, hue=given["degrees"])


def _exactly(node: type[Node]) -> Maker:
    def make(primitive: Any, form: Form, device: str, fast: Collection[str]) -> Node | str:
        if form != "pil":
            return f"{type(primitive).__name__} of a tensor rounds otherwise than that of an image"
        if device == "cpu":
            return "Pillow does it in less time on the CPU, and as exactly"
        return node(primitive)

    return make


def _grayscale(primitive: Any, form: Form, device: str, fast: Collection[str]) -> Node | str:
    if primitive.channels not in (None, 3):
        return "the number of channels changes, which is left to what is behind the graph"
    return _exactly(Grey)(primitive, form, device, fast)


def _fast(name: str, node: type[Node]) -> Maker:
    def make(primitive: Any, form: Form, device: str, fast: Collection[str]) -> Node | str:
        if name not in fast:
            return f"DALI computes something else ({FAST[name]}); {name!r} in `fast` allows it"
        return node(primitive, FAST[name])

    return make


def _equalize(primitive: Any, form: Form, device: str, fast: Collection[str]) -> Node | str:
    if device == "cpu":
        return "Pillow does it in less time on the CPU, and exactly"
    return _fast("equalize", Equalized)(primitive, form, device, fast)


MAKERS: dict[type[Primitive], Maker] = {
    Brightness: _exactly(Blend),
    Contrast: _exactly(BlendWithMean),
    Saturation: _exactly(BlendWithGrey),
    Grayscale: _grayscale,
    Invert: _exactly(Bits),
    Posterize: _exactly(Bits),
    Solarize: _exactly(Solarized),
    Sharpness: _exactly(BlendWithSmooth),
    Autocontrast: _exactly(Stretched),
    Equalize: _equalize,
    GaussianBlur: _fast("blur", Blurred),
    Hue: _fast("hue", HueTurned),
}


def _grey(images: Images, channels: int) -> Images:
    """int32 [H, W, 1]: the grey level of each pixel, as Pillow's ``convert("L")`` has it."""
    from nvidia.dali import fn, types

    if channels == 1:
        return fn.cast(images, dtype=types.INT32)
    red, green, blue = (
        fn.cast(images[:, :, channel : channel + 1], dtype=types.INT32) for channel in range(3)
    )
    return (19595 * red + 38470 * green + 7471 * blue + 32768) // 65536
