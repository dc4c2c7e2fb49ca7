"""Chains of transforms as flat lists, and where datasets hold them."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import v2

from dataloaders.transforms.find import Copies, NotCopyable, find_chains, find_generators
from dataloaders.transforms.kinds import _DETERMINISTIC, _RANDOM
from dataloaders.transforms.read import Kind, is_chain, read


def double(image: Any) -> Any:
    return image


class MyNormalize(v1.Normalize):
    """Somebody's own: a subclass may do anything."""


@pytest.mark.parametrize("lib", [v1, v2], ids=["v1", "v2"])
def test_a_compose_is_flattened_with_places_and_kinds(lib: Any) -> None:
    inner = lib.Compose([lib.RandomCrop(4), lib.Compose([lib.PILToTensor()])])
    tensors = nn.Sequential(lib.ConvertImageDtype(torch.float32), lib.Normalize([0.5], [0.5]))
    members = read(lib.Compose([lib.Resize(8), inner, tensors, double, MyNormalize([0.0], [1.0])]))
    assert [(m.name, m.where, m.kind) for m in members] == [
        ("Resize", "transform.transforms[0]", Kind.DETERMINISTIC),
        ("RandomCrop", "transform.transforms[1].transforms[0]", Kind.RANDOM),
        ("PILToTensor", "transform.transforms[1].transforms[1].transforms[0]", Kind.DETERMINISTIC),
        ("ConvertImageDtype", "transform.transforms[2][0]", Kind.DETERMINISTIC),
        ("Normalize", "transform.transforms[2][1]", Kind.DETERMINISTIC),
        ("double", "transform.transforms[3]", Kind.OPAQUE),
        ("MyNormalize", "transform.transforms[4]", Kind.OPAQUE),
    ]
    assert members[4].torchvision == "Normalize"
    assert members[6].torchvision is None


def test_lone_transforms_and_functions() -> None:
    (member,) = read(v1.ToTensor(), "dataset.transform")
    assert str(member) == "ToTensor at dataset.transform"
    assert is_chain(v1.ToTensor())
    assert not any(map(is_chain, (double, functools.partial(double), MyNormalize([0.0], [1.0]))))


@pytest.mark.parametrize("lib", [v1, v2], ids=["v1", "v2"])
def test_every_transform_of_torchvision_is_known(lib: Any) -> None:
    """One that a later torchvision adds belongs into kinds.py: until then it reads as opaque."""
    public = {
        name
        for name, value in vars(lib).items()
        if isinstance(value, type) and value.__module__.startswith(lib.__name__)
        if not issubclass(value, (str, int))
    }
    containers = {"Compose", "Lambda", "Transform", "InterpolationMode", "AutoAugmentPolicy"}
    assert public - containers - _DETERMINISTIC - _RANDOM == set()


DRAWING: dict[str, Any] = {
    "ColorJitter": lambda: v2.ColorJitter(0.1),
    "RandomHorizontalFlip": lambda: v2.RandomHorizontalFlip(),
    "AugMix": lambda: v2.AugMix(),
    "Resize": lambda: v2.Resize(5),
    "Normalize": lambda: v2.Compose([v2.ToDtype(torch.float32), v2.Normalize([0.5], [0.5])]),
}


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING.keys())
def test_random_members_are_those_that_draw(make: Any) -> None:
    before = torch.get_rng_state()
    make()(torch.zeros(3, 8, 8, dtype=torch.uint8))
    drew = not torch.equal(torch.get_rng_state(), before)
    assert drew == any(m.kind is Kind.RANDOM for m in read(make()))


class Views:
    """Two crops of one image, as contrastive learning makes them."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> list[Any]:
        return [self.transform(image), self.transform(image)]


class Wrapper(Dataset[Any]):
    def __init__(self, inner: Any, **held: Any) -> None:
        self.inner = inner
        self.__dict__.update(held)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def __len__(self) -> int:
        return len(self.inner)


def fake(transform: Any = None, **options: Any) -> FakeData:
    return FakeData(5, (3, 8, 8), transform=transform, **options)


CHAIN = v1.Compose([v1.ToTensor()])
OTHER = v2.Compose([v2.ToImage()])
HELD: dict[str, tuple[Any, dict[str, Any]]] = {
    "FakeData": (fake(CHAIN), {"dataset.transform": CHAIN}),
    "target": (
        fake(CHAIN, target_transform=OTHER),
        {"dataset.transform": CHAIN, "dataset.target_transform": OTHER},
    ),
    "Subset": (Subset(fake(CHAIN), [1]), {"dataset.dataset.transform": CHAIN}),
    "ConcatDataset": (
        ConcatDataset([fake(CHAIN), fake(OTHER)]),
        {"dataset.datasets[0].transform": CHAIN, "dataset.datasets[1].transform": OTHER},
    ),
    "StackDataset": (
        StackDataset(a=fake(CHAIN), b=fake(CHAIN)), {"dataset.datasets['a'].transform": CHAIN}
    ),
    "many": (ConcatDataset([fake(CHAIN)] * 100), {"dataset.datasets[0].transform": CHAIN}),
    "wrapper": (Wrapper(fake(CHAIN), extra=OTHER), {
        "dataset.inner.transform": CHAIN, "dataset.extra": OTHER,
    }),
    "dict": (Wrapper([1], chains={"train": CHAIN, "val": OTHER}), {
        "dataset.chains['train']": CHAIN, "dataset.chains['val']": OTHER,
    }),
    "callable": (fake(Views(CHAIN)), {"dataset.transform.transform": CHAIN}),
    "none": (fake(double), {}),
    "data": (Wrapper([[[[CHAIN]]]], more=[CHAIN] * 1000), {}),
}  # fmt: skip


@pytest.mark.parametrize(("dataset", "expected"), HELD.values(), ids=HELD.keys())
def test_chains_are_found_where_datasets_hold_them(dataset: Any, expected: dict[str, Any]) -> None:
    assert {found.where: found.chain for found in find_chains(dataset)} == expected


@pytest.mark.parametrize("name", [name for name, (_, expected) in HELD.items() if expected])
def test_a_copy_holds_others_and_the_original_is_as_it_was(name: str) -> None:
    dataset, expected = HELD[name]
    replacement = v1.Compose([double])
    before = [dict(vars(owner)) for owner in owners(dataset)]
    copied = Copies(dataset, lambda chain: replacement).dataset
    assert type(copied) is type(dataset)
    assert [dict(vars(owner)) for owner in owners(dataset)] == before
    assert {id(found.chain) for found in find_chains(copied)} == {id(replacement)}
    assert {found.where: found.chain for found in find_chains(dataset)} == expected


def test_a_transform_that_was_replaced_is_found_where_it_may_still_be_applied(
    tmp_path: Path,
) -> None:
    class Own(ImageFolder):
        def __getitem__(self, index: int) -> Any:
            image, target = self.loader(self.samples[index][0]), self.samples[index][1]
            return self.transforms(image, target) if index else self.transform(image)

    tmp_path.joinpath("class").mkdir()
    tmp_path.joinpath("class", "a.jpg").touch()
    for kind, also in ((ImageFolder, {}), (Own, {"dataset.transforms.transform": CHAIN})):
        dataset = kind(str(tmp_path), transform=CHAIN)
        dataset.transform = OTHER
        found = {found.where: found.chain for found in find_chains(dataset)}
        assert found == {"dataset.transform": OTHER, **also}


def owners(dataset: Any) -> list[Any]:
    inner = [getattr(dataset, "dataset", None), getattr(dataset, "inner", None)]
    parts = getattr(dataset, "datasets", [])
    inner += parts.values() if isinstance(parts, dict) else parts
    return [dataset, *(one for one in inner if hasattr(one, "__dict__"))]


class Closing(Wrapper):
    closed = 0

    def __del__(self) -> None:
        type(self).closed += 1


def test_a_dataset_with_a_del_is_not_copied() -> None:
    dataset = Closing(fake(CHAIN))
    with pytest.raises(NotCopyable, match="Closing has a __del__"):
        Copies(dataset, lambda chain: OTHER)
    assert dataset.closed == 0


def test_generators_that_datasets_and_transforms_hold() -> None:
    member: Any = Views(CHAIN)
    member.rng = np.random.default_rng(1)
    dataset: Any = Wrapper(fake(member), a=torch.Generator(), b=random.Random(1))
    found = find_generators(dataset)
    states = [get() for get, _ in found]
    draws = [
        (member.rng.random(), torch.rand(1, generator=dataset.a).item(), dataset.b.random())
        for _ in range(2)
        for _ in [[put(state) for (_, put), state in zip(found, states, strict=True)]]
    ]
    assert len(found) == 3
    assert draws[0] == draws[1]


def test_what_was_changed_by_hand_is_opaque() -> None:
    def kinds(transform: Any) -> list[Kind]:
        return [member.kind for member in read(v1.Compose([transform, v1.ToTensor()]))]

    for make in (
        lambda: v1.CenterCrop(4),
        lambda: v2.CenterCrop(4),
        lambda: v2.Compose([v2.RGB()]),
    ):
        known = kinds(make())
        assert Kind.OPAQUE not in known
        hooked, before, other = make(), make(), make()
        hooked.__dict__.setdefault("_forward_hooks", {})[0] = print
        before.__dict__.setdefault("_forward_pre_hooks", {})[0] = print
        other.forward = print
        for changed in (hooked, before, other):
            assert kinds(changed) == [Kind.OPAQUE, Kind.DETERMINISTIC]
