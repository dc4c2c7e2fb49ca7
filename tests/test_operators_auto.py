"""What automatic policies draw and do: torchvision's own choices and pixels, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.operators import chain_of
from dataloaders.transforms.primitives.auto import Turn
from helpers.drawn import FORMS, images_of, seeds_of
from helpers.exact import assert_exact

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
    "mix, of nothing": lambda lib: lib.AugMix(mixture_width=0),
    "fill by type": lambda lib: (
        lib.RandAugment(2, 20, fill={torch.Tensor: 9, "others": [1, 2, 3]})
        if lib is v2
        else lib.RandAugment(2, 20, fill=[4, 5, 6])
    ),
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
@pytest.mark.thinned(8)
def test_the_same_draws_and_pixels_as_torchvision(lib: str, name: str, form: str) -> None:
    repeats = 5 if "mix" in name else 16
    assert_exact(POLICIES[name](BOTH[lib]), images_of(form), repeats=repeats)


def members(lib: Any) -> st.SearchStrategy[Any]:
    """Members that draw a number of words of their own, in containers of containers."""
    plain = st.sampled_from(
        [
            lambda: lib.ColorJitter(0.4, 0.4, 0.4, 0.1),
            lambda: lib.ColorJitter(contrast=0.9, hue=0.5),
            lambda: lib.RandomGrayscale(0.3),
            lambda: lib.GaussianBlur(3),
            lambda: lib.RandomSolarize(99.5, 0.3),
            lambda: lib.RandomEqualize(),
            lambda: lib.AutoAugment(),
            lambda: lib.RandAugment(),
            lambda: lib.TrivialAugmentWide(),
            lambda: lib.AugMix(mixture_width=2, chain_depth=2),
            lambda: lib.RandomCrop(7, pad_if_needed=True),
        ]
    ).map(lambda make: make())

    def within(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            st.builds(lib.RandomApply, several, p=st.sampled_from([0.3, 0.7])),
            st.builds(lib.RandomOrder, several),
            st.builds(lib.RandomChoice, several),
        )

    return st.recursive(plain, within, max_leaves=6)


@given(st.data(), st.sampled_from(["v1", "v2"]), st.sampled_from(["PIL", "PIL grey", "tensor"]))
@settings(max_examples=40, deadline=None)
@pytest.mark.nightly
def test_samples_that_take_no_part_draw_nothing(data: Any, lib: str, form: str) -> None:
    library = BOTH[lib]
    chain = library.Compose(data.draw(st.lists(members(library), min_size=1, max_size=3)))
    seed = data.draw(st.integers(0, 2**40))
    assert_exact(chain, images_of(form), repeats=3, seed=seed)


def test_steps_over_an_epoch_are_as_frequent_as_they_should_be() -> None:
    """RandAugment has no get_params; that each of 14 is as likely is its definition."""
    samples = 7000
    rows, sides = seeds_of(samples, seed=5), np.full(samples, 40)
    for lib in (v1, v2):
        (actions,), _ = chain_of(lib.RandAugment(1)).draw(rows, sides, sides)
        taken = np.array([action.where.sum() for action in actions])
        counts = np.append(taken, samples - taken.sum())  # Identity has no primitive
        assert len(counts) == 14
        assert ((counts - 500) ** 2 / 500).sum() < 45  # chi squared of 13: 2 in 100 000
        turned = next(action for action in actions if isinstance(action.primitive, Turn))
        right = turned.numbers["angle"][turned.where] < 0
        assert abs(right.mean() - 0.5) < 0.1


def test_a_generator_stands_where_torchs_does() -> None:
    rows = seeds_of(6)
    draws = Draws(rows)
    draws.rand(np.arange(6) % 2 == 0)
    for sample in (1, 4, 1):
        with draws.generator(sample) as generator:
            torch.empty(3).exponential_(generator=generator)
            torch.empty(3, dtype=torch.float64).normal_(generator=generator)
    following = draws.rand()
    for sample in range(6):
        with random_states_kept():
            torch.manual_seed(int(rows[sample, 0]))
            if sample % 2 == 0:
                torch.rand(1)
            for _ in range([0, 2, 0, 0, 1, 0][sample]):
                torch.empty(3).exponential_()
                torch.empty(3, dtype=torch.float64).normal_()
            assert torch.rand(1).item() == following[sample]


@given(st.lists(st.sampled_from(["mix", "3 normal", "4 normal", "16 normal", "one"]), max_size=9))
@settings(max_examples=60, deadline=None)
def test_half_pairs_of_normal_values_are_kept_across_all_draws(steps: list[str]) -> None:
    """Dirichlet's distribution and small normal tensors share what torch keeps of a pair."""
    weights = torch.tensor([[0.4, 1.0, 2.0]])
    rows = seeds_of(2)
    draws = Draws(rows)
    found: list[list[Any]] = [[], []]
    for step in steps:
        if step == "mix":
            for sample in range(2):
                with draws.generator(sample) as generator:
                    found[sample].append(torch._sample_dirichlet(weights, generator=generator)[0])
        elif step == "one":
            for sample, value in enumerate(draws.rand()):
                found[sample].append(torch.tensor([value]))
        else:
            for sample, normal in enumerate(draws.normal(np.full((2, 1), int(step.split()[0])))):
                found[sample].append(normal.values())
    following = draws.rand()
    for sample in range(2):
        with random_states_kept():
            torch.manual_seed(int(rows[sample, 0]))
            for step, value in zip(steps, found[sample], strict=True):
                if step == "mix":
                    expected = torch._sample_dirichlet(weights)[0]
                elif step == "one":
                    expected = torch.rand(1)
                else:
                    expected = torch.empty(int(step.split()[0])).normal_()
                assert torch.equal(value, expected)
            assert torch.rand(1).item() == following[sample]


def test_a_generator_that_gave_too_many_numbers_is_told() -> None:
    draws = Draws([[1, 2, 3, 4]])
    with pytest.raises(RuntimeError, match="words were drawn"), draws.generator(0) as generator:
        torch.rand(200_000, generator=generator)


def test_a_stack_of_images_is_not_mixed() -> None:
    (actions,), _ = chain_of(v2.AugMix()).draw(seeds_of(1), [8], [9])
    with pytest.raises(ValueError, match=r"one image is needed, not a stack of \(2, 3, 8, 9\)"):
        actions[0].apply(0, torch.zeros(2, 3, 8, 9, dtype=torch.uint8))


def named(transform: Any, **attributes: Any) -> Any:
    """``transform`` with other attributes than its constructor takes."""
    vars(transform).update(attributes)
    return transform


NOT_READ = {
    "a level that there is not": (lambda: v1.RandAugment(magnitude=31), "magnitude=31 with num"),
    "half a level": (lambda: v2.RandAugment(magnitude=1.5), "magnitude=1.5 with num"),
    "no levels": (lambda: v1.TrivialAugmentWide(0), "num_magnitude_bins=0 leaves"),
    "levels of text": (lambda: v2.TrivialAugmentWide("many"), "cannot make 'many' levels"),
    "a whole alpha": (lambda: v1.AugMix(alpha=1), "give alpha as a positive float"),
    "half a chain": (lambda: v1.AugMix(mixture_width=2.5), "mixture_width=2.5"),
    "half a step": (lambda: v1.RandAugment(num_ops=1.5), "num_ops=1.5"),
    "a name for v1": (lambda: v1.RandAugment(interpolation="bilinear"), "InterpolationMode"),
    "a fill of text": (lambda: v1.AutoAugment(fill="black"), "fill='black'"),
    "another step": (
        lambda: named(v1.AutoAugment(), policies=[(("Swirl", 0.5, 1), ("Invert", 0.5, None))]),
        "'Swirl'",
    ),
    "a level that no policy has": (
        lambda: named(v2.AutoAugment(), _policies=[(("Rotate", 0.5, 10), ("Invert", 0.5, None))]),
        "a level from 0 to 9",
    ),
    "three steps": (
        lambda: named(v1.AutoAugment(), policies=[(("Invert", 0.5, None),) * 3]),
        "two steps each",
    ),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_says_why(name: str) -> None:
    make, text = NOT_READ[name]
    why = chain_of(make()).why
    assert why is not None
    assert text in why
