"""Head and tail: a cached row, finished live, is what the dataset itself gives."""

import pickle

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, Subset, random_split
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import v2

from helpers.cached import Point, assert_all_equal, built, refused, seeded
from helpers.compare import assert_same
from helpers.datasets import Made, MapDataset
from helpers.pictures import exif, folder, smooth


def small(image):
    return image.resize((5, 5))


class OwnCrop(v1.CenterCrop):
    """A subclass is somebody's own code."""


def stacked(crops):
    return torch.stack([v1.functional.to_tensor(crop) for crop in crops])


def float32(lib):
    if lib is v1:
        return [v1.ToTensor()]
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


CHAINS = {
    "usual training": (
        lambda t: [t.Resize(20), t.RandomCrop(16), t.RandomHorizontalFlip(), *float32(t)],
        ["Resize"], ["RandomCrop", "RandomHorizontalFlip", "FLOAT"],
    ),
    "usual validation": (
        lambda t: [t.Resize(20), t.CenterCrop(16), *float32(t), t.Normalize([0.5] * 3, [0.2] * 3)],
        ["Resize", "CenterCrop"], ["FLOAT", "Normalize"],
    ),
    "floats before the random one": (
        lambda t: [t.Resize((20, 20)), *float32(t), t.RandomErasing(1.0)],
        ["Resize"], ["FLOAT", "RandomErasing"],
    ),
    "tensors first": (
        lambda t: [t.PILToTensor(), t.Resize(20), t.RandomCrop(16),
                   t.ConvertImageDtype(torch.float32)],
        ["PILToTensor", "Resize"], ["RandomCrop", "ConvertImageDtype"],
    ),
    "own code": (lambda t: [t.Resize(20), small, *float32(t)], ["Resize"], ["small", "FLOAT"]),
    "own class": (lambda t: [t.Resize(9), OwnCrop(8), t.Lambda(small)],
                  ["Resize"], ["OwnCrop", "Lambda"]),
    "nested": (
        lambda t: [t.Compose([t.Resize(20), t.Compose([t.RandomCrop(9)])]), *float32(t)],
        ["Resize"], ["RandomCrop", "FLOAT"],
    ),
    "random by chance": (
        lambda t: [t.Resize(20), t.RandomApply([t.Grayscale(3)], p=0.5), *float32(t)],
        ["Resize"], ["RandomApply", "FLOAT"],
    ),
    "a tuple between": (lambda t: [t.FiveCrop(12), stacked], ["FiveCrop"], ["stacked"]),
    "all deterministic": (lambda t: [t.Compose([t.CenterCrop(9)])], ["CenterCrop"], []),
}  # fmt: skip


def names(lines):
    # v2 has one member more: ToImage, which stays in the head where only ToDtype follows it.
    found = [line.split("(")[0].replace("<function ", "").rstrip(">") for line in lines]
    floats = ("ToTensor", "ToDtype")
    return ["FLOAT" if name in floats else name for name in found if name != "ToImage"]


@pytest.mark.parametrize("lib", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("name", CHAINS)
def test_rows_and_tail_are_the_dataset(name, lib, path):
    make, head, tail = CHAINS[name]
    dataset = folder(lib.Compose(make(lib)))
    members, before = list(dataset.transform.transforms), dict(vars(dataset))
    cached = built(dataset, path)
    assert (names(cached.index.head), names(cached.index.tail)) == (head, tail)
    assert cached.columns[0].dtype == "|u1"  # though floats become of it
    assert_all_equal(pickle.loads(pickle.dumps(cached)), dataset)
    assert (vars(dataset), dataset.transform.transforms) == (before, members)


def train():
    return v1.Compose([v1.Resize(20), v1.RandomCrop(16), v1.ToTensor()])


TRAIN = train()


class Wrapped(MapDataset):
    """A user's own: what a function makes of what another one gives."""

    def __init__(self, inner, change):
        super().__init__(None, len(inner), inner=inner, change=change)

    def sample(self, index):
        return self.change(index, *self.inner[index])


class Views:
    """Two crops of one image, as contrastive learning makes them."""

    def __init__(self, transform):
        self.transform = transform

    def __call__(self, image):
        return [self.transform(image), self.transform(image)]


HOLDERS = {
    "random_split": lambda folder: random_split(folder(TRAIN), [4, 7])[0],
    "Subset of ConcatDataset of equal chains": lambda folder: Subset(
        ConcatDataset([folder(TRAIN), folder(train())]), [0, 7, 11]
    ),
    "own dict": lambda folder: Wrapped(
        Subset(folder(TRAIN), [3, 4]),
        lambda index, image, label: {"index": index, "inputs": {"image": image}, "label": label},
    ),
    "a part of a namedtuple": lambda folder: Wrapped(
        folder(TRAIN), lambda index, image, label: {"a": [1, (2, Point(3, image))], "b": label}
    ),
    "two views": lambda folder: folder(Views(TRAIN)),
    "one transform": lambda folder: folder(v1.RandomCrop(10)),
    "Sequential": lambda folder: folder(nn.Sequential(v2.Resize(12), v2.RandomCrop(10))),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_wherever_the_dataset_is_held(name, path):
    dataset = HOLDERS[name](folder)
    cached = built(dataset, path)
    cached.namedtuples = {("Point", ("x", "y")): Point}
    assert any("RandomCrop" in line for line in cached.index.tail) or "views" in name
    assert_all_equal(cached, dataset)
    if "views" in name:
        one, other = seeded(cached, 1)[0]
        assert np.asarray(one).tobytes() != np.asarray(other).tobytes()


def test_a_transform_that_was_replaced_is_the_only_one(path):
    """What ImageFolder was made with stays in its ``transforms``, which it does not apply."""
    before, other_tail, other_head = (
        v1.Compose([v1.Resize((side, side)), v1.RandomCrop(crop), v1.ToTensor()])
        for side, crop in ((20, 9), (20, 7), (18, 7))
    )
    dataset = folder(before)
    built(dataset, path)
    dataset.transform = other_tail
    assert_all_equal(built(dataset, path), dataset)
    assert_all_equal(built(folder(other_tail), path, check="contents"), dataset)
    dataset.transform = other_head
    refused("head", built, dataset, path)


# What cannot be cut is kept whole, and must then be the same each time


class Joint(Made):
    """As VisionDataset with transforms=: image and target go through it together."""

    size = 4

    def sample(self, index):
        return self.transforms(smooth(index, 12, 12), torch.tensor([index]))


def reworked(index, image, label):
    """Works on what the transform gave."""
    pixels = image.numpy() if isinstance(image, torch.Tensor) else np.array(image)
    return torch.from_numpy(pixels).float() / 2, label


class Seeded(Wrapped):
    """Its samples' crops are a function of the index."""

    def sample(self, index):
        torch.manual_seed(index)
        return self.inner[index]


class Closing(ImageFolder):
    """A copy of it would close what it has open."""

    def __del__(self):
        pass


class Sometimes(ImageFolder):
    """Every other sample does not go through the transform."""

    def __getitem__(self, index):
        if index % 2:
            return super().__getitem__(index)
        return v1.functional.to_tensor(self.loader(self.samples[index][0])), 0


CANNOT = {
    "joint": (
        lambda: Joint(transforms=v2.Compose([v2.RandomCrop(8), v2.ToImage()])),
        "Joint draws random numbers: .*sample 0 read twice differs in the values of '0' .*the "
        "transform is called with 2 values",
    ),
    "reworked": (
        lambda: Wrapped(folder(TRAIN), reworked),
        "Wrapped draws random numbers: .*what the transform gives is nowhere in the sample",
    ),
    "different": (
        lambda: Sometimes(folder().root, TRAIN),
        "nothing can stay live: (its transforms are not called|samples go through .*different)",
    ),
    "closing": (lambda: Closing(folder().root, TRAIN), "Closing draws .*: Closing has a __del__"),
    "no chain": (
        lambda: Subset(folder(lambda image: TRAIN(image)), range(6)),
        "ImageFolder draws random numbers: .*it holds no torchvision transform that could be cut",
    ),
    "seeded": (
        lambda: Seeded(folder(TRAIN), None),
        r"Seeded draws .* seeded, the generator of torch, and .*",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_cut_and_is_random_is_refused(name, path):
    make, message = CANNOT[name]
    dataset = make()
    refused(f"{message}.*allow_random=True", built, dataset, path)
    cached = built(dataset, path, allow_random=True)
    assert cached.index.tail == ()
    assert_same(cached[1], cached[1])
    if name == "seeded":
        assert_all_equal(cached, dataset)


def test_a_sample_that_differs_from_those_that_were_tried_is_an_error(path):
    """One of many samples is not what the transform gave."""
    inner = FakeData(90, (3, 8, 8), transform=v1.Compose([v1.Resize(8), v1.RandomCrop(6)]))

    def change(index, image, label):
        return (image.copy() if index == 47 else image), label

    refused(r"sample 47 cannot be kept: .*in another way", built, Wrapped(inner, change), path)


def test_an_image_whose_exif_own_code_might_look_at_is_an_error(tmp_path, path):
    (tmp_path / "photos" / "class0").mkdir(parents=True)
    for number in range(10):
        options = {"exif": exif()} if number == 2 else {}
        image = Image.new("RGB", (20, 10 + number))
        image.save(tmp_path / "photos" / "class0" / f"{number}.jpg", **options)
    own, known = (
        ImageFolder(tmp_path / "photos", v1.Compose([first, v1.ToTensor()]))
        for first in (small, v1.RandomCrop(8))
    )
    message = r"sample 2 cannot be kept: .*EXIF orientation.* small at dataset.transform.transforms"
    refused(message, built, own, path)
    assert_all_equal(built(known, path), known)
