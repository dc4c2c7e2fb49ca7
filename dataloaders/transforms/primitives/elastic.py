"""A step that moves each pixel by a smooth random field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dataloaders.transforms.actions import Primitive

from .fills import Fill, colour_for
from .geometry import functional_of

__all__ = ["Elastic"]


@dataclass(frozen=True)
class Elastic(Primitive):
    """Each pixel from somewhere near: so far ``across`` and ``down``.

    Numbers of a sample:
        across, down: `dataloaders.transforms.draws.Uniform` of [1, 1, height, width], which are
            blurred and scaled to the distances.

    Attributes:
        alpha: the scales (x, y).
        sigma: how far the field is blurred, in pixels (x, y); 0: not at all.
        interpolation: torchvision's name of it, such as "bilinear".
        fill: the colour outside.
        v2: whether it is done as torchvision's v2 does it.
    """

    alpha: tuple[float, float]
    sigma: tuple[float, float]
    interpolation: str = "bilinear"
    fill: Fill = 0
    v2: bool = True
    numbers: ClassVar[tuple[str, ...]] = ("across", "down")

    def apply(self, value: Any, **numbers: Any) -> Any:
        """See `Primitive`."""
        return self.moved(value, numbers["across"].values(), numbers["down"].values())

    def moved(self, value: Any, across: Any, down: Any) -> Any:
        """The same, given the tensors that the fields are made of, on any device."""
        import torch
        from torchvision.transforms import InterpolationMode

        functions = functional_of(self.v2)
        _, height, width = functions.get_dimensions(value)
        fields = [
            self._field(across, 0) * self.alpha[0] / width,
            self._field(down, 1) * self.alpha[1] / height,
        ]
        displacement = torch.concat(fields, 1).permute([0, 2, 3, 1])
        moved = functions.elastic if self.v2 else functions.elastic_transform
        mode = InterpolationMode(self.interpolation)
        return moved(value, displacement, interpolation=mode, fill=colour_for(self.fill, value))

    def _field(self, uniform: Any, axis: int) -> Any:
        field = uniform * 2 - 1
        if self.sigma[axis] > 0.0:
            side = int(8 * self.sigma[axis] + 1)
            side += side % 2 == 0
            sigma = list(self.sigma)
            field = functional_of(self.v2).gaussian_blur(field, [side, side], sigma)
        return field
