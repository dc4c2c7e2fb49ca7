"""The device tail: equal to the dataset's own output to the bit, or refused with a reason."""

from __future__ import annotations

import math
import pickle
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from torchvision import tv_tensors
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import v2

from dataloaders.batches.tree import leaves
from dataloaders.errors import BackendUnavailable, OptionError
from dataloaders.specification import view_of
from dataloaders.transforms import NoTail, Tail, device_tail
from dataloaders.transforms.proof import _COLLATIONS
from dataloaders.transforms.table import every_byte, same_bits, tables_of
from dataloaders.transforms.ways import Arithmetic, Lookup, way_for
from helpers.compare import assert_same, generator_states, seed_everything

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
F32 = torch.float32
CPU = torch.device("cpu")


def picture(index: int, mode: str = "RGB", size: tuple[int, int] = (12, 10)) -> Image.Image:
    """A PIL image of ``size`` (width, height) with every sort of value."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(index).bytes(size[0] * size[1] * channels)
    if mode == "1":
        return Image.frombytes("L", size, pixels).convert("1")
    return Image.frombytes(mode, size, pixels)


class Pictures(Dataset[Any]):
    """(transform(image), index), as most of the datasets that people write themselves."""

    def __init__(self, transform: Any, mode: str = "RGB", size: int = 9, **held: Any) -> None:
        self.transform = transform
        self.mode = mode
        self.size = size
        self.__dict__.update(held)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.transform(picture(index, self.mode)), index


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": 4, **options}
    return DataLoader(dataset, **options)


def tail_of(loader: DataLoader[Any], **options: Any) -> Tail:
    tail = device_tail(loader, **options)
    assert isinstance(tail, Tail), tail
    return tail


def reason_of(loader: DataLoader[Any]) -> str:
    tail = device_tail(loader)
    assert isinstance(tail, NoTail), "proved"
    return tail.reason


def batches_with(tail: Tail, loader: DataLoader[Any]) -> Iterator[Any]:
    changes = tail.changes(loader)
    assert changes is not None
    for batch in view_of(loader, **changes):
        assert not any(leaf.is_floating_point() and leaf.ndim >= 3 for leaf in leaves(batch))
        yield tail.apply(batch)


def check(loader: DataLoader[Any]) -> Tail:
    """Two epochs through the tail are torch's to the bit, random states included."""
    tail = tail_of(loader)
    seed_everything()
    expected = [list(loader) for _ in range(2)], generator_states(loader)
    seed_everything()
    found = [list(batches_with(tail, loader)) for _ in range(2)], generator_states(loader)
    assert_same(found, expected)
    assert tail.exact
    assert tail.largest_difference == 0.0
    return tail


def quiet_v2_to_tensor() -> Any:
    with pytest.warns(UserWarning, match="deprecated"):
        return v2.ToTensor()


TAILS: dict[str, Callable[[], Any]] = {
    "v1": lambda: v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)]),
    "v1, no Normalize": lambda: v1.Compose([v1.ToTensor()]),
    "v1, lone ToTensor": v1.ToTensor,
    "v1, PILToTensor": lambda: v1.Compose(
        [v1.PILToTensor(), v1.ConvertImageDtype(F32), v1.Normalize(MEAN, STD)]
    ),
    "v1, in place": lambda: v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD, inplace=True)]),
    "v1, tensors": lambda: v1.Compose(
        [v1.ToTensor(), v1.Normalize(torch.tensor(MEAN), torch.tensor(STD))]
    ),
    "v1, one number": lambda: v1.Compose([v1.ToTensor(), v1.Normalize(0.5, 0.25)]),
    "v1, twice": lambda: v1.Compose(
        [v1.ToTensor(), v1.Normalize(MEAN, STD), v1.Normalize((0.1,), (3.0,))]
    ),
    "v1, nested": lambda: v1.Compose(
        [v1.Resize(8), v1.Compose([v1.RandomCrop(6), v1.ToTensor()]), v1.Normalize(MEAN, STD)]
    ),
    "v1, random head": lambda: v1.Compose(
        [
            v1.RandomResizedCrop(7), v1.RandomHorizontalFlip(), v1.ColorJitter(0.2, 0.2, 0.2, 0.1),
            v1.ToTensor(), v1.Normalize(MEAN, STD),
        ]
    ),
    "v2": lambda: v2.Compose([v2.ToImage(), v2.ToDtype(F32, scale=True), v2.Normalize(MEAN, STD)]),
    "v2, on tensors": lambda: v2.Compose(
        [
            v2.ToImage(), v2.RandomResizedCrop(7, antialias=True), v2.RandomHorizontalFlip(),
            v2.ToDtype(F32, scale=True), v2.Normalize(list(MEAN), list(STD)),
        ]
    ),
    "v2, pure": lambda: v2.Compose(
        [v2.ToImage(), v2.ToDtype(F32, scale=True), v2.ToPureTensor(), v2.Normalize(MEAN, STD)]
    ),
    "v2, pure at the end": lambda: v2.Compose(
        [v2.PILToTensor(), v2.ToDtype(F32, True), v2.Normalize(MEAN, STD, True), v2.ToPureTensor()]
    ),
    "v2, old names": lambda: v2.Compose(
        [v2.PILToTensor(), v2.ConvertImageDtype(F32), v2.Normalize(MEAN, STD)]
    ),
    "v2.ToTensor": lambda: v2.Compose([quiet_v2_to_tensor(), v2.Normalize(MEAN, STD)]),
    "v2, unscaled": lambda: v2.Compose([v2.ToImage(), v2.ToDtype(F32)]),
    "v2, half": lambda: v2.Compose([v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]),
    "v2, double": lambda: v2.Compose(
        [v2.ToImage(), v2.ToDtype(torch.float64, scale=True), v2.Normalize(MEAN, STD)]
    ),
    "mixed": lambda: v2.Compose([v1.ToTensor(), v2.Normalize(MEAN, STD)]),
    "Sequential": lambda: torch.nn.Sequential(
        v2.ToImage(), v2.RandomCrop(5), v2.ToDtype(F32, scale=True), v2.Normalize(MEAN, STD)
    ),
    "Sequential inside": lambda: v1.Compose(
        [v1.PILToTensor(), torch.nn.Sequential(v1.ConvertImageDtype(F32), v1.Normalize(MEAN, STD))]
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", TAILS.values(), ids=TAILS.keys())
@pytest.mark.thinned(4)
def test_every_sort_of_tail_is_the_users_own_to_the_bit(make: Callable[[], Any]) -> None:
    tail = check(loader_of(Pictures(make()), shuffle=True))
    assert tail.bytes_saved > 0
    assert tail.samples_read >= 4


@pytest.mark.parametrize("mode", ["L", "1", "P", "LA", "RGBA", "CMYK"])
@pytest.mark.parametrize("lib", ["v1", "v2"])
def test_every_number_of_channels(mode: str, lib: str) -> None:
    channels = len(picture(0, mode).getbands())
    normalize = (MEAN * 2)[:channels], (STD * 2)[:channels]
    if lib == "v1":
        chain: Any = v1.Compose([v1.ToTensor(), v1.Normalize(*normalize)])
    elif mode == "1":
        pytest.skip("torchvision gives bool tensors for mode 1, whose floats are not of bytes")
    else:
        chain = v2.Compose([v2.ToImage(), v2.ToDtype(F32, scale=True), v2.Normalize(*normalize)])
    tail = check(loader_of(Pictures(chain, mode)))
    assert tail.bytes_saved == channels * 120 * 3


def test_v2_makes_three_channels_of_one() -> None:
    chain = v2.Compose([v2.ToImage(), v2.ToDtype(F32, scale=True), v2.Normalize(MEAN, STD)])
    check(loader_of(Pictures(chain, "L")))
    check(loader_of(ConcatDataset([Pictures(chain, "L"), Pictures(chain)]), batch_size=7))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.nightly
def test_any_numbers_in_any_composition(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["L", "RGB", "RGBA"]))
    channels = len(mode)
    lib = data.draw(st.sampled_from([v1, v2]))
    numbers = st.lists(st.floats(-1e3, 1e3, width=32), min_size=channels, max_size=channels)
    positive = st.lists(st.floats(2**-40, 1e6, width=32), min_size=channels, max_size=channels)
    members: list[Any] = [lib.RandomCrop(5)] if data.draw(st.booleans()) else []
    if lib is v1 and data.draw(st.booleans()):
        members.append(v1.ToTensor())
    elif lib is v1:
        members += [v1.PILToTensor(), v1.ConvertImageDtype(F32)]
    else:
        members += [v2.ToImage(), v2.ToDtype(F32, scale=data.draw(st.booleans()))]
    for _ in range(data.draw(st.integers(0, 2))):
        members.append(
            lib.Normalize(data.draw(numbers), data.draw(positive), inplace=data.draw(st.booleans()))
        )
    split = data.draw(st.integers(0, len(members) - 1))
    chain = lib.Compose([*members[:split], lib.Compose(members[split:])])
    check(loader_of(Pictures(chain, mode, size=3), batch_size=data.draw(st.integers(1, 3))))


# Datasets ------------------------------------------------------------------------------------


def normalized(lib: Any = v1) -> Any:
    if lib is v1:
        return v1.Compose([v1.RandomCrop(8), v1.ToTensor(), v1.Normalize(MEAN, STD)])
    return v2.Compose(
        [v2.ToImage(), v2.RandomCrop(8), v2.ToDtype(F32, scale=True), v2.Normalize(MEAN, STD)]
    )


class TwoViews:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> list[Any]:
        return [self.transform(image), self.transform(image)]


class Pair(Pictures):
    """Two images a sample by one transform, and a mask of bytes that is none."""

    def __getitem__(self, index: int) -> Any:
        mask = torch.full((1, 8, 8), index, dtype=torch.uint8)
        first, second = self.transform(picture(index)), self.transform(picture(index + 1))
        return {"a": first, "mask": mask, "b": second, "name": f"n{index}", "none": 1.5}


class Both(Pictures):
    """Image and mask through one joint v2 transform."""

    def __getitem__(self, index: int) -> Any:
        mask = tv_tensors.Mask(torch.full((10, 12), index, dtype=torch.uint8))
        return self.transform(tv_tensors.Image(picture(index)), {"mask": mask, "label": index})


class Named(NamedTuple):
    image: Any
    label: int


class Tuples(Pictures):
    def __getitem__(self, index: int) -> Any:
        return Named(self.transform(picture(index)), index)


class Bulk(Pictures):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Arrays(Pictures):
    """Hands out NumPy arrays, as its transform's result and as an image for it."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(np.asarray(picture(index)).copy()).numpy(), index


class OwnGenerator(Pictures):
    def __getitem__(self, index: int) -> Any:
        image = picture(index)
        if self.rng.random() < 0.5:  # type: ignore[attr-defined]
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self.transform(image), self.rng.integers(100)  # type: ignore[attr-defined]


class Flipping(Pictures):
    """Moves pixels after the transform, which is the same for bytes and floats."""

    def __getitem__(self, index: int) -> Any:
        image = self.transform(picture(index))
        return image.flip(-1) if random.random() < 0.5 else image, np.random.rand()


def segmentation(lib: Any) -> Any:
    return FakeData(
        9, (3, 12, 12), transform=normalized(lib), target_transform=v1.Lambda(lambda t: t + 0)
    )


DATASETS: dict[str, Callable[[], Any]] = {
    "FakeData": lambda: FakeData(9, (3, 12, 12), transform=normalized()),
    "FakeData, v2": lambda: FakeData(9, (3, 12, 12), transform=normalized(v2)),
    "target_transform": lambda: segmentation(v1),
    "Subset": lambda: Subset(Pictures(normalized()), [3, 1, 8, 5, 5]),
    "ConcatDataset": lambda: ConcatDataset([Pictures(normalized()), Pictures(normalized())]),
    "StackDataset": lambda: StackDataset(x=Pictures(normalized()), y=list(range(9))),
    "two views": lambda: Pictures(TwoViews(normalized())),
    "two images and a mask": lambda: Pair(normalized()),
    "joint": lambda: Both(normalized(v2)),
    "namedtuple": lambda: Tuples(normalized()),
    "getitems": lambda: Bulk(normalized(v2)),
    "arrays": lambda: Arrays(v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)])),
    "own generator": lambda: OwnGenerator(normalized(), rng=np.random.default_rng(4)),
    "moved pixels": lambda: Flipping(normalized()),
}


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
@pytest.mark.thinned(3)
def test_every_sort_of_dataset(make: Callable[[], Any]) -> None:
    loader, dataset = loader_of(make()), make()
    tail = tail_of(loader)
    torch_loader = loader_of(dataset)
    seed_everything()
    expected = [list(torch_loader) for _ in range(2)]
    seed_everything()
    assert_same([list(batches_with(tail, loader)) for _ in range(2)], expected)


def test_image_folder_by_workers(tmp_path: Path) -> None:
    for index in range(6):
        folder = tmp_path / f"class{index % 2}"
        folder.mkdir(exist_ok=True)
        picture(index, size=(20, 16)).save(folder / f"{index}.{'png' if index < 3 else 'jpg'}")
    loader = loader_of(ImageFolder(tmp_path, normalized()), shuffle=True, num_workers=2)
    tail = check(loader)
    assert tail.samples_read == 4


@pytest.mark.parametrize("name", ["v1", "v2", "Sequential", "v1, lone ToTensor"])
def test_the_copy_pickles_as_spawned_workers_need_it(name: str) -> None:
    loader = loader_of(Pictures(TwoViews(TAILS[name]())))
    changes = tail_of(loader).changes(loader)
    assert changes is not None
    seed_everything()
    (expected, _), label = changes["dataset"][3]
    seed_everything()
    (found, _), other_label = pickle.loads(pickle.dumps(changes["dataset"]))[3]
    assert_same(found, expected)
    assert found.dtype is torch.uint8
    assert label == other_label


def test_nothing_of_the_users_is_changed() -> None:
    chain = normalized()
    dataset = FakeData(9, (3, 12, 12), transform=chain)
    members, held = list(chain.transforms), dict(vars(dataset))
    loader = loader_of(dataset)
    attributes = dict(vars(loader))
    seed_everything()
    before = generator_states(loader)
    tail = tail_of(loader)
    assert_same(generator_states(loader), before)
    list(batches_with(tail, loader))
    assert chain.transforms == members
    assert dict(vars(dataset)) == held
    assert {
        name: value for name, value in vars(loader).items() if attributes[name] is not value
    } == {}


class Counting(Pictures):
    def __getitem__(self, index: int) -> Any:
        self.reads = getattr(self, "reads", 0) + 1
        return super().__getitem__(index)


def test_what_reading_leaves_behind_stays_in_throwaway_copies() -> None:
    dataset = Counting(normalized())
    loader = loader_of(dataset)
    tail = tail_of(loader)
    assert not hasattr(dataset, "reads")
    changes = tail.changes(loader)
    assert changes is not None
    assert not hasattr(changes["dataset"], "reads")


def test_the_datasets_own_generator_is_where_it_was() -> None:
    dataset = OwnGenerator(normalized(), rng=np.random.default_rng(4))
    state = dataset.rng.bit_generator.state  # type: ignore[attr-defined]
    tail_of(loader_of(dataset))
    assert dataset.rng.bit_generator.state == state  # type: ignore[attr-defined]


# Batches -------------------------------------------------------------------------------------


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def as_dict(samples: list[Any]) -> dict[str, Any]:
    return {
        "images": torch.stack([sample[0] for sample in samples]),
        "ids": [s[1] for s in samples],
    }


class Batch:
    def __init__(self, samples: list[Any]) -> None:
        self.images, self.labels = default_collate(samples)

    def to(self, device: Any) -> Batch:
        return self


@pytest.mark.parametrize("collate", [as_list, as_dict, Batch])
@pytest.mark.parametrize("lib", [v1, v2], ids=["v1", "v2"])
def test_collate_functions_that_only_arrange(collate: Any, lib: Any) -> None:
    check(loader_of(Pictures(normalized(lib)), collate_fn=collate))


def test_images_of_different_sizes_in_a_list() -> None:
    class Sizes(Pictures):
        def __getitem__(self, index: int) -> Any:
            return self.transform(picture(index, size=(8 + index, 9))), index

    check(loader_of(Sizes(TAILS["v1"]()), collate_fn=as_list))
    check(loader_of(Sizes(TAILS["v2"]()), collate_fn=as_list))  # tv_tensors stay tv_tensors
    check(loader_of(Sizes(TAILS["v1, PILToTensor"]()), batch_size=None))


def test_a_short_last_batch_and_one_sample() -> None:
    check(loader_of(Pictures(normalized()), batch_size=8))
    check(loader_of(Pictures(normalized(), size=1), batch_size=8))
    check(loader_of(Pictures(normalized()), batch_sampler=[[1, 2, 3], [4], [5, 6]], batch_size=1))


def test_one_leaf_twice_and_keys_stay() -> None:
    tail = tail_of(loader_of(Pictures(normalized())))
    image = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    label = torch.arange(2)
    batch = {"x": image, "y": [label, image], "z": "text"}
    found = tail.apply(batch)
    assert list(found) == ["x", "y", "z"]
    assert found["y"][0] is label
    assert torch.equal(found["x"], found["y"][1])
    assert batch["x"] is image


# Refusals ------------------------------------------------------------------------------------


class Brightening(Pictures):
    def __getitem__(self, index: int) -> Any:
        return self.transform(picture(index)) * 1.5, index


class Erasing(Pictures):
    """Only now and then: zero is another thing before Normalize than after it."""

    def __getitem__(self, index: int) -> Any:
        erase = torch.rand(1) < 0.15
        image = self.transform(picture(index))
        if erase:
            image[:, :3, :3] = 0
        return image, index


class Floating(Pictures):
    def __getitem__(self, index: int) -> Any:
        return self.transform(picture(index)).float(), index


class Summing(Pictures):
    def __getitem__(self, index: int) -> Any:
        image = self.transform(picture(index))
        return image, image.float().mean()


class ByHand(Pictures):
    def __getitem__(self, index: int) -> Any:
        return self.norm(self.transform(picture(index))), index  # type: ignore[attr-defined]


class Broken(Pictures):
    def __getitem__(self, index: int) -> Any:
        if index:
            raise OSError("truncated file")
        return super().__getitem__(index)


class Endless(Pictures):
    def __len__(self) -> int:
        raise TypeError("no length")


class Stream(IterableDataset[Any]):
    transform = normalized()

    def __iter__(self) -> Iterator[Any]:
        return iter([self.transform(picture(0))])


class Unused(Pictures):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(3, 8, 8), index


class Slotted(Pictures):
    def __del__(self) -> None:
        pass


class Caching(Pictures):
    """Keeps what the transform made, for every copy of it."""

    def __getitem__(self, index: int) -> Any:
        cache: dict[int, Any] = self.cache  # type: ignore[attr-defined]
        if index not in cache:
            cache[index] = super().__getitem__(index)
        return cache[index]


class NotImages(Pictures):
    def __getitem__(self, index: int) -> Any:
        return self.transform(np.ones((4, 5, 3), np.float32)), index


def padded(samples: list[Any]) -> Any:
    """Pads with zeros to the largest, as detection does; here all have one size."""
    images = [image for image, _ in samples]
    height, width = (max(image.shape[d] for image in images) for d in (1, 2))
    batch = images[0].new_zeros(len(images), 3, height, width)
    for number, image in enumerate(images):
        batch[number, :, : image.shape[1], : image.shape[2]] = image
    return batch


def now_and_then(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    if random.random() < 0.3:
        images = images.mul(0.5).add(images.flip(0), alpha=0.5)
    return images, labels


def mix(samples: list[Any]) -> Any:
    return v2.MixUp(num_classes=9)(*default_collate(samples))


def opaque(image: Any) -> Any:
    return image


def chain(*members: Any) -> Any:
    return v1.Compose([*members])


FLOATS = v1.ToTensor(), v1.Normalize(MEAN, STD)
REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no transform": (
        lambda: {"dataset": TensorDataset(torch.ones(4, 3, 2, 2))},
        "TensorDataset holds no torchvision transform",
    ),
    "a function": (
        lambda: {"dataset": Pictures(opaque)}, "the transform of Pictures is opaque, which is not",
    ),
    "ends in a function": (
        lambda: {"dataset": Pictures(chain(*FLOATS, opaque))},
        r"the chain ends in opaque at dataset.transform.transforms\[2\]",
    ),
    "ends in RandomErasing": (
        lambda: {"dataset": Pictures(chain(*FLOATS, v1.RandomErasing()))},
        r"ends in RandomErasing at dataset.transform.transforms\[2\].*before ToTensor",
    ),
    "between": (
        lambda: {"dataset": Pictures(chain(v1.ToTensor(), v1.RandomErasing(), FLOATS[1]))},
        r"Normalize at .*\[2\] gets floats: RandomErasing at .*\[1\] stands between",
    ),
    "no floats": (lambda: {"dataset": Pictures(chain(v1.PILToTensor()))}, "makes no floats"),
    "only Normalize": (
        lambda: {"dataset": Pictures(chain(FLOATS[1]))}, "gets floats from the dataset itself",
    ),
    "dict of dtypes": (
        lambda: {"dataset": Pictures(chain(v2.ToDtype({tv_tensors.Image: F32}, True)))},
        "has a dict of dtypes",
    ),
    "own subclass": (
        lambda: {"dataset": Pictures(chain(v1.ToTensor(), OwnNormalize(MEAN, STD)))},
        "ends in OwnNormalize",
    ),
    "arithmetic": (
        lambda: {"dataset": Brightening(normalized())}, "Brightening works on the image after",
    ),
    "rare arithmetic": (lambda: {"dataset": Erasing(normalized())}, "Erasing works on the image"),
    "conversion": (lambda: {"dataset": Floating(normalized())}, "Floating works on the image"),
    "statistics": (lambda: {"dataset": Summing(normalized())}, "Summing works on the image"),
    "members by hand": (
        lambda: {"dataset": ByHand(v1.ToTensor(), norm=FLOATS[1])},
        "ByHand cannot be read without the members that would move: TypeError",
    ),
    "unreadable": (
        lambda: {"dataset": Broken(normalized())},
        r"reading samples \[0, 3, 5, 8\] of Broken failed: OSError: truncated file",
    ),
    "no length": (lambda: {"dataset": Endless(normalized())}, r"Endless has no len\(\)"),
    "empty": (
        lambda: {"dataset": Pictures(normalized(), size=0)},
        r"Pictures has no len\(\) or no samples",
    ),
    "stream": (lambda: {"dataset": Stream()}, "Stream has no samples by index"),
    "unused": (lambda: {"dataset": Unused(normalized())}, "comes from its transform unchanged|"
               "Unused works on the image after"),
    "del": (lambda: {"dataset": Slotted(normalized())}, "Slotted has a __del__"),
    "cache": (
        lambda: {"dataset": Caching(normalized(), cache={})}, "comes from its transform unchanged",
    ),
    "floats in": (lambda: {"dataset": NotImages(chain(*FLOATS))}, "only uint8 images of"),
    "greyscale, three means, v1": (
        lambda: {"dataset": Pictures(chain(*FLOATS), "L")}, "failed: RuntimeError: .*shape",
    ),
    "no means of that number": (
        lambda: {"dataset": Pictures(chain(v1.ToTensor(), v1.Normalize([0.0] * 3, [0.0] * 3)))},
        "could not be run on an image",
    ),
    "padding": (
        lambda: {"dataset": Pictures(normalized()), "collate_fn": padded},
        "collate_fn padded works on the values of images .*different sizes",
    ),
    "mixing": (
        lambda: {"dataset": Pictures(normalized()), "collate_fn": mix}, "collate_fn mix works on",
    ),
    "mixing now and then": (
        lambda: {"dataset": Pictures(normalized()), "collate_fn": now_and_then},
        "collate_fn now_and_then works on the values of images",
    ),
    "sizes that do not stack": (
        lambda: {"dataset": ConcatDataset([Pictures(chain(*FLOATS)), Pictures(normalized())])},
        "collating samples .* failed: RuntimeError",
    ),
    "masks in a list": (
        lambda: {"dataset": Pair(normalized()), "collate_fn": as_list}, "at places that change",
    ),
}  # fmt: skip


class OwnNormalize(v1.Normalize):
    pass


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.thinned(3)
def test_refusals_and_their_reasons(make: Callable[[], dict[str, Any]], reason: str) -> None:
    loader = loader_of(**make())
    seed_everything()
    before = generator_states(loader)
    found = device_tail(loader)
    assert isinstance(found, NoTail)
    assert re.search(reason, found.reason), found.reason
    assert_same(generator_states(loader), before)


def test_a_dataset_that_cannot_be_looked_at_is_refused() -> None:
    class Hostile(Pictures):
        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                raise RuntimeError("hands off")
            return super().__getattribute__(name)

    assert "RuntimeError: hands off" in reason_of(loader_of(Hostile.__new__(Hostile)))


def test_only_the_tail_that_proves_moves() -> None:
    class Depth(Pictures):
        def __getitem__(self, index: int) -> Any:
            depth = self.depth(picture(index, "L"))  # type: ignore[attr-defined]
            return self.transform(picture(index)), depth * 2

    loader = loader_of(Depth(normalized(), depth=v1.Compose([v1.ToTensor()])))
    tail = tail_of(loader)
    changes = tail.changes(loader)
    assert changes is not None
    batch = next(iter(view_of(loader, **changes)))
    assert [leaf.dtype for leaf in leaves(batch)] == [torch.uint8, F32]


def test_options_are_checked() -> None:
    loader = loader_of(Pictures(normalized()))
    with pytest.raises(OptionError, match="give a float dtype"):
        device_tail(loader, dtype=torch.int32)
    with pytest.raises(OptionError, match=r"memory_format=torch\.channels_last_3d"):
        device_tail(loader, memory_format=torch.channels_last_3d)


# While it runs -------------------------------------------------------------------------------


class Sixteen(Pictures):
    """Sample 7, which no proof reads, is not like the others."""

    def __getitem__(self, index: int) -> Any:
        if index != 7:
            return super().__getitem__(index)
        odd = {"bits": Image.new("I", (12, 10)), "grey": picture(7, "L"), "text": "no image"}
        return self.transform(odd[self.odd]), index  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("odd", "error", "message"),
    [
        ("grey", RuntimeError, "shape"),  # the user's own Normalize raises, as without us
        ("bits", TypeError, "float tensor"),
        ("text", TypeError, "pic should be PIL Image or ndarray"),
    ],
)
def test_odd_samples_raise_what_they_always_did(odd: str, error: Any, message: str) -> None:
    loader = loader_of(Sixteen(TAILS["v1"](), odd=odd), batch_size=1)
    tail = tail_of(loader)
    with pytest.raises(error, match=message):
        list(batches_with(tail, loader))
    with pytest.raises(error, match=message):
        list(loader)


def test_odd_samples_that_torch_would_take_are_an_error_not_other_numbers() -> None:
    loader = loader_of(Sixteen(v1.ToTensor(), odd="bits"), batch_size=1)
    tail = tail_of(loader)
    with pytest.raises(BackendUnavailable, match=r"a sample is Image of mode I before ToTensor"):
        list(batches_with(tail, loader))


def test_a_sample_of_other_numbers_than_bytes_is_an_error() -> None:
    chain = v2.Compose([v2.ToImage(), v2.ToDtype(F32, scale=True)])
    loader = loader_of(Sixteen(chain, odd="bits"), batch_size=1)
    tail = tail_of(loader)
    with pytest.raises(BackendUnavailable, match=r"a sample is Image of mode I before ToImage"):
        list(batches_with(tail, loader))


def test_the_datasets_own_arrays_are_not_handed_out() -> None:
    class InMemory(Pictures):
        def __getitem__(self, index: int) -> Any:
            return self.transform(self.pixels[index]), index  # type: ignore[attr-defined]

    pixels = np.zeros((4, 6, 5), np.uint8)
    loader = loader_of(InMemory(v1.ToTensor(), pixels=pixels, size=4), batch_size=None)
    changes = tail_of(loader).changes(loader)
    assert changes is not None
    for image, _ in view_of(loader, **changes):
        assert not np.shares_memory(image.numpy(), pixels)


def test_a_batch_without_images_is_an_error() -> None:
    tail = tail_of(loader_of(Pictures(normalized())))
    with pytest.raises(BackendUnavailable, match="0 uint8 images among 2 tensors"):
        tail.apply([torch.rand(2, 3, 4, 4), torch.arange(2)])
    with pytest.raises(BackendUnavailable, match="of 2 channels, and the device tail knows 3"):
        tail.apply(torch.zeros(1, 2, 4, 4, dtype=torch.uint8))


def test_what_changes_on_the_dataset_between_epochs() -> None:
    dataset = Pictures(normalized(), size=4)
    loader = loader_of(dataset)
    tail = tail_of(loader)
    dataset.size = 8  # an attribute: it comes over
    changes = tail.changes(loader)
    assert changes is not None
    assert len(changes["dataset"]) == 8
    dataset.transform.transforms[0] = v1.CenterCrop(5)  # another head: prove it again
    assert tail.changes(loader) is None
    assert isinstance(device_tail(loader), Tail)


@pytest.mark.parametrize("change", ["mean", "chain", "member", "dataset", "collate_fn", "dtype"])
def test_a_tail_that_no_longer_holds_is_not_used(
    change: str, request: pytest.FixtureRequest
) -> None:
    dataset = Pictures(normalized())
    loader = loader_of(dataset)
    tail = tail_of(loader)
    assert tail.changes(loader) is not None
    if change == "mean":
        dataset.transform.transforms[-1].mean = (0.0, 0.0, 0.1)
    elif change == "chain":
        dataset.transform = normalized()
    elif change == "member":
        dataset.transform.transforms.append(opaque)
    elif change == "dataset":
        loader = loader_of(Pictures(dataset.transform))
    elif change == "collate_fn":
        loader = view_of(loader, collate_fn=as_list)
    else:
        request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
        torch.set_default_dtype(torch.float64)
    assert tail.changes(loader) is None


# Values --------------------------------------------------------------------------------------


def test_the_table_is_made_by_the_users_own_members() -> None:
    tables, channels = tables_of([v1.ToTensor(), v1.Normalize(MEAN, STD)])
    assert channels == {3: 3}
    expected = v1.Normalize(MEAN, STD)(v1.ToTensor()(every_byte(3).permute(1, 2, 0).numpy()))
    assert torch.equal(tables[3].values, expected.reshape(3, 256))
    divided = every_byte(1)[0].reshape(256).float() / 255
    assert torch.equal(tables_of([v1.ToTensor()])[0][1].values[0], divided)
    multiplied = tables_of([v2.ToDtype(F32, scale=True)])[0][1].values[0]
    assert (divided != multiplied).sum() == 126  # so that one cannot stand for the other


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(), (2, 3), (40,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_arithmetic_and_lookup_give_the_table(
    channels: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str
) -> None:
    members = [
        v2.ToDtype(F32, scale=True),
        v2.Normalize((MEAN * 2)[:channels], (STD * 2)[:channels]),
    ]
    table = tables_of(members)[0][channels]
    bytes_ = torch.randint(0, 256, (*shape, channels, 90, 40), dtype=torch.uint8)
    if layout == "channels_last":
        bytes_ = bytes_.movedim(-3, -1).contiguous().movedim(-1, -3)
    expected = table.values.to(dtype)
    planes = [expected[c][bytes_.select(-3, c).long()] for c in range(channels)]
    wanted = torch.stack(planes, dim=-3)
    assert table.steps is not None
    for way in (Arithmetic(table.steps, CPU), Lookup(expected, CPU)):
        for out in (torch.empty_like(bytes_, dtype=dtype), torch.empty(bytes_.shape, dtype=dtype)):
            way.run(bytes_, out)
            assert same_bits(out, wanted)


def test_arithmetic_is_used_only_where_it_equals_the_table() -> None:
    table = tables_of([v1.ToTensor(), v1.Normalize(MEAN, STD)])[0][3]
    assert isinstance(way_for(table, F32, CPU), Arithmetic)
    multiplied = tables_of([v2.ToDtype(F32, scale=True), v2.Normalize(MEAN, STD)])[0][3]
    assert isinstance(way_for(multiplied, F32, CPU), Arithmetic)
    wrong = type(table)(table.values, (("mul", torch.full((1, 1, 1), 1 / 255)), *table.steps[1:]))  # type: ignore[index]
    assert isinstance(way_for(wrong, F32, CPU), Lookup)
    assert isinstance(way_for(type(table)(table.values.double(), table.steps), F32, CPU), Lookup)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
@pytest.mark.parametrize("lib", [v1, v2], ids=["v1", "v2"])
def test_another_dtype_is_rounded_to_once(dtype: torch.dtype, lib: Any) -> None:
    loader = loader_of(Pictures(normalized(lib)))
    tail = tail_of(loader, dtype=dtype)
    seed_everything()
    expected = list(loader)
    seed_everything()
    off = 0.0
    for (image, label), (wanted, wanted_label) in zip(
        batches_with(tail, loader), expected, strict=True
    ):
        assert image.dtype is dtype
        assert same_bits(image, wanted.to(dtype))
        assert torch.equal(label, wanted_label)
        off = max(off, (image.double() - wanted.double()).abs().max().item())
    assert tail.exact == (dtype is F32)
    assert off <= tail.largest_difference < 0.02
    assert (tail.largest_difference == 0.0) == (dtype in (F32, torch.float64))
    assert ("rounded to" in tail.describe()) == (dtype is not F32)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["v1", "v1, PILToTensor", "v2"])
@pytest.mark.thinned(3)
def test_memory_formats(name: str, dtype: Any, memory_format: Any) -> None:
    loader = loader_of(Pictures(TAILS[name]()))
    tail = tail_of(loader, memory_format=memory_format, dtype=dtype)
    for (image, _), (wanted, _) in zip(batches_with(tail, loader), loader, strict=True):
        assert image.is_contiguous(memory_format=memory_format)
        assert torch.equal(image, wanted.to(dtype or F32))


def test_the_floats_can_be_written_into_given_memory() -> None:
    tail = tail_of(loader_of(Pictures(normalized())))
    given_memory = torch.empty(2, 3, 4, 5)

    def empty_like(leaf: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        assert leaf.shape == given_memory.shape
        assert dtype is given_memory.dtype
        return given_memory

    found = tail.apply(torch.zeros(2, 3, 4, 5, dtype=torch.uint8), empty_like=empty_like)
    assert found is given_memory
    assert math.isclose(found[0, 0, 0, 0].item(), -MEAN[0] / STD[0], rel_tol=1e-6)


def test_the_sentence_for_explain() -> None:
    loader = loader_of(FakeData(9, (3, 10, 12), transform=TAILS["v1"]()))
    assert tail_of(loader).describe() == (
        "ToTensor, Normalize once a batch on the device (dataset.transform.transforms[0] and "
        "after): 1080 bytes a sample less to collate and copy, equal to the bit on 4 samples of "
        "this dataset"
    )


def test_enough_collations_are_tried_for_rare_mixing() -> None:
    assert 0.7**_COLLATIONS < 0.01


# On a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in TAILS if "Sequential" not in name])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.preserve_format, torch.channels_last])
def test_cuda_gives_the_tables_values(name: str, dtype: Any, memory_format: Any) -> None:
    loader = loader_of(Pictures(TAILS[name]()))
    tail = tail_of(loader, dtype=dtype, memory_format=memory_format)
    device = torch.device("cuda")
    tail.prepare(device)
    changes = tail.changes(loader)
    assert changes is not None
    seed_everything()
    expected = list(loader)
    seed_everything()
    for batch, (wanted, _) in zip(view_of(loader, **changes), expected, strict=True):
        assert batch[0].dtype is torch.uint8  # what crosses the bus
        image, _ = tail.apply([batch[0].to(device), batch[1]])
        assert image.device.type == "cuda"
        assert same_bits(image.cpu().contiguous(), wanted.to(dtype or wanted.dtype).contiguous())
        if memory_format is torch.channels_last:
            assert image.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("members", [[v1.ToTensor()], [v2.ToDtype(F32, scale=True)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_ways_on_cuda_equal_the_cpus_table(members: list[Any], dtype: torch.dtype) -> None:
    """Every byte in every channel, in both layouts, in one piece and in several."""
    device = torch.device("cuda")
    table = tables_of([*members, v2.Normalize(MEAN, STD)])[0][3]
    wanted = table.values.to(dtype).reshape(3, 16, 16)
    assert table.steps is not None
    assert isinstance(way_for(table, dtype, device), Arithmetic)
    for way in (Arithmetic(table.steps, device), Lookup(table.values.to(dtype), device)):
        for layout in (torch.contiguous_format, torch.channels_last):
            bytes_ = every_byte(3).to(device).repeat(64, 1, 8, 16).contiguous(memory_format=layout)
            out = torch.empty_like(bytes_, dtype=dtype)
            way.run(bytes_, out)
            assert same_bits(out.cpu().contiguous(), wanted.repeat(64, 1, 8, 16))
