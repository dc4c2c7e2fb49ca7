"""The device tail: equal to the dataset's own output to the bit, or refused with a reason."""

from __future__ import annotations

import pickle
import random
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
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
from dataloaders.transforms.table import every_byte, same_bits, tables_of
from dataloaders.transforms.ways import Arithmetic, Lookup, way_for
from helpers.compare import assert_same, generator_states, seed_everything

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
F32, CPU = torch.float32, torch.device("cpu")


def picture(index: int, mode: str = "RGB", size: tuple[int, int] = (12, 10)) -> Image.Image:
    """A PIL image of ``size`` (width, height) with every sort of value."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(index).bytes(size[0] * size[1] * channels)
    if mode == "1":
        return Image.frombytes("L", size, pixels).convert("1")
    return Image.frombytes(mode, size, pixels)


class Pictures(Dataset[Any]):
    """(transform(image), index), or what ``read`` makes of the dataset and the index."""

    def __init__(self, transform: Any, mode: str = "RGB", size: int = 9, **held: Any) -> None:
        self.transform, self.mode, self.size = transform, mode, size
        self.__dict__.update(held)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        read = self.__dict__.get("read", plain)
        return read(self, index)


def plain(own: Any, index: int) -> Any:
    return own.transform(picture(index, own.mode)), index


def loader_of(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 4, **options})


def tail_of(loader: DataLoader[Any], **options: Any) -> Tail:
    tail = device_tail(loader, **options)
    assert isinstance(tail, Tail), tail
    return tail


def batches_with(tail: Tail, loader: DataLoader[Any]) -> Iterator[Any]:
    changes = tail.changes(loader)
    assert changes is not None
    for batch in view_of(loader, **changes):
        assert not any(leaf.is_floating_point() and leaf.ndim >= 3 for leaf in leaves(batch))
        yield tail.apply(batch)


def check(make: Callable[[], DataLoader[Any]]) -> Tail:
    """Two epochs through the tail are torch's to the bit, random states included."""
    ours, theirs = make(), make()
    seed_everything()
    expected = [list(theirs) for _ in range(2)], generator_states(theirs)
    before = generator_states(ours)
    tail = tail_of(ours)
    assert_same(generator_states(ours), before)
    seed_everything()
    found = [list(batches_with(tail, ours)) for _ in range(2)], generator_states(ours)
    assert_same(found, expected)
    assert tail.exact
    assert tail.bytes_saved > 0
    return tail


def chain(*members: Any) -> Any:
    return v1.Compose([*members])


BYTES2 = v2.ToImage(), v2.ToDtype(F32, scale=True)
FLOATS = v1.ToTensor(), v1.Normalize(MEAN, STD)
FLOATS2 = *BYTES2, v2.Normalize(MEAN, STD)
TAILS: dict[str, Callable[[], Any]] = {
    "v1": lambda: chain(*FLOATS),
    "v1, lone ToTensor": v1.ToTensor,
    "v1, PILToTensor": lambda: chain(v1.PILToTensor(), v1.ConvertImageDtype(F32), FLOATS[1]),
    "v1, in place": lambda: chain(v1.ToTensor(), v1.Normalize(MEAN, STD, inplace=True)),
    "v1, one number": lambda: chain(v1.ToTensor(), v1.Normalize(0.5, 0.25)),
    "v1, twice": lambda: chain(*FLOATS, v1.Normalize(torch.tensor([0.1]), torch.tensor([3.0]))),
    "v1, nested": lambda: chain(v1.Resize(8), chain(v1.RandomCrop(6), v1.ToTensor()), FLOATS[1]),
    "v1, random head": lambda: chain(v1.RandomResizedCrop(7), v1.ColorJitter(0.2), *FLOATS),
    "v2": lambda: v2.Compose([*FLOATS2]),
    "v2, on tensors": lambda: v2.Compose([BYTES2[0], v2.RandomResizedCrop(7), *FLOATS2[1:]]),
    "v2, pure": lambda: v2.Compose([*BYTES2, v2.ToPureTensor(), FLOATS2[2]]),
    "v2, pure at the end": lambda: v2.Compose([v2.PILToTensor(), *FLOATS2[1:], v2.ToPureTensor()]),
    "v2, unscaled": lambda: v2.Compose([v2.ToImage(), v2.ToDtype(F32)]),
    "v2, half": lambda: v2.Compose([v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]),
    "v2, double": lambda: v2.Compose([v2.ToImage(), v2.ToDtype(torch.float64, True), FLOATS2[2]]),
    "mixed": lambda: v2.Compose([v1.ToTensor(), v2.Normalize(MEAN, STD)]),
    "Sequential": lambda: torch.nn.Sequential(v2.ToImage(), v2.RandomCrop(5), *FLOATS2[1:]),
}  # fmt: skip


@pytest.mark.parametrize("make", TAILS.values(), ids=TAILS.keys())
@pytest.mark.thinned(3)
def test_every_sort_of_tail_is_the_users_own_to_the_bit(make: Callable[[], Any]) -> None:
    check(lambda: loader_of(Pictures(make()), shuffle=True))


# Datasets and batches


def normalized(lib: Any = v1) -> Any:
    return lib.Compose([lib.RandomCrop(8), *(FLOATS if lib is v1 else FLOATS2)])


class TwoViews:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> list[Any]:
        return [self.transform(image), self.transform(image)]


Named = namedtuple("Named", "image label")


class Bulk(Pictures):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def two_and_mask(own: Any, index: int) -> Any:
    mask = torch.full((1, 8, 8), index, dtype=torch.uint8)
    first, second = own.transform(picture(index)), own.transform(picture(index + 1))
    return {"a": first, "mask": mask, "b": second, "name": f"n{index}", "none": 1.5}


def joint(own: Any, index: int) -> Any:
    """Image and mask through one v2 transform."""
    mask = tv_tensors.Mask(torch.full((10, 12), index, dtype=torch.uint8))
    return own.transform(tv_tensors.Image(picture(index)), {"mask": mask, "label": index})


def own_generator(own: Any, index: int) -> Any:
    image = picture(index + (own.rng.random() < 0.5))
    return own.transform(image), own.rng.random()


def moved(own: Any, index: int) -> Any:
    """Pixels moved after the transform, which is the same for bytes and floats."""
    image = own.transform(picture(index))
    return image.flip(-1) if random.random() < 0.5 else image, np.random.rand()


def of_mode(mode: str) -> Any:
    channels = len(picture(0, mode).getbands())
    normalize = v1.Normalize((MEAN * 2)[:channels], (STD * 2)[:channels])
    return Pictures(chain(v1.ToTensor(), normalize), mode)


DATASETS: dict[str, Callable[[], Any]] = {
    "FakeData": lambda: FakeData(9, (3, 12, 12), transform=normalized()),
    "Subset": lambda: Subset(Pictures(normalized()), [3, 1, 8, 5, 5]),
    "ConcatDataset": lambda: ConcatDataset([Pictures(normalized()), Pictures(normalized())]),
    "StackDataset": lambda: StackDataset(x=Pictures(normalized()), y=list(range(9))),
    "two views": lambda: Pictures(TwoViews(normalized())),
    "two images and a mask": lambda: Pictures(normalized(), read=two_and_mask),
    "joint": lambda: Pictures(normalized(v2), read=joint),
    "namedtuple": lambda: Pictures(normalized(), read=lambda *own: Named(*plain(*own))),
    "getitems": lambda: Bulk(normalized(v2)),
    "arrays": lambda: Pictures(chain(*FLOATS), read=lambda *own: plain(*own)[0].numpy()),
    "own generator": lambda: Pictures(normalized(), rng=random.Random(4), read=own_generator),
    "moved pixels": lambda: Pictures(normalized(), read=moved),
    **{mode: partial(of_mode, mode) for mode in ("1", "P", "LA", "RGBA", "CMYK")},
    "grey becomes three": lambda: ConcatDataset(
        [Pictures(v2.Compose([*FLOATS2]), mode) for mode in ("L", "RGB")]
    ),
}  # fmt: skip


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
@pytest.mark.thinned(3)
def test_every_sort_of_dataset(make: Callable[[], Any]) -> None:
    check(lambda: loader_of(make()))


def as_list(samples: list[Any]) -> list[Any]:
    return samples


class Batch:
    def __init__(self, samples: list[Any]) -> None:
        self.images, self.labels = default_collate(samples)

    def to(self, device: Any) -> Batch:
        return self


def test_batches_of_other_sorts() -> None:
    def sizes(own: Any, index: int) -> Any:
        return own.transform(picture(index, size=(8 + index, 9))), index

    check(lambda: loader_of(Pictures(normalized()), batch_size=8))
    check(lambda: loader_of(Pictures(normalized(), size=1), batch_size=8))
    check(lambda: loader_of(Pictures(normalized()), batch_sampler=[[1, 2], [4]], batch_size=1))
    check(lambda: loader_of(Pictures(normalized()), collate_fn=Batch))
    check(lambda: loader_of(Pictures(TAILS["v2"](), read=sizes), collate_fn=as_list))
    check(lambda: loader_of(Pictures(TAILS["v1, PILToTensor"](), read=sizes), batch_size=None))


def test_image_folder_by_workers(tmp_path: Path) -> None:
    for index in range(6):
        folder = tmp_path / f"class{index % 2}"
        folder.mkdir(exist_ok=True)
        picture(index, size=(20, 16)).save(folder / f"{index}.{'png' if index < 3 else 'jpg'}")
    folder = ImageFolder(tmp_path, normalized())
    tail = check(lambda: loader_of(folder, shuffle=True, num_workers=2))
    assert tail.samples_read == 4


@pytest.mark.parametrize("name", ["v1", "v2", "Sequential", "v1, lone ToTensor"])
def test_the_copy_pickles_as_spawned_workers_need_it(name: str) -> None:
    loader = loader_of(Pictures(TwoViews(TAILS[name]())))
    changes = tail_of(loader).changes(loader)
    assert changes is not None
    seed_everything()
    expected = changes["dataset"][3]
    seed_everything()
    found = pickle.loads(pickle.dumps(changes["dataset"]))[3]
    assert_same(found, expected)
    assert found[0][0].dtype is torch.uint8


def test_nothing_of_the_users_is_changed() -> None:
    def counting(own: Any, index: int) -> Any:
        own.reads = own.__dict__.get("reads", 0) + 1
        return plain(own, index)

    transform = normalized()
    dataset = Pictures(transform, read=counting)
    members, held = list(transform.transforms), dict(vars(dataset))
    loader = loader_of(dataset)
    attributes = dict(vars(loader))
    tail = tail_of(loader)
    list(batches_with(tail, loader))
    assert transform.transforms == members
    assert dict(vars(dataset)) == held
    assert all(attributes[name] is value for name, value in vars(loader).items())


def test_the_same_leaves_in_new_containers() -> None:
    tail = tail_of(loader_of(Pictures(normalized())))
    image, label = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8), torch.arange(2)
    memory = torch.empty(2, 3, 4, 5)
    batch = {"x": image, "y": [label], "z": "text"}
    found = tail.apply(batch, empty_like=lambda leaf, dtype: memory)
    assert list(found) == ["x", "y", "z"]
    assert found["y"][0] is label
    assert found["x"] is memory
    assert batch["x"] is image


# Refusals


def erasing(own: Any, index: int) -> Any:
    """Only now and then: zero is another thing before Normalize than after it."""
    erase = torch.rand(1) < 0.15
    image = own.transform(picture(index))
    if erase:
        image[:, :3, :3] = 0
    return image, index


def caching(own: Any, index: int) -> Any:
    """Keeps what the transform made, for every copy of the dataset."""
    return own.cache.setdefault(index, plain(own, index))


class Stream(IterableDataset[Any]):
    transform = normalized()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def variant(name: str, **methods: Any) -> dict[str, Any]:
    return {"dataset": type(name, (Pictures,), methods)(normalized())}


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
    return images.mul(0.5) if random.random() < 0.3 else images, labels


def opaque(image: Any) -> Any:
    return image


def of(transform: Any, mode: str = "RGB", **held: Any) -> dict[str, Any]:
    return {"dataset": Pictures(transform, mode, **held)}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no transform": (
        lambda: {"dataset": TensorDataset(torch.ones(4, 3, 2, 2))}, "holds no torchvision transform"
    ),
    "a function": (lambda: of(opaque), "the transform of Pictures is opaque, which is not"),
    "ends in a function": (
        lambda: of(chain(*FLOATS, opaque)), r"ends in opaque at dataset.transform.transforms\[2\]"
    ),
    "between": (
        lambda: of(chain(v1.ToTensor(), v1.RandomErasing(), FLOATS[1])),
        r"Normalize at .*\[2\] gets floats: RandomErasing at .*\[1\] stands between",
    ),
    "no floats": (lambda: of(chain(v1.PILToTensor())), "makes no floats"),
    "only Normalize": (lambda: of(chain(FLOATS[1])), "gets floats from the dataset itself"),
    "dict of dtypes": (
        lambda: of(chain(v2.ToDtype({tv_tensors.Image: F32}, True))), "has a dict of dtypes"
    ),
    "arithmetic": (
        lambda: of(normalized(), read=lambda *own: (plain(*own)[0] * 1.5, 0)),
        "Pictures works on the image after",
    ),
    "rare arithmetic": (lambda: of(normalized(), read=erasing), "Pictures works on the image"),
    "members by hand": (
        lambda: of(v1.ToTensor(), read=lambda *own: FLOATS[1](plain(*own)[0])),
        "Pictures cannot be read without the members that would move: TypeError",
    ),
    "unreadable": (
        lambda: of(normalized(), read=lambda *own: 1 // 0),
        r"reading samples \[0, 3, 5, 8\] of Pictures failed: ZeroDivisionError",
    ),
    "no length": (lambda: variant("Endless", __len__=None), r"Endless has no len\(\)"),
    "empty": (lambda: of(normalized(), size=0), r"Pictures has no len\(\) or no samples"),
    "stream": (lambda: {"dataset": Stream()}, "Stream has no samples by index"),
    "del": (lambda: variant("Slotted", __del__=lambda own: None), "Slotted has a __del__"),
    "cache": (lambda: of(normalized(), cache={}, read=caching), "its transform unchanged"),
    "floats in": (
        lambda: of(chain(*FLOATS), read=lambda own, i: own.transform(np.ones((4, 5, 3), "f4"))),
        "only uint8 images of",
    ),
    "three means for one, v1": (lambda: of(chain(*FLOATS), "L"), "failed: RuntimeError: .*shape"),
    "no means of that number": (
        lambda: of(chain(v1.ToTensor(), v1.Normalize([0.0] * 3, [0.0] * 3))),
        "could not be run on an image",
    ),
    "padding": (
        lambda: {**of(normalized()), "collate_fn": padded},
        "collate_fn padded works on the values of images .*different sizes",
    ),
    "mixing now and then": (
        lambda: {**of(normalized()), "collate_fn": now_and_then},
        "collate_fn now_and_then works on the values of images",
    ),
    "sizes that do not stack": (
        lambda: {"dataset": ConcatDataset([Pictures(chain(*FLOATS)), Pictures(normalized())])},
        "collating samples .* failed: RuntimeError",
    ),
    "masks in a list": (
        lambda: {**of(normalized(), read=two_and_mask), "collate_fn": as_list},
        "at places that change",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.thinned(3)
def test_refusals_and_their_reasons(make: Callable[[], dict[str, Any]], reason: str) -> None:
    found = device_tail(loader_of(**make()))
    assert isinstance(found, NoTail)
    assert re.search(reason, found.reason), found.reason


def test_only_the_tail_that_proves_moves() -> None:
    def read(own: Any, index: int) -> Any:
        return own.transform(picture(index)), own.depth(picture(index, "L")) * 2

    loader = loader_of(Pictures(normalized(), depth=chain(v1.ToTensor()), read=read))
    changes = tail_of(loader).changes(loader)
    assert changes is not None
    batch = next(iter(view_of(loader, **changes)))
    assert [leaf.dtype for leaf in leaves(batch)] == [torch.uint8, F32]


def test_options_are_checked() -> None:
    loader = loader_of(Pictures(normalized()))
    with pytest.raises(OptionError, match="give a float dtype"):
        device_tail(loader, dtype=torch.int32)
    with pytest.raises(OptionError, match=r"memory_format=torch\.channels_last_3d"):
        device_tail(loader, memory_format=torch.channels_last_3d)


# While it runs


@pytest.mark.parametrize(
    ("tail", "odd", "error", "message"),
    [
        # The user's own members raise, as without us.
        ("v1", picture(7, "L"), RuntimeError, "shape"),
        ("v1", Image.new("I", (12, 10)), TypeError, "float tensor"),
        ("v1", "no image", TypeError, "pic should be PIL Image or ndarray"),
        # torch would take these: an error, not other numbers.
        ("v1, lone ToTensor", Image.new("I", (12, 10)), BackendUnavailable, "mode I before ToTe"),
        ("v2, unscaled", Image.new("I", (12, 10)), BackendUnavailable, "mode I before ToImage"),
    ],
)
def test_a_sample_unlike_those_that_were_proved(
    tail: str, odd: Any, error: Any, message: str
) -> None:
    def read(own: Any, index: int) -> Any:
        return own.transform(odd if index == 7 else picture(index)), index

    loader = loader_of(Pictures(TAILS[tail](), read=read), batch_size=1)
    with pytest.raises(error, match=message):
        list(batches_with(tail_of(loader), loader))


def test_a_batch_without_images_is_an_error() -> None:
    tail = tail_of(loader_of(Pictures(normalized())))
    with pytest.raises(BackendUnavailable, match="0 uint8 images among 2 tensors"):
        tail.apply([torch.rand(2, 3, 4, 4), torch.arange(2)])
    with pytest.raises(BackendUnavailable, match="of 2 channels, and the device tail knows 3"):
        tail.apply(torch.zeros(1, 2, 4, 4, dtype=torch.uint8))


def test_the_datasets_own_arrays_are_not_handed_out() -> None:
    pixels = np.zeros((4, 6, 5), np.uint8)
    dataset = Pictures(v1.ToTensor(), size=4, read=lambda own, index: own.transform(pixels[index]))
    loader = loader_of(dataset, batch_size=None)
    changes = tail_of(loader).changes(loader)
    assert changes is not None
    for image in view_of(loader, **changes):
        assert not np.shares_memory(image.numpy(), pixels)


@pytest.mark.parametrize(
    "change", ["mean", "chain", "member", "head", "dataset", "collate_fn", "dtype", None]
)
def test_a_tail_that_no_longer_holds_is_not_used(
    change: str | None, request: pytest.FixtureRequest
) -> None:
    dataset = Pictures(normalized())
    loader = loader_of(dataset)
    tail = tail_of(loader)
    dataset.size = 8  # an attribute: it comes over
    changes = tail.changes(loader)
    assert changes is not None
    assert len(changes["dataset"]) == 8
    if change == "mean":
        dataset.transform.transforms[-1].mean = (0.0, 0.0, 0.1)
    elif change == "chain":
        dataset.transform = normalized()
    elif change == "member":
        dataset.transform.transforms.append(opaque)
    elif change == "head":
        dataset.transform.transforms[0] = v1.CenterCrop(5)
    elif change == "dataset":
        loader = loader_of(Pictures(dataset.transform))
    elif change == "collate_fn":
        loader = view_of(loader, collate_fn=as_list)
    elif change == "dtype":
        request.addfinalizer(lambda: torch.set_default_dtype(F32))
        torch.set_default_dtype(torch.float64)
    assert (tail.changes(loader) is None) == (change is not None)


# Values


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(), (2, 3), (40,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("members", [FLOATS, FLOATS2[1:]], ids=["v1", "v2"])
def test_both_ways_give_the_table(
    members: Any, dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    """Every byte in every channel, in both layouts, in one piece and in several."""
    table = tables_of(members)[0][3]
    wanted = table.values.to(dtype).reshape(3, 16, 16).repeat(*shape, 1, 5, 3)
    bytes_ = every_byte(3).repeat(*shape, 1, 5, 3).to(device)
    assert table.steps is not None
    assert isinstance(way_for(table, dtype, bytes_.device), Arithmetic)
    arithmetic = Arithmetic(table.steps, bytes_.device)
    for way in (arithmetic, Lookup(table.values.to(dtype), bytes_.device)):
        for given_bytes in (bytes_, bytes_.movedim(-3, -1).contiguous().movedim(-1, -3)):
            out = torch.empty_like(given_bytes, dtype=dtype)
            way.run(given_bytes, out)
            assert same_bits(out.cpu().contiguous(), wanted)


def test_arithmetic_is_used_only_where_it_equals_the_table() -> None:
    table = tables_of(FLOATS)[0][3]
    assert table.steps is not None
    wrong = type(table)(table.values, (("mul", torch.full((1, 1, 1), 1 / 255)), *table.steps[1:]))
    assert isinstance(way_for(wrong, F32, CPU), Lookup)
    assert isinstance(way_for(type(table)(table.values.double(), table.steps), F32, CPU), Lookup)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("memory_format", [torch.preserve_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["v1", "v1, PILToTensor", "v2"])
@pytest.mark.thinned(3)
def test_dtypes_and_memory_formats(name: str, dtype: Any, memory_format: Any, device: str) -> None:
    """Each value is rounded to once."""
    loader = loader_of(Pictures(TAILS[name]()))
    tail = tail_of(loader, dtype=dtype, memory_format=memory_format)
    tail.prepare(torch.device(device))
    changes = tail.changes(loader)
    assert changes is not None
    off = 0.0
    for batch, (wanted, _) in zip(view_of(loader, **changes), loader, strict=True):
        image, _ = tail.apply([leaf.to(device) for leaf in batch])
        assert image.device.type == device
        if memory_format is torch.channels_last:
            assert image.is_contiguous(memory_format=memory_format)
        found = image.cpu().contiguous()
        assert same_bits(found, wanted.to(dtype or F32).contiguous())
        off = max(off, (found.double() - wanted.double()).abs().max().item())
    assert off <= tail.largest_difference < 0.02
    assert tail.exact == (dtype is None)
    assert (tail.largest_difference == 0.0) == (dtype in (None, torch.float64))
    assert ("rounded to" in tail.describe()) == (dtype is not None)


def test_the_sentence_for_explain() -> None:
    loader = loader_of(FakeData(9, (3, 10, 12), transform=TAILS["v1"]()))
    assert tail_of(loader).describe() == (
        "ToTensor, Normalize once a batch on the device (dataset.transform.transforms[0] and "
        "after): 1080 bytes a sample less to collate and copy, equal to the bit on 4 samples of "
        "this dataset"
    )
