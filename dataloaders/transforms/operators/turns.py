"""Operators that compute where each pixel comes from: rotation, affine, perspective."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.transforms.actions import Action, Operator, Sizes
from dataloaders.transforms.draws import Draws, Where
from dataloaders.transforms.primitives.turns import Affine, Perspective, Rotate

from .options import center_of, fill_of, range_of
from .table import NotRead, mode_of, reads


class RandomRotation(Operator):
    """Turned by a random angle."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._degrees = range_of(transform.degrees, "degrees")
        self._rotate = Rotate(
            mode_of(transform.interpolation, v2),
            bool(transform.expand),
            center_of(transform.center),
            fill_of(transform, v2),
            v2,
        )
        self.primitives = (self._rotate,)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        angle = draws.uniform(*self._degrees, where).astype(np.float64)
        if self._rotate.expand:
            self._expand(angle, sizes, where)
        return [Action(self._rotate, {"angle": angle}, where)]

    def _expand(self, angle: npt.NDArray[np.float64], sizes: Sizes, where: Where) -> None:
        height, width = sizes.height.copy(), sizes.width.copy()
        for sample in range(len(sizes)) if where is None else np.flatnonzero(where).tolist():
            sides = (float(angle[sample]), int(height[sample]), int(width[sample]))
            turned = _turned_tensor if sizes.tensors[sample] else _turned_image
            height[sample], width[sample] = turned(self._rotate, *sides)
        sizes.become(height, width)


def _turned_image(rotate: Rotate, angle: float, height: int, width: int) -> tuple[int, int]:
    """Height and width of an expanded PIL image: by Pillow's own code, given nothing but a size."""
    import PIL.Image

    turned: Any = PIL.Image.Image.rotate(
        _Shape(width, height),  # type: ignore[arg-type]
        angle,
        expand=True,
        center=rotate.center,
    )
    return turned.height, turned.width


class _Shape:
    """As much of a PIL image as ``Image.rotate`` looks at before it moves pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = self.size = width, height

    def copy(self) -> _Shape:
        return self

    def transpose(self, method: Any) -> _Shape:
        import PIL.Image

        if method == PIL.Image.Transpose.ROTATE_180:
            return self
        return _Shape(self.height, self.width)

    def transform(self, size: tuple[int, int], *_: Any, **__: Any) -> _Shape:
        return _Shape(*size)


def _turned_tensor(rotate: Rotate, angle: float, height: int, width: int) -> tuple[int, int]:
    """Height and width of an expanded tensor, as ``rotate_image`` of v2, or v1's, finds them."""
    if rotate.v2:
        from torchvision.transforms.v2.functional import _geometry as functional

        angle = angle % 360
        if rotate.center is None and angle in (0, 180):
            return height, width
        if rotate.center is None and angle in (90, 270):
            return width, height
        inverse, sized = (
            functional._get_inverse_affine_matrix,
            functional._compute_affine_output_size,
        )
    else:
        from torchvision.transforms import _functional_tensor
        from torchvision.transforms import functional as functional1

        inverse = functional1._get_inverse_affine_matrix
        sized = _functional_tensor._compute_affine_output_size
    center = [0.0, 0.0]
    if rotate.center is not None:
        center = [rotate.center[0] - width * 0.5, rotate.center[1] - height * 0.5]
    matrix = inverse(center, -angle, [0.0, 0.0], 1.0, [0.0, 0.0])
    new_width, new_height = sized(matrix, width, height)
    return int(new_height), int(new_width)


class RandomAffine(Operator):
    """Turned, moved, scaled and sheared, each by a random amount."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._degrees = range_of(transform.degrees, "degrees")
        self._translate = None
        if transform.translate is not None:
            self._translate = tuple(float(share) for share in transform.translate)
        self._scale = None
        if transform.scale is not None:
            self._scale = range_of(transform.scale, "scale", 0.0, above=True)
        shear = transform.shear
        self._shears = []
        if shear is not None:
            self._shears = [range_of(shear[at : at + 2], "shear") for at in range(0, len(shear), 2)]
        self.primitives = (
            Affine(
                mode_of(transform.interpolation, v2),
                center_of(transform.center),
                fill_of(transform, v2),
                v2,
            ),
        )

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        samples = len(sizes)
        angle = draws.uniform(*self._degrees, where).astype(np.float64)
        translate = np.zeros((samples, 2), np.int64)
        if self._translate is not None:
            for axis, side in enumerate((sizes.width, sizes.height)):
                most = self._translate[axis] * side
                translate[:, axis] = np.rint(draws.uniform(-most, most, where))
        scale = np.ones(samples)
        if self._scale is not None:
            scale = draws.uniform(*self._scale, where).astype(np.float64)
        shear = np.zeros((samples, 2))
        for axis, degrees in enumerate(self._shears):
            shear[:, axis] = draws.uniform(*degrees, where)
        numbers = {"angle": angle, "translate": translate, "scale": scale, "shear": shear}
        return [Action(self.primitives[0], numbers, where)]


class RandomPerspective(Operator):
    """The four corners moved inwards, each by a random amount."""

    random = True

    def __init__(self, transform: Any, v2: bool) -> None:
        self._probability = float(transform.p)
        self._distortion = float(transform.distortion_scale)
        if not 0 <= self._distortion <= 1:
            raise NotRead(
                f"distortion_scale={self._distortion}: corners are moved by 0 to 1 of half a "
                "side; give a number from 0 to 1"
            )
        mode = mode_of(transform.interpolation, v2)
        self.primitives = (Perspective(mode, fill_of(transform, v2), v2),)

    def draw(self, draws: Draws, sizes: Sizes, where: Where = None) -> list[Action]:
        """See `Operator`."""
        where = draws.below(self._probability, where)
        corners = np.zeros((len(sizes), 4, 2), np.int64)
        sides = (sizes.width, sizes.height)
        reach = [(self._distortion * (side // 2)).astype(np.int64) for side in sides]
        # Upper left, upper right, lower right, lower left: near its end of each axis, or not.
        for corner, ends in enumerate(((0, 0), (1, 0), (1, 1), (0, 1))):
            for axis, far in enumerate(ends):
                low = sides[axis] - reach[axis] - 1 if far else 0
                high = sides[axis] if far else reach[axis] + 1
                corners[:, corner, axis] = draws.randint(low, high, where)
        return [Action(self.primitives[0], {"corners": corners}, where)]


@reads("RandomRotation")
def _random_rotation(transform: Any, v2: bool) -> Operator:
    return RandomRotation(transform, v2)


@reads("RandomAffine")
def _random_affine(transform: Any, v2: bool) -> Operator:
    return RandomAffine(transform, v2)


@reads("RandomPerspective")
def _random_perspective(transform: Any, v2: bool) -> Operator:
    return RandomPerspective(transform, v2)
