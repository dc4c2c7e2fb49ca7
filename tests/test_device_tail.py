"""The device tail: batches equal the dataset's own to the bit; where there is none, why."""

from __future__ import annotations

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

from dataloaders.batches.tree import map_children, same_bits
from dataloaders.errors import BackendUnavailable
from dataloaders.recording.tail import Trailing
from dataloaders.replaying.tail import DeviceTail, device_tail
from dataloaders.replaying.ways import Arithmetic, Lookup, Table, column, every_byte, way_for
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


def tail_of(loader: DataLoader[Any], **options: Any) -> DeviceTail:
    tail = device_tail(loader, **options)
    assert isinstance(tail, DeviceTail), tail
    return tail


def late(batch: Any) -> list[Trailing]:
    """The images of a recorded batch."""
    if isinstance(batch, Trailing):
        return [batch]
    found: list[Trailing] = []
    if not isinstance(batch, torch.Tensor):
        map_children(batch, lambda child: found.extend(late(child)))
    return found


def finished(tail: DeviceTail, batch: Any) -> Any:
    return tail.apply(batch, move=lambda each: each, empty_like=torch.empty_like)


def batches_with(tail: DeviceTail, loader: DataLoader[Any], *, whole: bool = True) -> Iterator[Any]:
    for batch in tail.recorded(loader):
        images = late(batch)
        assert not whole or (images and all(image.steps for image in images))
        yield finished(tail, batch)


def check(make: Callable[[], DataLoader[Any]], *, whole: bool = True) -> DeviceTail:
    """Two epochs through the tail are torch's to the bit, random states included."""
    ours, theirs = make(), make()
    seed_everything()
    expected = [list(theirs) for _ in range(2)], generator_states(theirs)
    before = generator_states(ours)
    tail = tail_of(ours)
    assert_same(generator_states(ours), before)
    seed_everything()
    found = [list(batches_with(tail, ours, whole=whole)) for _ in range(2)], generator_states(ours)
    assert_same(found, expected)
    assert "equal to the bit" in tail.describe()
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


def by_hand(own: Any, index: int) -> Any:
    """Everything in its own code, by functionals."""
    image = v1.functional.to_tensor(picture(index).resize((8, 8)))
    return {"image": v1.functional.normalize(image, MEAN, STD), "index": index}


def opaque(image: Any) -> Any:
    return image


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
    "own generator": lambda: Pictures(normalized(), rng=random.Random(4), read=own_generator),
    "no chain": lambda: Pictures(None, read=by_hand),
    "a function at the end": lambda: Pictures(chain(*FLOATS, opaque)),
    "arithmetic": lambda: Pictures(normalized(), read=lambda *own: (plain(*own)[0] * 1.5, 0)),
    **{mode: partial(of_mode, mode) for mode in ("1", "P", "LA", "RGBA", "CMYK")},
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
    check(lambda: loader_of(Pictures(normalized()), collate_fn=now_and_then))
    check(lambda: loader_of(Pictures(normalized(), read=erasing), batch_size=1), whole=False)
    check(
        lambda: loader_of(
            ConcatDataset([Pictures(normalized()), Pictures(None, read=array)]), batch_size=1
        ),
        whole=False,
    )


def test_image_folder_by_workers(tmp_path: Path) -> None:
    for index in range(6):
        folder = tmp_path / f"class{index % 2}"
        folder.mkdir(exist_ok=True)
        picture(index, size=(20, 16)).save(folder / f"{index}.{'png' if index < 3 else 'jpg'}")
    folder = ImageFolder(tmp_path, normalized())
    check(lambda: loader_of(folder, shuffle=True, num_workers=2))


@pytest.mark.nightly  # torchvision is imported in the worker, for seconds
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(context: str) -> None:
    options = {"num_workers": 1, "multiprocessing_context": context}
    check(lambda: loader_of(FakeData(9, (3, 12, 12), transform=normalized()), **options))


def test_nothing_of_the_users_is_changed() -> None:
    transform = normalized()
    dataset = Pictures(transform)
    members, held = list(transform.transforms), dict(vars(dataset))
    loader = loader_of(dataset)
    attributes = dict(vars(loader))
    tail = tail_of(loader)
    list(batches_with(tail, loader))
    assert transform.transforms == members
    assert dict(vars(dataset)) == held
    assert all(attributes[name] is value for name, value in vars(loader).items())


# Refusals


def erasing(own: Any, index: int) -> Any:
    """Only now and then: zero is another thing before Normalize than after it."""
    erase = torch.rand(1) < 0.15
    image = own.transform(picture(index))
    if erase:
        image[:, :3, :3] = 0
    return image, index


def array(own: Any, index: int) -> Any:
    return torch.from_numpy(plain_floats(index)), index


def plain_floats(index: int) -> Any:
    return np.random.default_rng(index).random((3, 8, 8), np.float32)


class Stream(IterableDataset[Any]):
    transform = normalized()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


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


def of(transform: Any, mode: str = "RGB", **held: Any) -> dict[str, Any]:
    return {"dataset": Pictures(transform, mode, **held)}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "no transform": (
        lambda: {"dataset": TensorDataset(torch.ones(4, 3, 2, 2))}, "no float image of TensorDat"
    ),
    "ends in a function": (
        lambda: of(chain(*FLOATS, v1.Lambda(torch.sqrt))), "Pictures .* floats: Tensor.sqrt at"
    ),
    "erasing": (
        lambda: of(chain(v1.ToTensor(), v1.RandomErasing(1.0), FLOATS[1])), "v1t.erase, after"
    ),
    "no floats": (lambda: of(chain(v1.PILToTensor())), "no float image"),
    "arrays": (
        lambda: of(normalized(), read=lambda *own: plain(*own)[0].numpy()), "Tensor.numpy at"
    ),
    "unreadable": (
        lambda: of(normalized(), read=lambda *own: 1 // 0),
        r"reading samples \[0, 3, 5, 8\] of Pictures failed: ZeroDivisionError",
    ),
    "empty": (lambda: of(normalized(), size=0), r"Pictures has no len\(\) or no samples"),
    "stream": (lambda: {"dataset": Stream()}, "Stream has no samples by index"),
    "three means for one, v1": (lambda: of(chain(*FLOATS), "L"), "failed: RuntimeError: .*shape"),
    "padding": (lambda: {**of(normalized()), "collate_fn": padded}, "works on the floats"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.thinned(3)
def test_refusals_and_their_reasons(make: Callable[[], dict[str, Any]], reason: str) -> None:
    found = device_tail(loader_of(**make()))
    assert isinstance(found, str)
    assert re.search(reason, found), found


def test_images_that_are_worked_on_stay_floats_beside_others() -> None:
    def read(own: Any, index: int) -> Any:
        return own.transform(picture(index)), own.depth(picture(index, "L")).sqrt()

    check(
        lambda: loader_of(Pictures(normalized(), depth=chain(v1.ToTensor()), read=read)),
        whole=False,
    )


# While it runs


@pytest.mark.parametrize(
    ("odd", "error", "message"),
    [(picture(7, "L"), RuntimeError, "shape"), ("no image", TypeError, "pic should be PIL Image")],
)
def test_a_sample_unlike_those_that_were_proved_raises_its_own_error(
    odd: Any, error: Any, message: str
) -> None:
    def read(own: Any, index: int) -> Any:
        return own.transform(odd if index == 7 else picture(index)), index

    loader = loader_of(Pictures(TAILS["v1"](), read=read), batch_size=1)
    with pytest.raises(error, match=message):
        list(batches_with(tail_of(loader), loader))


@pytest.mark.parametrize("odd", [Image.new("I", (12, 10)), np.ones((10, 12, 3), np.float32)])
def test_an_image_of_no_bytes_is_as_without_us(odd: Any) -> None:
    def read(own: Any, index: int) -> Any:
        return own.transform(odd if index == 7 else picture(index)), index

    check(lambda: loader_of(Pictures(v1.ToTensor(), read=read), batch_size=1), whole=False)


def test_a_batch_without_images_has_no_dtype() -> None:
    tail = tail_of(loader_of(Pictures(normalized())), dtype=torch.float16)
    with pytest.raises(BackendUnavailable, match="a batch has no image whose floats"):
        finished(tail, [torch.rand(2, 3, 4, 4), torch.arange(2)])


def test_the_datasets_own_arrays_are_not_handed_out() -> None:
    pixels = np.zeros((4, 6, 5), np.uint8)
    dataset = Pictures(v1.ToTensor(), size=4, read=lambda own, index: own.transform(pixels[index]))
    loader = loader_of(dataset, batch_size=None)
    for image in tail_of(loader).recorded(loader):
        assert not np.shares_memory(image.pixels.numpy(), pixels)


# Values


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(), (2, 3), (40,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("first", ["div", "mul"])
def test_both_ways_give_the_table(
    first: str, dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    """Every byte in every channel, in both layouts, in one piece and in several."""
    table = table_of(first)
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


def table_of(first: str) -> Table:
    scale = v1.ToTensor() if first == "div" else v2.ToDtype(F32, scale=True)
    levels: Any = every_byte(3)
    made = scale(levels.permute(1, 2, 0).numpy() if first == "div" else levels)
    values = FLOATS[1](made).reshape(-1, 256).contiguous()
    by = column(255 if first == "div" else 1 / 255)
    return Table(values, ((first, by), ("sub", column(MEAN)), ("div", column(STD))))


def test_arithmetic_is_used_only_where_it_equals_the_table() -> None:
    table, other = table_of("div"), table_of("mul")
    assert isinstance(way_for(Table(table.values, other.steps), F32, CPU), Lookup)
    assert isinstance(way_for(Table(table.values.double(), table.steps), F32, CPU), Lookup)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("memory_format", [torch.preserve_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["v1", "v1, PILToTensor", "v2"])
@pytest.mark.thinned(3)
def test_dtypes_and_memory_formats(name: str, dtype: Any, memory_format: Any, device: str) -> None:
    """Each value is rounded to once."""
    loader = loader_of(Pictures(TAILS[name]()))
    tail = tail_of(loader, dtype=dtype, memory_format=memory_format)
    for batch, (wanted, _) in zip(tail.recorded(loader), loader, strict=True):
        moved = [Trailing(batch[0].pixels.to(device), batch[0].steps), batch[1]]
        image, _ = finished(tail, moved)
        assert image.device.type == device
        if memory_format is torch.channels_last:
            assert image.is_contiguous(memory_format=memory_format)
        found = image.cpu().contiguous()
        assert same_bits(found, wanted.to(dtype or F32).contiguous())
    assert ("rounded to" in tail.describe()) == (dtype is not None)


def test_the_sentence_for_explain() -> None:
    loader = loader_of(FakeData(9, (3, 10, 12), transform=TAILS["v1"]()))
    assert tail_of(loader).describe() == (
        "convert_image_dtype, normalize once a batch on the device: 1080 bytes a sample less to "
        "collate and copy, equal to the bit on 4 samples of this dataset"
    )
