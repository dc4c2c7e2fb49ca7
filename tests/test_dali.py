"""backend="dali": stock's samples, order and random numbers; what it says of itself.

Pixels on the CPU are held against stock's to the bit: with fast=().
"""

import random
import re
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, default_collate
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.io import read_image
from torchvision.transforms import functional as F
from torchvision.transforms import v2

from dataloaders import DataLoader
from dataloaders.errors import BackendWarning, OptionError
from helpers.codes import CODES, STACKED, Codes, padded
from helpers.compare import assert_same, run_epochs
from helpers.datasets import CountingStream, MapDataset
from helpers.pictures import OF_TORCHVISION, Files, folder
from helpers.recorded import Photos, encoded, equal, path

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali, explain
from backends.dali.graph import Graph

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
FLOATS = v1.ToTensor(), v1.Normalize(MEAN, STD)
FLOATS2 = v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)
V1 = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), *FLOATS])


def pair(dataset, **options):
    """The same loader on stock and on dali."""
    options = {"batch_size": 4, **options}
    on_dali = DataLoader(dataset, backend=Dali(fast=()), device="cpu", **options)
    return DataLoader(dataset, **options), on_dali


def assert_stocks(dataset, **options):
    """Two epochs are stock's to the bit. Returns dali's loader."""
    on_stock, on_dali = pair(dataset, **options)
    assert_same([list(on_dali), list(on_dali)], [list(on_stock), list(on_stock)])
    return on_dali


# The same as stock


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (STACKED, {"num_workers": 0}),
        (STACKED, {"num_workers": 2, "seed": 5}),
        (CODES.keys() - {*STACKED, "by_torchcodec"}, {"num_workers": 1, "collate_fn": list}),
    ],
    ids=["this process", "seeded workers", "not stacked"],
)
def test_every_code_is_stocks_to_the_bit(names, options):
    on_stock, on_dali = pair(Codes(sorted(names)), shuffle=True, **options)
    strides = names is STACKED  # others may differ, as docs/dali.md says
    assert_same(run_epochs(on_dali), run_epochs(on_stock), strides=strides)


class Streamed(CountingStream):
    """The photos of a folder, one after the other."""

    def __init__(self, transform):
        super().__init__()
        self.photos = folder(transform)

    def __iter__(self):
        return (self.photos[number] for number in super().__iter__())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_are_stocks(num_workers):
    assert_stocks(Streamed(V1), seed=1, num_workers=num_workers)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torchvision's: a mask's
def test_datasets_of_torchvision_are_stocks(tmp_path):
    chain = v2.Compose([v2.RandomCrop(5), v2.RandomHorizontalFlip(), v2.ToImage(), FLOATS2[0]])
    kinds = [make(tmp_path / name, transform=chain) for name, make in OF_TORCHVISION.items()]
    joint = OF_TORCHVISION["voc_segmentation"](tmp_path / "joint", transforms=chain)
    kinds += [joint, datasets.wrap_dataset_for_transforms_v2(joint)]
    assert_stocks(ConcatDataset(kinds), shuffle=True, seed=5, collate_fn=list)


# Collation


def mixed(samples):
    either = v2.RandomChoice([v2.MixUp(num_classes=7), v2.CutMix(num_classes=7)])
    return either(*default_collate(samples))


def stacked(samples):
    images, labels = zip(*samples, strict=True)
    return torch.stack(tensors=images, dim=0), list(labels)


def as_dicts(samples):
    return [{"image": image.half(), "label": label} for image, label in samples]


def channels_last(samples):
    return stacked(samples)[0].contiguous(memory_format=torch.channels_last)


def in_place(samples):
    for image, _ in samples:
        image.mul_(random.random())
    return default_collate(samples)


def exact_types(samples):
    assert all(type(image) is torch.Tensor for image, _ in samples)
    return stacked(samples)


COLLATIONS = mixed, stacked, as_dicts, channels_last, default_collate, in_place


def every_collation(samples):
    """What each makes that stand-ins pass through; the one that writes into the images is last."""
    return [collate(list(samples)) for collate in COLLATIONS]


@pytest.mark.parametrize("collate_fn", [every_collation, padded, exact_types, list])
def test_a_collate_fn_of_the_users_own(collate_fn):
    on_dali = assert_stocks(folder(V1), seed=4, collate_fn=collate_fn, num_workers=2)
    plan = str(on_dali.explain())
    assert "2 worker processes" in plan
    in_bulk = "pil.resize((16" in plan and "nvImageCodec" in plan
    assert in_bulk == (collate_fn in (every_collation, list))


DECODED = {
    "slice": lambda x: x[..., 1:3, 2:9],
    "flip": F.hflip,
    "resized crop": lambda x: F.resized_crop(x, 3, 5, 40, 31, [17, 29], antialias=True),
    "bicubic": lambda x: F.resize(x, [20, 30], v1.InterpolationMode.BICUBIC, antialias=True),
    "v2 resized crop": lambda x: v2.functional.resized_crop(x, 3, 5, 40, 31, [17, 29]),
    "v2 bicubic": lambda x: v2.functional.resize(x, [20, 30], v1.InterpolationMode.BICUBIC),
    "cropped": lambda x: F.crop(x, 3, 5, 40, 31),
}


def decoded(index):
    image = read_image(path(index))
    return {name: call(image) for name, call in DECODED.items()}


@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
def test_values_and_strides_of_decoded_tensors():
    """Cropped and resized ones may have other strides: under stock a crop is a view."""
    on_stock, on_dali = pair(MapDataset(decoded, 2), collate_fn=list)
    for mine, other in zip(*list(on_dali), *list(on_stock), strict=True):
        for name in DECODED:
            strides = name not in ("cropped", "v2 bicubic")
            assert_same(mine[name], other[name], strides=strides)


def deep_png(height, width):
    """A PNG file of 16 bits a channel, which Pillow reads and cannot write."""
    rows = (b"\0" + bytes(range(250)) * width)[: width * 6 + 1] * height
    header, file = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0), b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        check = zlib.crc32(kind + data)
        file += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
    return file


@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
def test_a_file_of_16_bits_among_others(tmp_path):
    """torchvision makes uint16 of it; none of the samples that are proved has one."""
    files = [path(5 * index) for index in range(11)]
    files[5] = str(tmp_path / "deep.png")
    (tmp_path / "deep.png").write_bytes(deep_png(50, 60))
    data = MapDataset(lambda index: FLOATS2[0](read_image(files[index])[:, :40, :40]), 11)
    assert_stocks(data, num_workers=True)  # which torch takes for 1


def test_images_that_are_not_made_tensors():
    on_stock, on_dali = pair(folder(v1.RandomCrop(12)), seed=4, collate_fn=list)
    assert equal(list(on_dali), list(on_stock))  # also their ``info``


def test_an_image_that_is_twice_in_a_sample_is_twice_in_the_batch():
    files = [encoded(number) for number in range(5)]
    on_stock, on_dali = pair(Photos(files, lambda image: [V1(image)] * 2), seed=1)
    got = list(on_dali)
    assert_same(got, list(on_stock))
    got[0][0].zero_()
    assert got[0][1].any()


# Changes between epochs


def test_what_is_changed_counts_from_the_next_epoch_on():
    data = folder(v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()]))
    on_stock, on_dali = pair(data, shuffle=True, seed=1, num_workers=1)
    assert_same(list(on_dali), list(on_stock))
    data.transform.transforms[0].size = (7, 5)
    data.samples[1] = (data.samples[8][0], 5)
    data.target_transform = str
    assert_same(list(on_dali), list(on_stock))
    data.transform = v1.Compose([v1.RandomCrop(9), v1.ToTensor()])
    for loader in (on_dali, on_stock):
        loader.set_epoch(7)
    assert_same(list(on_dali), list(on_stock))
    data.transform = Unsteady()
    with pytest.warns(BackendWarning, match="would have other values"):
        got = list(on_dali)
    assert_same(got, list(on_stock))


# What it says of itself


def test_the_plan_for_a_gpu_says_what_the_cpu_makes(monkeypatch):
    monkeypatch.setattr(explain, "device_of", lambda name: torch.device("cuda:0"))
    first = v1.RandomResizedCrop(16), v1.ColorJitter(0.5)
    turned = v1.RandomRotation((30, 30), v1.InterpolationMode.BILINEAR)
    gpu, here = "cuda:0", "2 threads"
    for steps, collate_fn, places in (
        ((*first, v1.GaussianBlur(3)), None, [f"DALI on {gpu}", gpu, gpu]),
        ((*first, turned), None, [here, here, gpu]),
        (first, list, [here, here, here]),
    ):
        data = folder(v1.Compose([*steps, *FLOATS]))
        plan = DataLoader(data, 4, backend=Dali(threads=2), collate_fn=collate_fn).explain()
        assert [stage.where for stage in plan.stages[3:]] == places
        off = "resize((16, 16), 2, None, None) (at most 12 of 256" in str(plan)
        assert off is (places[1] == gpu)


def looks(index):
    image = Image.open(path(index % 5)).convert("RGB")
    dark = np.asarray(image).mean() < 100  # this line looks
    return V1(image), dark


class Unsteady:
    """A transform whose samples are others when they are made once more."""

    calls = 0

    def __call__(self, image):
        self.calls += 1
        return F.to_tensor(image.resize((9, 9))) * self.calls


def by_class(image):
    made = F.to_tensor(image.resize((9, 9)))
    return made * (1 if type(made) is torch.Tensor else 2)


def exact(image):
    made = F.to_tensor(image.resize((9, 9)))
    if type(made) is not torch.Tensor:
        raise TypeError("no tensor of torch's own")
    return made


def partly(transform, *failing):
    """Photos of which some cannot be read."""
    data = Files(transform)
    data.failing = failing
    return data


SAID = {
    "a map that looks": (MapDataset(looks), "decoded where .* Image.im at .*test_dali.py"),
    "a map that differs": (folder(Unsteady()), "makes all pixels: samples .* have other values"),
    "a map that stops": (
        folder(exact), r"makes all pixels: recording stops: TypeError: no tensor .* at .*test_dali"
    ),
    "a map that cannot be read where it is proved": (
        partly(by_class, 0, 3, 7, 10), r"makes all pixels: reading samples \[0, 3, 7, 10\] of Files"
    ),
    "a stream that differs": (Streamed(by_class), "all pixels: Streamed would have other values"),
    "a stream that fails": (Streamed(exact), "could not be recorded: TypeError: no tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("dataset", "said"), SAID.values(), ids=SAID)
def test_what_is_not_proved_is_not_recorded_and_the_plan_says_why(dataset, said):
    """Under workers: their copies of a dataset begin anew in each epoch."""
    options = {"num_workers": 1, "seed": 1}
    if not isinstance(dataset, Streamed):
        options |= {"batch_sampler": [[1, 2], [4, 5], [6]], "batch_size": 1}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", BackendWarning)
        on_dali = assert_stocks(dataset, **options)
    assert re.search(said, str(on_dali.explain()))
    assert [each.category for each in warned] == [BackendWarning] * ("other values" in said)


class Shuffled(Streamed):
    """In another order each time, as webdataset shuffles without a seed."""

    def __iter__(self):
        return iter(random.SystemRandom().sample(list(super().__iter__()), 11))


class Named(Files):
    """Its samples have names."""

    def __getitem__(self, name):
        return super().__getitem__("abc".index(name))["image"]


def test_streams_without_repeats_unreadable_samples_and_names_are_proved_and_recorded():
    names = {"sampler": list("abca"), "seed": 1}
    assert_stocks(Named(V1), **names)
    for data, options in (
        (Shuffled(V1), {"num_workers": 1}),
        (partly(V1, 3, 10), {}),
        (Named(V1), names),
    ):
        plan = str(pair(data, **options)[1].explain())
        assert "resize" in plan
        assert "all pixels" not in plan


def test_options_that_cannot_be_taken():
    for name, value in (("threads", 0), ("fast", ("blur",)), ("dtype", torch.int8)):
        with pytest.raises(OptionError, match=name):
            Dali(**{name: value})


def test_options_change_no_sample_but_by_rounding():
    data = folder(v1.Compose([v1.RandomResizedCrop(16), v1.PILToTensor()]))
    whole = list(DataLoader(data, 4, seed=1))
    for options in ({"threads": 1}, {"fast": ("resize",)}):
        backend = Dali(**{"fast": (), **options})
        found = list(DataLoader(data, 4, seed=1, backend=backend, device="cpu"))
        off = [(a.int() - b.int()).abs().max() for (a, _), (b, _) in zip(found, whole, strict=True)]
        assert (max(off) == 1) if backend.fast else (max(off) == 0)


@pytest.mark.filterwarnings("ignore:dali. the dataset's own code:dataloaders.errors.BackendWarning")
def test_images_of_another_dtype_and_memory_format():
    """Also of samples that are not recorded."""
    form = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    data = Codes(("v1_train", "v1_policy", "v2_image_first", "v1_bytes"))
    on_dali = DataLoader(data, 5, seed=1, backend=Dali(fast=(), **form), device="cpu")
    for batch, wanted in zip(on_dali, DataLoader(data, 5, seed=1), strict=True):
        for name, images in batch.items():
            assert images.is_contiguous(memory_format=torch.channels_last)
            to = torch.bfloat16 if wanted[name].is_floating_point() else torch.uint8
            assert_same(images.contiguous(), wanted[name].to(to))
    for images, _ in DataLoader(MapDataset(looks), 4, backend=Dali(**form), device="cpu"):
        assert images.dtype is torch.bfloat16
        assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
def test_on_a_gpu_crops_are_stocks_and_pixels_close(monkeypatch):
    decoded, decode = [], Graph.decode

    def counted(graph, files, *rest):
        decode(graph, files, *rest)
        decoded.append(len(files))

    monkeypatch.setattr(Graph, "decode", counted)
    options = {"batch_size": 4, "shuffle": True, "seed": 5, "num_workers": 1, "pin_memory": True}
    on_stock = DataLoader(folder(V1), **options)
    on_dali = DataLoader(folder(V1), backend=Dali(fast=()), **options)
    for (images, targets), (wanted, same) in zip(on_dali, on_stock, strict=True):
        assert {images.device.type, targets.device.type} == {"cuda"}
        assert_same(targets.cpu(), same)
        assert (images.shape, images.dtype) == (wanted.shape, wanted.dtype)
        off = (images.cpu().double() - wanted.double()).abs()
        # Other decoders and filters: another crop or flip would be many times as far off.
        assert off.mean() < 0.05 * (wanted.double().max() - wanted.double().min())
    assert sum(decoded) == len(on_dali.dataset)  # by the graph, and not by the CPU in its place
