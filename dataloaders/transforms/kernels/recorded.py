"""What torchvision and Pillow would do to move an image, written down instead of done.

    primitive.apply(recorder(...)) ──> F.rotate ──> Image.rotate ──> image.transform ──> Move

So angles, centres and shears become coefficients by torchvision's and Pillow's own code, whatever
their versions. Only what Pillow does in C is computed by the kernels. About 10 microseconds each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Move", "recorder"]


@dataclass(frozen=True)
class Move:
    """One geometric step of Pillow's.

    Attributes:
        kind: "copy", "transpose", "affine" or "perspective".
        height, width: of what comes out.
        data: Pillow's transpose method; or 6 coefficients of "affine", 8 of "perspective", which
            lead from a pixel that comes out to where it comes from.
        resample: Pillow's number: 0 nearest, 2 bilinear, 3 bicubic.
        fill: levels, one a channel.
    """

    kind: str
    height: int
    width: int
    data: tuple[float, ...] = ()
    resample: int = 0
    fill: tuple[int, ...] = (0,)


def recorder(channels: int, height: int, width: int) -> Any:
    """A PIL image of this size, without pixels, whose geometric methods give a `Move`.

    Args:
        channels: 1 or 3: an image of mode L or RGB.
    """
    from PIL import Image

    sideways = (
        Image.Transpose.ROTATE_90,
        Image.Transpose.ROTATE_270,
        Image.Transpose.TRANSPOSE,
        Image.Transpose.TRANSVERSE,
    )

    def copy() -> Move:
        return Move("copy", height, width)

    def transpose(method: int) -> Move:
        size = (width, height) if method in sideways else (height, width)
        return Move("transpose", *size, (int(method),))

    def transform(
        size: tuple[int, int],
        method: int,
        data: Any,
        resample: int = 0,
        fill: int = 1,
        fillcolor: Any = None,
    ) -> Move:
        levels = fillcolor if isinstance(fillcolor, (tuple, list)) else (fillcolor or 0,)
        return Move(
            Image.Transform(method).name.lower(),
            int(size[1]),
            int(size[0]),
            tuple(map(float, data)),
            int(resample),
            tuple(map(int, levels)),
        )

    # An instance of that very class, since torchvision looks fills up by the type.
    image = Image.Image()
    vars(image).update(
        _mode="RGB" if channels == 3 else "L",
        _size=(width, height),
        copy=copy,
        transpose=transpose,
        transform=transform,
    )
    return image
