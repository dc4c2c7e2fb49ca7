"""ElasticTransform: torchvision's own field and pixels, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from torchvision.transforms import InterpolationMode, v2

from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.draws import Draws
from helpers.drawn import FORMS, images_of, seeds_of
from helpers.exact import assert_exact

BOTH = {"v1": v1, "v2": v2}
SIZES = ((23, 19), (20, 41), (31, 32))
NEAREST = InterpolationMode.NEAREST

CHAINS: dict[str, Any] = {
    "narrow": lambda lib: lib.ElasticTransform(sigma=1.5),
    "strong": lambda lib: lib.ElasticTransform([300.0, 20.0], [2.0, 0.5], NEAREST, 99),
    "not blurred": lambda lib: lib.ElasticTransform(5.0, 0.0),
    "blurred one way": lambda lib: lib.ElasticTransform(90.0, [0.0, 1.0]),
    "too wide": lambda lib: lib.ElasticTransform(sigma=2.4),
    "in a chain": lambda lib: lib.Compose(
        [
            lib.RandomApply([lib.ElasticTransform(40.0, 1.0)]),
            lib.RandomResizedCrop(16),
            lib.ElasticTransform(40.0, 1.0, fill=7),
            lib.ColorJitter(0.4),
        ]
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("lib", BOTH)
@pytest.mark.thinned(4)
def test_the_same_field_and_pixels_as_torchvision(lib: str, name: str, form: str) -> None:
    assert_exact(CHAINS[name](BOTH[lib]), images_of(form, SIZES), repeats=4)


def test_a_field_is_torchs_and_so_is_what_is_drawn_after_it() -> None:
    rows, shapes = seeds_of(4), np.array([[3, 5], [40, 50], [1, 1], [0, 7]])
    draws = Draws(rows)
    draws.rand()
    fields = draws.field(shapes, np.array([True, True, False, True]))
    following = draws.rand()
    for sample, shape in enumerate(shapes.tolist()):
        with random_states_kept():
            torch.manual_seed(int(rows[sample, 0]))
            torch.rand(1)
            if sample == 2:
                assert fields[sample] is None
            else:
                assert torch.equal(fields[sample].values(), torch.rand(shape))
            assert torch.rand(1).item() == following[sample]
