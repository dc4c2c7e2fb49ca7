"""What automatic policies draw and do: torchvision's own choices and pixels, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torchvision.transforms as v1
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from helpers.exact import assert_exact
from helpers.pictures import FORMS, images_of

BOTH = {"v1": v1, "v2": v2}
BILINEAR = InterpolationMode.BILINEAR

POLICIES: dict[str, Any] = {
    "auto, ImageNet": lambda lib: lib.AutoAugment(),
    "auto, CIFAR": lambda lib: lib.AutoAugment(AutoAugmentPolicy.CIFAR10, BILINEAR),
    "auto, SVHN": lambda lib: lib.AutoAugment(AutoAugmentPolicy.SVHN, fill=(9.0,)),
    "rand": lambda lib: lib.RandAugment(),
    "rand, strong": lambda lib: lib.RandAugment(3, 30, interpolation=BILINEAR, fill=128),
    "rand, from the end": lambda lib: lib.RandAugment(1, -2, 7),
    "rand, one level": lambda lib: lib.RandAugment(2, 0, 1),
    "rand, none": lambda lib: lib.RandAugment(0),
    "trivial": lambda lib: lib.TrivialAugmentWide(),
    "trivial, coarse": lambda lib: lib.TrivialAugmentWide(4, BILINEAR, fill=[3.5]),
    "mix": lambda lib: lib.AugMix(),
    "mix, few": lambda lib: lib.AugMix(10, 2, 1, 0.3, all_ops=False, fill=77),
    "mix, deep": lambda lib: lib.AugMix(1, 1, 5, 4.0, interpolation=InterpolationMode.NEAREST),
    "two mixes": lambda lib: lib.Compose([lib.AugMix(), lib.AugMix(), lib.ColorJitter(0.3)]),
    "many": lambda lib: lib.Compose(
        [
            lib.RandomResizedCrop(24),
            lib.RandomHorizontalFlip(),
            lib.TrivialAugmentWide(),
            lib.RandAugment(),
            lib.AutoAugment(),
            lib.RandomGrayscale(0.5),
        ]
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("lib", BOTH)
def test_the_same_draws_and_pixels_as_torchvision(lib: str, name: str, form: str) -> None:
    assert_exact(POLICIES[name](BOTH[lib]), images_of(form), repeats=20)
