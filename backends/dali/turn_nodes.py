"""Steps that compute where each pixel comes from, by DALI's own warps: quick, and not Pillow's.

    primitive, numbers ──recorder──> Pillow's own coefficients ──> matrix, size of each sample
    images ──fn.warp_affine, fn.warp_perspective──> levels, cut off to bytes ─┐
    ones   ──the same, nearest──> what lies inside of the image ──────────────┴─> the rest: fill

The coefficients are Pillow's to the bit; DALI computes with them in float32, Pillow in 16.16 bits
or in float64. DALI would mix the fill into the outermost pixels, where Pillow repeats those.

On the CPU only where Pillow takes longer: a perspective by the nearest pixel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Action, Primitive, Sizes
from dataloaders.transforms.kernels.recorded import Move, recorder
from dataloaders.transforms.primitives.turns import Affine, Perspective, Rotate

from .nodes import FAST, Form, Images, Input, Maker, Node, Values, operator_of

__all__ = ["MAKERS"]


@dataclass(frozen=True)
class Warped(Node):
    """Each pixel from where a matrix [rows, 3] says; the identity for who is left out.

    Attributes:
        rows: 2: an affine map; 3: a perspective one.
    """

    rows: int = 2
    inputs: ClassVar[tuple[Input, ...]] = (
        Input("matrix", np.float32, 2),
        Input("size", np.float32, 1),
    )

    def values(self, action: Action, sizes: Sizes) -> Values:
        """See `Node`."""
        # The colour outside is the same for all of a graph, and not looked at here.
        plain = replace(action, primitive=replace(action.primitive, fill=0))  # type: ignore[call-arg]
        matrices = np.tile(np.eye(3)[: self.rows], (len(sizes), 1, 1))
        height, width = sizes.height.copy(), sizes.width.copy()
        for sample in range(len(sizes)):
            if action.takes(sample):
                own = int(height[sample]), int(width[sample])
                move = plain.apply(sample, recorder(1, *own))
                matrices[sample] = _matrix(move, *own)[: self.rows]
                height[sample], width[sample] = move.height, move.width
        sizes.become(height, width)
        return {
            "matrix": matrices.astype(np.float32),
            "size": np.stack((height, width), 1).astype(np.float32),
        }

    def build(self, images: Images, given: Mapping[str, Images], channels: int) -> Images:
        """See `Node`."""
        from nvidia.dali import fn, types
        from nvidia.dali.math import floor

        levels = self._outside(channels)
        nearest = _mode(self.primitive) == "nearest"
        if nearest and len(set(levels)) == 1:
            return self._warp(images, given, types.INTERP_NN, levels[0])
        if nearest:
            found = self._warp(images, given, types.INTERP_NN)
        else:
            floats = fn.cast(images, dtype=types.FLOAT)
            smooth = self._warp(floats, given, types.INTERP_LINEAR)
            found = fn.cast(floor(smooth), dtype=types.UINT8)  # Pillow does not round here
        ones = images[:, :, 0:1] * types.Constant(0, types.UINT8) + types.Constant(1, types.UINT8)
        inside = self._warp(ones, given, types.INTERP_NN, 0)
        found = found * inside
        if any(levels):
            # A node of its own: scalars may stand beside images on a device, arrays may not.
            fill = types.Constant(
                np.array(levels, np.uint8).reshape(1, 1, -1), device=images.device
            )
            found = found + fill * (types.Constant(1, types.UINT8) - inside)
        return found

    def _warp(
        self, images: Images, given: Mapping[str, Images], how: Any, fill: int | None = None
    ) -> Images:
        """``fill`` outside; without one the edge is repeated."""
        outside: dict[str, Any] = {"border_mode": "replicate"}
        if self.rows == 2:
            outside = {} if fill is None else {"fill_value": float(fill)}
        elif fill is not None:
            outside = {"fill_value": [float(fill)]}
        name = "warp_affine" if self.rows == 2 else "warp_perspective"
        return operator_of(name)(
            images, matrix=given["matrix"], size=given["size"], interp_type=how, **outside
        )

    def _outside(self, channels: int) -> tuple[int, ...]:
        """The level of each channel outside, as torchvision hands it to Pillow."""
        numbers: dict[str, Any] = {
            "angle": 1.0,
            "translate": np.zeros(2),
            "scale": 1.0,
            "shear": np.zeros(2),
            "corners": np.array([[0, 0], [8, 0], [9, 9], [0, 9]]),
        }
        own = {name: numbers[name] for name in self.primitive.numbers}
        fill = self.primitive.apply(recorder(channels, 9, 9), **own).fill
        levels = np.clip(np.resize(np.array(fill), channels), 0, 255)
        return tuple(map(int, levels))


def _matrix(move: Move, height: int, width: int) -> npt.NDArray[np.float64]:
    """float64 [3, 3]: from where a pixel comes out to where it is in an image of this size."""
    from PIL import Image

    turned = {
        Image.Transpose.ROTATE_90: (0, -1, width, 1, 0, 0),
        Image.Transpose.ROTATE_180: (-1, 0, width, 0, -1, height),
        Image.Transpose.ROTATE_270: (0, 1, 0, -1, 0, height),
    }
    if move.kind == "copy":
        return np.eye(3)
    data = move.data
    if move.kind == "transpose":
        data = turned[Image.Transpose(int(data[0]))]
    rest = (0.0, 0.0) if len(data) == 6 else ()
    return np.array([*data, *rest, 1.0]).reshape(3, 3)


def _mode(primitive: Any) -> str:
    mode: str = primitive.interpolation
    return mode.removesuffix("-exact")


def _by_dali(name: str, rows: int) -> Maker:
    def make(primitive: Any, form: Form, device: str, fast: Collection[str]) -> Node | str:
        if form != "pil":
            return f"{type(primitive).__name__} of a tensor is another one than that of an image"
        if device == "cpu" and (rows, _mode(primitive)) != (3, "nearest"):
            return "on the CPU DALI's warps take longer than Pillow's, and are less exact"
        if _mode(primitive) not in ("nearest", "bilinear"):
            return f"DALI's warps have no filter that is torchvision's {primitive.interpolation}"
        if name not in fast:
            return f"DALI computes something else ({FAST[name]}); {name!r} in `fast` allows it"
        return Warped(primitive, FAST[name], rows)

    return make


MAKERS: dict[type[Primitive], Maker] = {
    Rotate: _by_dali("turn", 2),
    Affine: _by_dali("turn", 2),
    Perspective: _by_dali("perspective", 3),
}
