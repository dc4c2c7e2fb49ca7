"""RandomApply, RandomChoice, RandomOrder and Compose in any nesting: drawn as torchvision draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision.transforms import v2

from dataloaders.transforms.actions import SampleError, applied
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.operators import chain_of
from helpers.compare import assert_same
from helpers.drawn import seeds_of
from helpers.exact import assert_exact, images, told

LIBRARIES = {"v1": v1, "v2": v2}
SHAPES = ((13, 13), (20, 9), (9, 31))


def flip(library: Any) -> Any:
    return library.RandomHorizontalFlip()


def crop(library: Any) -> Any:
    return library.RandomResizedCrop(7)


def own(image: Any) -> Any:
    return image


CHAINS: dict[str, Any] = {
    "apply": lambda t: t.RandomApply([flip(t), crop(t)]),
    "apply always": lambda t: t.RandomApply([flip(t)], p=1.0),
    "apply never": lambda t: t.RandomApply([flip(t)], p=0.0),
    "apply a module list": lambda t: t.RandomApply(nn.ModuleList([flip(t), crop(t)]), p=0.3),
    "choice": lambda t: t.RandomChoice([flip(t), crop(t), t.RandomCrop(5)]),
    "choice of one": lambda t: t.RandomChoice([crop(t)]),
    "choice by weight": lambda t: t.RandomChoice([flip(t), crop(t)], p=[1, 3]),
    "choice of some": lambda t: t.RandomChoice([flip(t), crop(t)], p=[0.0, 0.4]),
    "order": lambda t: t.RandomOrder([flip(t), crop(t), t.RandomRotation(20)]),
    "order of one": lambda t: t.RandomOrder([crop(t)]),
    "compose": lambda t: t.Compose([flip(t), t.Compose([crop(t), flip(t)])]),
    "a chain in each": lambda t: t.RandomChoice(
        [t.Compose([t.Pad(2), crop(t)]), t.RandomOrder([t.RandomApply([flip(t)]), t.Resize(9)])]
    ),
    "tensors behind": lambda t: t.Compose(
        [t.RandomApply([crop(t)]), t.PILToTensor(), t.RandomErasing(0.5, value="random"), flip(t)]
    ),
    "tensors, or not": lambda t: t.Compose(
        [t.RandomApply([t.PILToTensor()]), t.RandomRotation(50, expand=True), flip(t)]
    ),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_which_members_run_is_torchvisions_draw(library: str, name: str) -> None:
    count = assert_exact(CHAINS[name](LIBRARIES[library]), images("RGB", SHAPES), repeats=12)
    assert count == 12 * len(SHAPES)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_sequential_is_a_chain(library: str) -> None:
    t = LIBRARIES[library]
    chain = nn.Sequential(flip(t), nn.Sequential(crop(t)), t.ConvertImageDtype(torch.float32))
    assert assert_exact(chain, images("bytes", SHAPES)) == 3 * len(SHAPES)
    assert assert_exact(t.RandomApply([chain]), images("bytes", SHAPES)) == 3 * len(SHAPES)


def test_v1_draws_an_empty_list_of_members_too() -> None:
    for chain in (v1.RandomApply([]), v1.RandomOrder([])):
        assert assert_exact(chain, images("RGB", SHAPES)) == 3 * len(SHAPES)


def members(library: Any, containers: bool) -> st.SearchStrategy[Any]:
    """Members that never fail, in containers of containers; none twice."""
    t = library
    plain = st.sampled_from(
        [
            lambda: t.RandomHorizontalFlip(0.4),
            lambda: t.RandomVerticalFlip(),
            lambda: t.RandomResizedCrop((6, 8)),
            lambda: t.RandomCrop(5, padding=3, padding_mode="edge"),
            lambda: t.RandomCrop(14, pad_if_needed=True),
            lambda: t.RandomRotation(30, expand=True),
            lambda: t.RandomAffine(10, (0.2, 0.1), (0.9, 1.1), 5),
            lambda: t.Resize(9),
            lambda: t.CenterCrop((11, 8)),
            lambda: t.Pad((1, 0)),
            lambda: t.ColorJitter(0.2, 0.2, 0.2, 0.1),
            lambda: t.RandomGrayscale(0.5),
            lambda: t.TrivialAugmentWide(),
        ]
    ).map(lambda make: make())
    if not containers:
        return plain

    def within(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            st.builds(t.Compose, several),
            st.builds(t.RandomApply, several, p=st.sampled_from([0.0, 0.3, 0.5, 1.0])),
            st.builds(t.RandomOrder, several),
            several.flatmap(
                lambda given: st.builds(
                    t.RandomChoice,
                    st.just(given),
                    p=st.none()
                    | st.lists(st.floats(0.1, 9), min_size=len(given), max_size=len(given)),
                )
            ),
            several.map(lambda given: nn.Sequential(*given) if _modules(given) else given[0]),
        )

    return st.recursive(plain, within, max_leaves=8)


def _modules(given: list[Any]) -> bool:
    return all(isinstance(member, nn.Module) for member in given)


@given(st.data(), st.sampled_from(["v1", "v2"]), st.sampled_from(["RGB", "L", "bytes"]))
@settings(max_examples=80, deadline=None)
@pytest.mark.nightly
def test_any_nesting_is_drawn_exactly(data: Any, library: str, kind: str) -> None:
    t = LIBRARIES[library]
    chain = t.Compose(data.draw(st.lists(members(t, True), min_size=1, max_size=3)))
    seed = data.draw(st.integers(0, 2**40))
    assert assert_exact(chain, images(kind, SHAPES), repeats=3, seed=seed) == 3 * len(SHAPES)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_member_that_is_not_read_is_named(library: str) -> None:
    t = LIBRARIES[library]
    for container in (t.RandomApply, t.RandomChoice, t.RandomOrder):
        why = chain_of(container([t.Compose([flip(t), own])])).why
        assert why == "its own is not read: it is code of your own"
    why = chain_of(t.RandomApply([t.RandomOrder([t.Lambda(own)])])).why
    assert why is not None
    assert "Lambda runs a function of your own" in why


def test_a_choice_that_torchvision_cannot_make_is_not_read() -> None:
    for chain in (v1.RandomChoice([]), v1.RandomChoice([flip(v1)], p=[1, 2])):
        why = chain_of(chain).why
        assert why is not None
        assert "torchvision raises" in why
        assert "one weight a transform" in why


@pytest.mark.parametrize("probability", [0.0, 0.5])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_draw_that_equals_the_probability_falls_as_torchvisions(
    library: str, probability: float
) -> None:
    """Seeds found by trying: the first draw is 0, or 0.5. v1 and v2 differ in one of these."""
    t = LIBRARIES[library]
    rows = np.array([[5528393, 0, 0, 0], [6048489, 0, 0, 0]])
    assert Draws(rows).rand().tolist() == [0.0, 0.5]
    (one,) = images("RGB", [(9, 7)])
    flipped = v2.functional.hflip(one)
    always = t.RandomHorizontalFlip(1.0)
    for transform in (t.RandomApply([always], probability), t.RandomHorizontalFlip(probability)):
        actions = [
            action
            for member in chain_of(transform).draw(rows, [9, 9], [7, 7])[0]
            for action in member
        ]
        for sample, row in enumerate(rows):
            expected = told(transform, one, row)[0]
            assert expected.tobytes() in (one.tobytes(), flipped.tobytes())
            assert_same(applied(actions, sample, one), expected, strides=False)


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_error_is_that_of_the_first_sample_that_fails(library: str) -> None:
    """Not of the first member that fails for any sample."""
    t = LIBRARIES[library]
    chain = chain_of(t.Compose([t.RandomCrop(10), t.RandomChoice([t.RandomCrop((5, 20))])]))
    with pytest.raises(SampleError, match=r"crop size \(5, 20\)") as caught:
        chain.draw(seeds_of(4), [10, 10, 9, 10], [30, 15, 30, 15])
    assert caught.value.sample == 0
    with pytest.raises(SampleError, match=r"crop size \(10, 10\)") as caught:
        chain.draw(seeds_of(2), [9, 12], [30, 30])
    assert caught.value.sample == 0
    assert type(caught.value.error) is ValueError


def test_samples_that_do_not_take_a_crop_cannot_fail_in_it() -> None:
    chain = chain_of(v2.RandomApply([v2.RandomCrop(50)], p=0.5))
    rows = seeds_of(40)
    with pytest.raises(SampleError) as caught:
        chain.draw(rows, [20] * 40, [20] * 40)
    draws = torch.Generator()
    taken = [float(torch.rand(1, generator=draws.manual_seed(int(row[0])))) < 0.5 for row in rows]
    assert caught.value.sample == int(np.flatnonzero(taken)[0])
