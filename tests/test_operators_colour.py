"""What colour transforms draw and do: torchvision's own choices and pixels, to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from torchvision.transforms import v2

from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.actions import Action, SampleError
from dataloaders.transforms.operators import chain_of
from dataloaders.transforms.primitives.colour import (
    Brightness,
    Contrast,
    GaussianBlur,
    Hue,
    Saturation,
)
from helpers.compare import same
from helpers.drawn import FORMS, images_of, seeds_of
from helpers.exact import assert_exact
from helpers.pictures import picture

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
    "blurred by less than nothing": lambda lib: lib.RandomAdjustSharpness(-0.5),
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
    "distort beyond": lambda: v2.RandomPhotometricDistort(
        (-0.1, 2.0), (-0.1, 2.0), (-0.1, 2.0), (-0.6, 0.6), p=0.3
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
@pytest.mark.thinned(8)
def test_the_same_draws_and_pixels_as_torchvision(lib: str, name: str, form: str) -> None:
    assert_exact(CHAINS[name](BOTH[lib]), images_of(form), repeats=8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ONLY_V2)
def test_the_same_draws_and_pixels_as_v2_alone(name: str, form: str) -> None:
    assert_exact(ONLY_V2[name](), images_of(form), repeats=8)


def drawn_for(transform: Any, samples: int) -> tuple[list[Action], np.ndarray]:
    """The actions of ``transform`` on so many samples of a seeded epoch."""
    rows = seeds_of(samples, seed=3)
    (actions,), _ = chain_of(transform).draw(rows, np.full(samples, 9), np.full(samples, 7))
    return actions, rows


def of_kind(actions: Sequence[Action], kind: type) -> np.ndarray:
    """The one number of each sample that takes a step of this kind, in the order of samples."""
    found = {}
    for action in actions:
        if isinstance(action.primitive, kind):
            (array,) = action.numbers.values()
            for sample in range(len(array)):
                if action.takes(sample):
                    found[sample] = array[sample]
    return np.array([found[sample] for sample in sorted(found)])


def apart(one: Any, other: Any) -> float:
    """Kolmogorov and Smirnov's distance of two samples, in units of what is usual: below 2.2.

    Above that with a probability of 1e-4, were they of one distribution.
    """
    one, other = np.sort(one), np.sort(other)
    both = np.concatenate([one, other])
    shares = [np.searchsorted(each, both, side="right") / len(each) for each in (one, other)]
    scale = np.sqrt((len(one) + len(other)) / (len(one) * len(other)))
    return float(np.abs(shares[0] - shares[1]).max() / scale)


def test_jitter_over_an_epoch_is_distributed_as_get_params_draws() -> None:
    ranges = [(0.6, 1.4), (0.2, 1.8), (0.5, 3.0), (-0.1, 0.2)]
    actions, _ = drawn_for(v1.ColorJitter(*ranges), 6000)
    torch.manual_seed(1)
    orders, *factors = zip(*(v1.ColorJitter.get_params(*ranges) for _ in range(4000)), strict=True)
    for kind, theirs in zip((Brightness, Contrast, Saturation, Hue), factors, strict=True):
        assert apart(of_kind(actions, kind), theirs) < 2.2
    taken = [[type(a.primitive) for a in actions if a.takes(sample)] for sample in range(6000)]
    ours = Counter(map(tuple, taken))
    kinds = (Brightness, Contrast, Saturation, Hue)
    expected = Counter(tuple(kinds[member] for member in order) for order in orders)
    assert ours.keys() == expected.keys()
    off = sum((count - 250) ** 2 / 250 for count in ours.values())
    assert len(ours) == 24
    assert off < 60  # chi squared of 23: above it once in 40 000


def test_blur_over_an_epoch_is_distributed_as_get_params_draws() -> None:
    torch.manual_seed(1)
    theirs = [v1.GaussianBlur.get_params(0.1, 2.0) for _ in range(4000)]
    actions, _ = drawn_for(v1.GaussianBlur(3), 6000)
    assert apart(of_kind(actions, GaussianBlur), theirs) < 2.2


def test_distortion_over_an_epoch_is_distributed_as_make_params_draws() -> None:
    transform = v2.RandomPhotometricDistort()
    torch.manual_seed(1)
    theirs = [transform.make_params([picture(4, 4)]) for _ in range(3000)]
    actions, _ = drawn_for(transform, 6000)
    names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
    for kind, name in zip((Brightness, Contrast, Saturation, Hue), names, strict=True):
        drawn = [each[name] for each in theirs if each[name] is not None]
        ours = of_kind(actions, kind)
        assert abs(len(ours) / 6000 - len(drawn) / 3000) < 0.04
        assert apart(ours, drawn) < 2.2
    early, late = (action for action in actions if isinstance(action.primitive, Contrast))
    assert abs(early.where.mean() - late.where.mean()) < 0.04


@pytest.mark.parametrize(("lib", "taken"), [("v1", True), ("v2", False)])
def test_a_probability_is_compared_as_each_version_does(lib: str, taken: bool) -> None:
    """v1 in float64, v2 in float32, where 0.7 is less: this seed's first number lies between."""
    rows = [[5254236, 0, 0, 0]]
    transform = BOTH[lib].RandomInvert(0.7)
    (actions,), _ = chain_of(transform).draw(rows, [4], [5])
    assert actions[0].takes(0) is taken
    image = picture(4, 5)
    with random_states_kept():
        seed_generators(rows[0])
        assert same(transform(image), image) is not taken


REFUSED = {
    "blur": lambda: v1.GaussianBlur(9),
    "blur, narrow": lambda: v2.GaussianBlur((9, 3)),
    "field": lambda: v2.ElasticTransform(sigma=1.0),
    "bits": lambda: v2.RandomPosterize(9, 1.0),
    "half a bit": lambda: v1.RandomPosterize(2.5, 1.0),
    "levels": lambda: v1.Compose([v1.RandAugment(40, 0, 1)]),
    "blurred": lambda: v2.Compose([v2.ToImage(), v2.RandomAdjustSharpness(-1.0, 1.0)]),
    "distorted": lambda: v2.Compose(
        [v2.ToImage(), v2.RandomPhotometricDistort(contrast=(-2.0, -1.0), p=1.0)]
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torchvision_refuses_is_refused_when_drawn(name: str) -> None:
    """Not only when it is done: what does it may be no torchvision."""
    transform, rows = REFUSED[name](), seeds_of(3)
    with random_states_kept():
        seed_generators(tuple(rows[0].tolist()))
        with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever it is
            transform(picture(4, 4))
    with pytest.raises(SampleError) as raised:
        chain_of(transform).draw(rows, [4, 50, 4], [4, 50, 4])
    told = raised.value
    assert told.sample == 0
    assert (type(told.error), str(told.error)) == (expected.type, str(expected.value))


NOT_READ = {
    "noise": (lambda: v2.GaussianNoise(), "GaussianNoise draws as many numbers as the layout"),
    "two grey channels": (lambda: v1.Grayscale(2), "num_output_channels=2: torchvision makes 1"),
    "bits of text": (lambda: v2.RandomPosterize("3"), "bits='3' is no number"),
    "a falling range": (lambda: v2.RandomPhotometricDistort((2.0, 1.0)), r"brightness=(2.0, 1.0)"),
    "a tensor": (lambda: v1.RandomSolarize(torch.tensor(3.0)), "threshold=tensor(3.) is no number"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_says_why(name: str) -> None:
    make, text = NOT_READ[name]
    why = chain_of(make()).why
    assert why is not None
    assert text in why
