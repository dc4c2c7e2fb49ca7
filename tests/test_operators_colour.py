"""What colour transforms draw and do: torchvision's own choices and pixels, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torchvision.transforms as v1
from torchvision.transforms import v2

from helpers.drawn import FORMS, check_exact, images_of

BOTH = {"v1": v1, "v2": v2}

CHAINS: dict[str, Any] = {
    "jitter": lambda lib: lib.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "jitter wide": lambda lib: lib.ColorJitter((0.0, 3.0), (0.2, 2.5), (0.0, 4.0), (-0.5, 0.5)),
    "jitter three": lambda lib: lib.ColorJitter(0.3, 0, 0.9, 0.5),
    "jitter two": lambda lib: lib.ColorJitter(contrast=1.0, hue=(0.1, 0.2)),
    "jitter one": lambda lib: lib.ColorJitter(hue=0.3),
    "jitter none": lambda lib: lib.ColorJitter(),
    "jitter fixed": lambda lib: lib.ColorJitter((0.5, 0.5), (1.5, 1.5)),
    "grey 1": lambda lib: lib.Grayscale(),
    "grey 3": lambda lib: lib.Grayscale(3),
    "sometimes grey": lambda lib: lib.RandomGrayscale(0.4),
    "blur": lambda lib: lib.GaussianBlur(5),
    "blur narrow": lambda lib: lib.GaussianBlur((3, 7), (0.1, 3.0)),
    "blur fixed": lambda lib: lib.GaussianBlur((7, 1), 1),
    "blur too wide": lambda lib: lib.GaussianBlur(21, 5.0),
    "invert": lambda lib: lib.RandomInvert(),
    "posterize": lambda lib: lib.RandomPosterize(3, 0.7),
    "posterize beyond": lambda lib: lib.RandomPosterize(9),
    "solarize": lambda lib: lib.RandomSolarize(128),
    "solarize low": lambda lib: lib.RandomSolarize(0.4, p=0.8),
    "autocontrast": lambda lib: lib.RandomAutocontrast(0.6),
    "equalize": lambda lib: lib.RandomEqualize(),
    "sharper": lambda lib: lib.RandomAdjustSharpness(2.5),
    "blurred": lambda lib: lib.RandomAdjustSharpness(0, p=1.0),
    "never": lambda lib: lib.RandomInvert(p=0.0),
    "many": lambda lib: lib.Compose(
        [
            lib.RandomHorizontalFlip(),
            lib.ColorJitter(0.2, 0.2, 0.2, 0.02),
            lib.RandomGrayscale(0.2),
            lib.GaussianBlur(3),
            lib.RandomSolarize(0.5, 0.3),
            lib.RandomVerticalFlip(),
        ]
    ),
}

ONLY_V2: dict[str, Any] = {
    "distort": lambda: v2.RandomPhotometricDistort(),
    "distort always": lambda: v2.RandomPhotometricDistort(
        (0.0, 2.0), (0.1, 0.2), (3.0, 4.0), (-0.5, 0.5), p=1.0
    ),
    "permute": lambda: v2.RandomChannelPermutation(),
    "jpeg": lambda: v2.JPEG((5, 95)),
    "jpeg fixed": lambda: v2.JPEG(30),
    "rgb": lambda: v2.Compose([v2.RGB(), v2.RandomChannelPermutation()]),
    "grey, then permute": lambda: v2.Compose([v2.Grayscale(), v2.RandomPhotometricDistort(p=0.8)]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("lib", BOTH)
def test_the_same_draws_and_pixels_as_torchvision(lib: str, name: str, form: str) -> None:
    check_exact(CHAINS[name](BOTH[lib]), images_of(form), samples=24)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ONLY_V2)
def test_the_same_draws_and_pixels_as_v2_alone(name: str, form: str) -> None:
    check_exact(ONLY_V2[name](), images_of(form), samples=24)
