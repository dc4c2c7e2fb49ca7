"""Head and tail: a cached row, finished live, is what the dataset itself gives."""

from __future__ import annotations

import gzip
import pickle
import random
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, random_split
from torchvision.datasets import MNIST, FakeData, ImageFolder
from torchvision.transforms import v2

from dataloaders.cache import CachedDataset, precompute
from dataloaders.cache.build.fingerprint import fingerprint
from dataloaders.cache.sample.cut import cuts_of, put
from dataloaders.errors import CacheError
from helpers.compare import assert_same

SIZE = 6
RESIZE = "Resize(size=20, interpolation=bilinear, max_size=None, antialias=True)"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of three small images of different sizes, some of them grey."""
    folder = tmp_path_factory.mktemp("photos")
    values = np.random.default_rng(1)
    for number in range(SIZE):
        kind = folder / f"class{number % 2}"
        kind.mkdir(exist_ok=True)
        shape = (24 + number, 30 - number) if number == 3 else (24 + number, 30 - number, 3)
        image = Image.fromarray(values.integers(0, 256, shape, dtype=np.uint8))
        image.save(kind / f"{number}.png")
    return folder


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., CachedDataset]:
    def build(dataset: Any, **options: Any) -> CachedDataset:
        return precompute(dataset, tmp_path / "a.h5", **{"num_workers": 0, **options})

    return build


def seeded(dataset: Any, index: int) -> Any:
    torch.manual_seed(index + 100)
    random.seed(index)
    np.random.seed(index)
    return dataset[index]


def assert_all_same(cached: CachedDataset, dataset: Any) -> None:
    assert len(cached) == len(dataset)
    for index in range(len(dataset)):
        assert_same(seeded(cached, index), seeded(dataset, index), strides=False)


def small(image: Any) -> Any:
    return image.resize((5, 5))


def noisy(image: torch.Tensor) -> torch.Tensor:
    return image + torch.rand(1)


def float32(lib: Any) -> list[Any]:
    if lib is v1:
        return [v1.ToTensor()]
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


Chain = Callable[[Any], list[Any]]
CHAINS: dict[str, tuple[Chain, list[str], list[str]]] = {
    "usual training": (
        lambda t: [t.Resize(20), t.RandomCrop(16), t.RandomHorizontalFlip(), *float32(t)],
        ["Resize"],
        ["RandomCrop", "RandomHorizontalFlip", "FLOAT"],
    ),
    "usual validation": (
        lambda t: [t.Resize(20), t.CenterCrop(16), *float32(t), t.Normalize([0.5] * 3, [0.2] * 3)],
        ["Resize", "CenterCrop"],
        ["FLOAT", "Normalize"],
    ),
    "random at once": (
        lambda t: [t.RandomResizedCrop(16), *float32(t)],
        [],
        ["RandomResizedCrop", "FLOAT"],
    ),
    "all deterministic, no floats": (
        lambda t: [t.Resize(20), t.CenterCrop(16)],
        ["Resize", "CenterCrop"],
        [],
    ),
    "floats before the random one": (
        lambda t: [t.Resize((20, 20)), *float32(t), t.RandomErasing(1.0)],
        ["Resize"],
        ["FLOAT", "RandomErasing"],
    ),
    "tensors first": (
        lambda t: [
            t.PILToTensor(),
            t.Resize(20),
            t.RandomCrop(16),
            t.ConvertImageDtype(torch.float32),
        ],
        ["PILToTensor", "Resize"],
        ["RandomCrop", "ConvertImageDtype"],
    ),
    "tensors, deterministic": (
        lambda t: [t.PILToTensor(), t.Resize(20), t.ConvertImageDtype(torch.float32)],
        ["PILToTensor", "Resize"],
        ["ConvertImageDtype"],
    ),
    "own code": (lambda t: [t.Resize(20), small, *float32(t)], ["Resize"], ["small", "FLOAT"]),
    "own random code": (
        lambda t: [t.Resize(20), *float32(t), noisy],
        ["Resize"],
        ["FLOAT", "noisy"],
    ),
    "nested": (
        lambda t: [t.Compose([t.Resize(20), t.Compose([t.RandomCrop(9)])]), *float32(t)],
        ["Resize"],
        ["RandomCrop", "FLOAT"],
    ),
    "random by chance": (
        lambda t: [t.Resize(20), t.RandomApply([t.Grayscale(3)], p=0.5), *float32(t)],
        ["Resize"],
        ["RandomApply", "FLOAT"],
    ),
}


def names(lines: tuple[str, ...], lib: Any) -> list[str]:
    found = [line.split("(")[0].replace("<function ", "").rstrip(">") for line in lines]
    if lib is v2 and found[:1] == ["ToImage"] and len(found) == 1:
        return []
    return ["FLOAT" if name in ("ToTensor", "ToDtype") else name for name in found]


@pytest.mark.parametrize("lib", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("name", CHAINS)
def test_rows_and_tail_are_the_dataset(
    name: str, lib: Any, photos: Path, build: Callable[..., CachedDataset]
) -> None:
    make, head, tail = CHAINS[name]
    dataset = ImageFolder(str(photos), transform=lib.Compose(make(lib)))
    cached = build(dataset)
    # v2 has one member more: ToImage, which stays in the head where only ToDtype follows it.
    assert [one for one in names(cached.index.head, lib) if one != "ToImage"] == head
    assert [one for one in names(cached.index.tail, lib) if one != "ToImage"] == tail
    assert_all_same(cached, dataset)


def test_uint8_stays_uint8(photos: Path, build: Callable[..., CachedDataset]) -> None:
    chain = v1.Compose([v1.Resize((20, 20)), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)])
    cached = build(ImageFolder(str(photos), transform=chain))
    assert cached.column("0").shape == (SIZE, 3, 20, 20)
    assert cached.column("0").dtype == np.uint8
    assert cached[0][0].dtype is torch.float32


def test_an_empty_chain(photos: Path, build: Callable[..., CachedDataset]) -> None:
    dataset = ImageFolder(str(photos), transform=v1.Compose([]))
    cached = build(dataset)
    assert cached.index.head == cached.index.tail == ()
    assert_all_same(cached, dataset)


def test_a_lone_transform_and_a_sequential(
    photos: Path, build: Callable[..., CachedDataset], tmp_path: Path
) -> None:
    lone = ImageFolder(str(photos), transform=v1.RandomCrop(10))
    assert_all_same(build(lone), lone)
    chain = nn.Sequential(v2.Resize(12), v2.RandomCrop(10))
    sequential = ImageFolder(str(photos), transform=chain)
    cached = build(sequential, overwrite=True)
    assert len(cached.index.head) == len(cached.index.tail) == 1
    assert_all_same(cached, sequential)


TRAIN = v1.Compose([v1.Resize(20), v1.RandomCrop(16), v1.ToTensor()])


def train() -> Any:
    return v1.Compose([v1.Resize(20), v1.RandomCrop(16), v1.ToTensor()])


class Wrapped(Dataset[Any]):
    """A user's own: a dict of what another one gives."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.inner[index]
        return {"index": index, "inputs": {"image": image}, "label": label}


def split_in_two(dataset: Any) -> Any:
    return random_split(dataset, [4, 2], generator=torch.Generator().manual_seed(1))[0]


HOLDERS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "Subset": lambda folder: Subset(folder(TRAIN), [5, 1, 1, 2]),
    "random_split": lambda folder: split_in_two(folder(TRAIN)),
    "ConcatDataset, one chain": lambda folder: ConcatDataset([folder(TRAIN), folder(TRAIN)]),
    "ConcatDataset, equal chains": lambda folder: ConcatDataset([folder(train()), folder(train())]),
    "Subset of ConcatDataset": lambda folder: Subset(
        ConcatDataset([folder(TRAIN), folder(TRAIN)]), [0, 7, 11]
    ),
    "StackDataset": lambda folder: StackDataset(a=folder(TRAIN), b=folder(train())),
    "own dict": lambda folder: Wrapped(Subset(folder(TRAIN), [3, 4])),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_wherever_the_dataset_is_held(
    name: str, photos: Path, build: Callable[..., CachedDataset]
) -> None:
    dataset = HOLDERS[name](lambda chain: ImageFolder(str(photos), transform=chain))
    cached = build(dataset)
    assert any("RandomCrop" in line for line in cached.index.tail)
    assert_all_same(cached, dataset)


def test_the_target_has_a_transform_too(
    photos: Path, build: Callable[..., CachedDataset], tmp_path: Path
) -> None:
    class Targets(ImageFolder):
        """Its target is an image."""

        def __getitem__(self, index: int) -> Any:
            image, _ = self.loader(self.samples[index][0]), 0
            assert self.transform is not None
            assert self.target_transform is not None
            return self.transform(image), self.target_transform(image)

    dataset = Targets(
        str(photos),
        transform=v1.Compose([v1.Resize(20), v1.RandomCrop(8)]),
        target_transform=v1.Compose([v1.Resize(12), v1.RandomCrop(6), v1.ToTensor()]),
    )
    cached = build(dataset)
    assert len(cached.tails) == 2
    assert cached.index.head[0] == f"dataset.transform: {RESIZE}"
    assert_all_same(cached, dataset)


def test_mnist(tmp_path: Path, build: Callable[..., CachedDataset]) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    values = np.random.default_rng(2).integers(0, 256, (9, 28, 28), dtype=np.uint8)
    labels = np.arange(9, dtype=np.uint8)
    for kind in ("train", "t10k"):
        for name, data in (("images-idx3", values), ("labels-idx1", labels)):
            shape = b"".join(size.to_bytes(4, "big") for size in data.shape)
            content = bytes([0, 0, 8, data.ndim]) + shape + data.tobytes()
            (raw / f"{kind}-{name}-ubyte").write_bytes(content)
            (raw / f"{kind}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    dataset = MNIST(
        str(tmp_path), transform=v1.Compose([v1.RandomRotation(10), v1.ToTensor()]), train=False
    )
    cached = build(dataset)
    assert cached.column("0").shape == (9, 1, 28, 28)
    assert np.array_equal(cached.column("0")[:, 0], values)
    assert_all_same(cached, dataset)


class Views:
    """Two crops of one image, as contrastive learning makes them."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> list[Any]:
        return [self.transform(image), self.transform(image)]


@pytest.mark.parametrize("head", [[], [v1.Resize(20)]], ids=["without head", "with head"])
def test_two_views_of_one_image(
    head: list[Any], photos: Path, build: Callable[..., CachedDataset]
) -> None:
    dataset = ImageFolder(str(photos), transform=Views(v1.Compose([*head, v1.RandomCrop(9)])))
    cached = build(dataset)
    assert_all_same(cached, dataset)
    (one, other), _ = seeded(cached, 1)
    assert one.tobytes() != other.tobytes()


def test_what_a_tail_takes_may_be_a_tuple(
    photos: Path, build: Callable[..., CachedDataset]
) -> None:
    chain = v1.Compose([v1.FiveCrop(12), stacked])
    dataset = ImageFolder(str(photos), transform=chain)
    cached = build(dataset)
    assert cached.index.head == ("FiveCrop(size=(12, 12))",)
    assert_all_same(cached, dataset)
    assert_all_same(pickle.loads(pickle.dumps(cached)), dataset)


def test_a_transform_that_was_replaced_is_the_only_one(
    photos: Path, build: Callable[..., CachedDataset]
) -> None:
    """What ImageFolder was made with stays in its ``transforms``, which it does not apply."""
    before, other_tail, other_head = (
        v1.Compose([v1.Resize((side, side)), crop, v1.ToTensor()])
        for side, crop in ((20, v1.RandomCrop(9)), (20, v1.RandomCrop(7)), (18, v1.RandomCrop(7)))
    )
    dataset = ImageFolder(str(photos), transform=before)
    build(dataset)
    dataset.transform = other_tail
    assert_all_same(build(dataset), dataset)
    assert fingerprint(dataset) == fingerprint(ImageFolder(str(photos), transform=other_tail))
    dataset.transform = other_head
    with pytest.raises(CacheError, match="head"):
        build(dataset)


def stacked(crops: Any) -> torch.Tensor:
    return torch.stack([v1.functional.to_tensor(crop) for crop in crops])


def test_a_sample_that_is_the_image_alone(build: Callable[..., CachedDataset]) -> None:
    dataset = Only(
        FakeData(4, (3, 12, 12), transform=v1.Compose([v1.Resize(10), v1.RandomCrop(8)]))
    )
    cached = build(dataset)
    assert cached.index.tail
    assert_all_same(cached, dataset)


class Only(Wrapped):
    def __getitem__(self, index: int) -> Any:
        return self.inner[index][0]


# What cannot be cut is kept whole, and must then be the same each time


class Joint(Dataset[Any]):
    """As VisionDataset with transforms=: image and target go through it together."""

    def __init__(self, transforms: Any) -> None:
        self.transforms = transforms

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        values = np.random.default_rng(index).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        return self.transforms(Image.fromarray(values), torch.tensor([index]))


class Reworked(Wrapped):
    """Works on what the transform gave."""

    def __getitem__(self, index: int) -> Any:
        image, label = self.inner[index]
        pixels = image.numpy() if isinstance(image, torch.Tensor) else np.array(image)
        return torch.from_numpy(pixels).float() / 2, label


class Seeded(Wrapped):
    """Its samples' crops are a function of the index."""

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        return self.inner[index]


class Sometimes(Wrapped):
    """Every other sample does not go through the transform."""

    def __getitem__(self, index: int) -> Any:
        inner = self.inner
        while hasattr(inner, "dataset"):
            inner = inner.dataset
        if index % 2:
            return self.inner[index]
        return v1.functional.to_tensor(inner.loader(inner.samples[index][0])), 0


def test_joint_transforms_are_kept_whole(build: Callable[..., CachedDataset]) -> None:
    dataset = Joint(v2.Compose([v2.Resize(10), v2.ToImage()]))
    cached = build(dataset)
    assert cached.index.tail == ()
    assert cached.index.head[0] == "Resize(size=[10], interpolation=bilinear, antialias=True)"
    assert_all_same(cached, dataset)


CANNOT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "joint": (
        lambda photos: Joint(v2.Compose([v2.RandomCrop(8), v2.ToImage()])),
        "Joint draws random numbers: .*sample 0 read twice differs in the values of '0' .*the "
        "transform is called with 2 values",
    ),
    "reworked": (
        lambda photos: Reworked(ImageFolder(str(photos), transform=TRAIN)),
        "Reworked draws random numbers: .*what the transform gives is nowhere in the sample",
    ),
    "different": (
        lambda photos: Sometimes(ImageFolder(str(photos), transform=TRAIN)),
        "nothing can stay live: (its transforms are not called|samples go through .*different)",
    ),
    "no chain": (
        lambda photos: ImageFolder(str(photos), transform=lambda image: TRAIN(image)),
        "ImageFolder draws random numbers: .*it holds no torchvision transform that could be cut",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_cut_and_is_random_is_refused(
    name: str, photos: Path, build: Callable[..., CachedDataset], tmp_path: Path
) -> None:
    make, message = CANNOT[name]
    dataset = make(photos)
    with pytest.raises(CacheError, match=message):
        build(dataset)
    with pytest.raises(CacheError, match="allow_random=True"):
        build(dataset)
    assert not (tmp_path / "a.h5").exists()
    cached = build(dataset, allow_random=True)
    assert cached.index.tail == ()
    assert_same(cached[1], cached[1])


def test_a_dataset_that_seeds_itself_is_kept_whole_if_random_numbers_are_allowed(
    photos: Path, build: Callable[..., CachedDataset]
) -> None:
    dataset = Seeded(ImageFolder(str(photos), transform=TRAIN))
    with pytest.raises(CacheError, match=r"Seeded draws .* seeded, the generator of torch, and .*"):
        build(dataset)
    cached = build(dataset, allow_random=True)
    assert cached.index.tail == ()
    assert_all_same(cached, dataset)


class LastDiffers(Wrapped):
    """One of many samples is not what the transform gave."""

    def __getitem__(self, index: int) -> Any:
        image, label = self.inner[index]
        return (image.copy() if index == 47 else image), label


def test_a_sample_that_differs_from_those_that_were_tried_is_an_error(
    build: Callable[..., CachedDataset],
) -> None:
    inner = FakeData(90, (3, 8, 8), transform=v1.Compose([v1.Resize(8), v1.RandomCrop(6)]))
    with pytest.raises(CacheError, match=r"sample 47 cannot be kept: .*in another way"):
        build(LastDiffers(inner))


def test_an_image_whose_exif_own_code_might_look_at_is_an_error(
    tmp_path: Path, build: Callable[..., CachedDataset]
) -> None:
    (tmp_path / "photos" / "class0").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    for number, options in enumerate([{}, {}, {"exif": exif}, {}, {}, {}, {}, {}, {}, {}]):
        image = Image.new("RGB", (20, 10 + number))
        image.save(tmp_path / "photos" / "class0" / f"{number}.jpg", **options)
    folder = str(tmp_path / "photos")
    own = ImageFolder(folder, transform=v1.Compose([small, v1.ToTensor()]))
    message = r"sample 2 cannot be kept: .*EXIF orientation.* small at dataset.transform.transforms"
    with pytest.raises(CacheError, match=message):
        build(own)
    known = ImageFolder(folder, transform=v1.Compose([v1.RandomCrop(8), v1.ToTensor()]))
    assert_all_same(build(known), known)


def test_the_users_dataset_is_left_as_it_is(
    photos: Path, build: Callable[..., CachedDataset]
) -> None:
    dataset = ImageFolder(str(photos), transform=TRAIN)
    before = dict(vars(dataset))
    members = list(TRAIN.transforms)
    build(dataset)
    assert vars(dataset) == before
    assert TRAIN.transforms == members


def test_the_ways_to_cut_are_tried_in_order() -> None:
    chain = v1.Compose([v1.Resize(20), v1.ToTensor(), v1.RandomErasing()])
    cuts, reason = cuts_of(FakeData(4, transform=chain))
    assert reason == ""
    assert [len(cut.head) for cut in cuts] == [1, 2]
    cuts, reason = cuts_of(FakeData(4, transform=v1.Compose([v1.Resize(20)])))
    assert (cuts, reason) == ([], "all of its transforms are deterministic")


class Floats(Wrapped):
    """Asks for floats of its transform."""

    def __getitem__(self, index: int) -> Any:
        image, label = self.inner[index]
        assert image.dtype is torch.float32
        return image, label


def test_the_second_way_is_taken_where_the_first_does_not_hold(
    photos: Path, build: Callable[..., CachedDataset]
) -> None:
    chain = v1.Compose([v1.Resize((20, 20)), v1.ToTensor(), v1.RandomErasing(1.0)])
    dataset = Floats(ImageFolder(str(photos), transform=chain))
    cached = build(dataset)
    assert cached.column("0").dtype == np.float32
    assert len(cached.index.tail) == 1
    assert_all_same(cached, dataset)


Pair = namedtuple("Pair", "left right")


def test_a_part_of_any_container_can_be_changed() -> None:
    sample = {"a": [1, (2, Pair(3, 4))], "b": 5}
    assert put(sample, ("a", 1, 1, "right"), str) == {"a": [1, (2, Pair(3, "4"))], "b": 5}
    assert put(sample, (), len) == 2
    assert sample == {"a": [1, (2, Pair(3, 4))], "b": 5}
