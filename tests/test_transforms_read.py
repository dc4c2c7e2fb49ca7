"""Chains of transforms as flat lists, and where datasets hold them."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import v2

from dataloaders.transforms.find import NotCopyable, copied, find_chains, find_generators
from dataloaders.transforms.read import Kind, is_chain, read


def double(image):
    return image


class MyNormalize(v1.Normalize):
    """Somebody's own: a subclass may do anything."""


@pytest.mark.parametrize("lib", [v1, v2], ids=["v1", "v2"])
def test_a_compose_is_flattened_with_places_and_kinds(lib):
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
    assert [member.torchvision for member in members[4:]] == ["Normalize", None, None]
    others = (double, partial(double), MyNormalize([0.0], [1.0]), lib.InterpolationMode.BILINEAR)
    assert not any(map(is_chain, (*others, lib.Lambda(double))))


def test_random_members_are_those_that_draw():
    normalize = v2.Compose([v2.ToDtype(torch.float32), v2.Normalize([0.5], [0.5])])
    flip = v2.RandomHorizontalFlip()
    for transform in (v2.ColorJitter(0.1), flip, v2.AugMix(), v2.Resize(5), normalize):
        before = torch.get_rng_state()
        transform(torch.zeros(3, 8, 8, dtype=torch.uint8))
        drew = not torch.equal(torch.get_rng_state(), before)
        assert drew == any(member.kind is Kind.RANDOM for member in read(transform))


class Views:
    """Two crops of one image, as contrastive learning makes them."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, image):
        return [self.transform(image), self.transform(image)]


class Wrapper(Dataset):
    def __init__(self, inner, **held):
        self.inner = inner
        self.__dict__.update(held)

    def __getitem__(self, index):
        return self.inner[index]

    def __len__(self):
        return len(self.inner)


def fake(transform=None, **options):
    return FakeData(5, (3, 8, 8), transform=transform, **options)


CHAIN = v1.Compose([v1.ToTensor()])
OTHER = v2.Compose([v2.ToImage()])
HELD = [
    (fake(CHAIN), {"transform": CHAIN}),
    (fake(CHAIN, target_transform=OTHER), {"transform": CHAIN, "target_transform": OTHER}),
    (Subset(fake(CHAIN), [1]), {"dataset.transform": CHAIN}),
    (
        ConcatDataset([fake(CHAIN), fake(OTHER)]),
        {"datasets[0].transform": CHAIN, "datasets[1].transform": OTHER},
    ),
    (StackDataset(a=fake(CHAIN), b=fake(CHAIN)), {"datasets['a'].transform": CHAIN}),
    (ConcatDataset([fake(CHAIN)] * 100), {"datasets[0].transform": CHAIN}),
    (Wrapper(fake(CHAIN), extra=OTHER), {"inner.transform": CHAIN, "extra": OTHER}),
    (Wrapper([1], of={"a": CHAIN, "b": OTHER}), {"of['a']": CHAIN, "of['b']": OTHER}),
    (fake(Views(CHAIN)), {"transform.transform": CHAIN}),
    (fake(double), {}),
    (Wrapper([[[[CHAIN]]]], more=[CHAIN] * 1000), {}),
]


def chains_in(dataset):
    return {found.where.removeprefix("dataset."): found.chain for found in find_chains(dataset)}


@pytest.mark.parametrize(("dataset", "expected"), HELD)
def test_chains_are_found_where_datasets_hold_them_and_replaced_in_a_copy(dataset, expected):
    assert chains_in(dataset) == expected
    other = {id(chain): v1.Compose([double]) for chain in (CHAIN, OTHER)}
    copy = copied(dataset, other)
    assert type(copy) is type(dataset)
    assert chains_in(copy).keys() == expected.keys()
    assert not set(map(id, chains_in(copy).values())) & other.keys()
    assert chains_in(dataset) == expected


def test_a_transform_that_was_replaced_is_found_where_it_may_still_be_applied(
    tmp_path,
):
    class Own(ImageFolder):
        def __getitem__(self, index):
            image, target = self.loader(self.samples[index][0]), self.samples[index][1]
            return self.transforms(image, target) if index else self.transform(image)

    tmp_path.joinpath("class").mkdir()
    tmp_path.joinpath("class", "a.jpg").touch()
    for kind, also in ((ImageFolder, {}), (Own, {"transforms.transform": CHAIN})):
        dataset = kind(str(tmp_path), transform=CHAIN)
        dataset.transform = OTHER
        assert chains_in(dataset) == {"transform": OTHER, **also}


class Closing(Wrapper):
    closed = 0

    def __del__(self):
        type(self).closed += 1


def test_a_dataset_with_a_del_is_not_copied():
    dataset = Closing(fake(CHAIN))
    with pytest.raises(NotCopyable, match="Closing has a __del__"):
        copied(dataset, {id(CHAIN): OTHER})
    assert dataset.closed == 0


def test_generators_that_datasets_and_transforms_hold():
    member = Views(CHAIN)
    member.rng = np.random.default_rng(1)
    dataset = Wrapper(fake(member), a=torch.Generator(), b=random.Random(1))
    found = [(put, get()) for get, put in find_generators(dataset)]
    draws = []
    for _ in range(2):
        for put, state in found:
            put(state)
        draws += [member.rng.random(), torch.rand(1, generator=dataset.a), dataset.b.random()]
    assert len(found) == 3
    assert draws[:3] == draws[3:]
