"""backend="h5": batches of images that are decoded, or changed one by one, made at once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("h5py")
pytest.importorskip("torchvision")

from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from backends.h5 import H5
from backends.h5.batches import Batches, batches_of
from backends.h5.pictures import Made, Steps, header_of, steps_of
from backends.h5.team import Team
from backends.prefetch import Prefetch
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, Encoded, precompute
from dataloaders.errors import CacheError
from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.draws import Draws
from helpers.compare import assert_same

pytestmark = pytest.mark.usefixtures("workers_end_fast")

COUNT = 10
SIZES = ((24, 30), (31, 25), (40, 26))
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP = [v2.RandomCrop(16), v2.RandomHorizontalFlip()]
FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]

CHAINS: dict[str, Callable[[], Any]] = {
    "v1 bytes": lambda: v1.Compose(
        [v1.RandomCrop(16), v1.RandomHorizontalFlip(), v1.PILToTensor()]
    ),
    "v1 floats": lambda: v1.Compose(
        [
            v1.RandomResizedCrop(16),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize(MEAN, STD),
        ]
    ),
    "v2 bytes": lambda: v2.Compose([*CROP, v2.PILToTensor()]),
    "v2 floats": lambda: v2.Compose([*CROP, *FLOATS]),
    "grey": lambda: v2.Compose([v2.RandomResizedCrop(16), v2.Grayscale(3), *FLOATS]),
    "after the tensor": lambda: v2.Compose(
        [v2.RandomCrop(16), *FLOATS, v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
    ),
    "tensors of bytes": lambda: v2.Compose(
        [v2.RandomCrop(20), v2.ToImage(), v2.RandomVerticalFlip(), v2.RandomResizedCrop(16)]
    ),
    "twice resized": lambda: v1.Compose(
        [v1.RandomResizedCrop(20), v1.RandomVerticalFlip(), v1.Resize(16), v1.ToTensor()]
    ),
    "no random ones": lambda: v1.Compose([v1.CenterCrop(13), v1.ToTensor()]),
}


def picture(index: int, size: tuple[int, int], mode: str = "RGB") -> Any:
    height, width = size
    y, x = np.mgrid[:height, :width]
    planes = [np.sin(x / (5 + index)) * 90 + 120, np.cos(y / 4) * 80 + 110, (x * 3 + y * 5) % 256]
    planes.append((x * 7 + index) % 256)
    pixels = np.stack(planes, 2).astype(np.uint8)
    if mode in ("RGBA", "CMYK"):
        return Image.fromarray(pixels, mode)
    return Image.fromarray(np.ascontiguousarray(pixels[..., :3])).convert(mode)


class Pictures(Dataset[Any]):
    """Images of one mode, or of several in turn, of several sizes, and labels."""

    def __init__(self, transform: Any, *modes: str, sizes: Any = SIZES) -> None:
        self.transform, self.modes, self.sizes = transform, modes or ("RGB",), sizes

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < COUNT:
            raise IndexError(index)
        mode = self.modes[index % len(self.modes)]
        image = picture(index, self.sizes[index % len(self.sizes)], mode)
        return {"image": self.transform(image), "label": index}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.h5"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of all sorts in two classes: grey, with a palette, turned, with alpha, of 16 bits."""
    folder = tmp_path_factory.mktemp("photos")
    exif = Image.Exif()
    exif[0x0112] = 6
    sorts: list[tuple[str, str, dict[str, Any]]] = [
        ("RGB", "jpg", {"quality": 85, "exif": exif}),
        ("L", "jpg", {}),
        ("CMYK", "jpg", {}),
        ("P", "png", {}),
        ("RGBA", "png", {}),
        ("RGB", "webp", {"lossless": True}),
        ("LA", "png", {}),
        ("RGB", "bmp", {}),
        ("RGB", "tiff", {"exif": exif}),
        ("1", "png", {}),
    ]
    for number, (mode, suffix, options) in enumerate(sorts):
        kind = folder / f"class{number % 2}"
        kind.mkdir(exist_ok=True)
        picture(number, SIZES[number % 3], mode).save(kind / f"{number}.{suffix}", **options)
    return folder


def made_at_once(cached: CachedDataset) -> Batches:
    batches = batches_of(cached)
    assert isinstance(batches, Batches), batches
    return batches


def one_by_one(dataset: Any, rows: list[int], seeding: Any) -> Any:
    samples = []
    with random_states_kept(cuda=False):
        for row, each in zip(rows, seeding.tolist(), strict=True):
            seed_generators(tuple(each))
            samples.append(dataset[row])
    return default_collate(samples)


def assert_equal_batches(cached: CachedDataset) -> None:
    batches = made_at_once(cached)
    for seed, rows in enumerate(([3, 1, 1, 9, 0], [7], list(range(COUNT)))):
        seeding = words(seed, 0, rows, np.arange(len(rows)))
        found = batches.of(rows, Draws(seeding))
        assert found is not None
        assert_same(found, one_by_one(cached, rows, seeding))


# Each format, each chain


@pytest.mark.parametrize("chain", ["v1 bytes", "v2 bytes"])
@pytest.mark.parametrize(
    ("images", "mode"),
    [
        *(("jpeg", mode) for mode in ("L", "RGB", "CMYK")),
        *(("png", mode) for mode in ("1", "L", "LA", "RGB", "RGBA")),
        *(("webp", mode) for mode in ("L", "LA", "RGB", "RGBA")),
        *(("raw", mode) for mode in ("1", "LA", "HSV")),
    ],
)
@pytest.mark.thinned(3)
def test_batches_of_each_format_are_those_of_default_collate(
    path: Path, images: str, mode: str, chain: str
) -> None:
    assert_equal_batches(
        precompute(Pictures(CHAINS[chain](), mode), path, images=images, num_workers=0)
    )


@pytest.mark.parametrize("images", ["raw", "jpeg", "png"])
@pytest.mark.parametrize("chain", list(CHAINS))
@pytest.mark.thinned(3)
def test_every_chain_of_crops_flips_and_resizes(path: Path, chain: str, images: str) -> None:
    dataset = Pictures(CHAINS[chain]())
    cached = precompute(dataset, path, images=images, num_workers=0)
    assert_equal_batches(cached)
    assert made_at_once(cached).random == (chain != "no random ones")


@pytest.mark.parametrize("chain", list(CHAINS))
@pytest.mark.thinned(2)
def test_packed_files_go_through_the_whole_chain(path: Path, photos: Path, chain: str) -> None:
    transform = CHAINS[chain]()
    transform.transforms.insert(0, type(transform)([v2.Resize(22), v2.CenterCrop((30, 25))]))
    dataset = ImageFolder(photos, transform)
    cached = precompute(dataset, path, images="packed", num_workers=0)
    assert_equal_batches(cached)
    seeding = words(3, 0, range(COUNT))
    rows = list(range(COUNT))
    assert_same(made_at_once(cached).of(rows, Draws(seeding)), one_by_one(dataset, rows, seeding))


def test_modes_that_the_chain_makes_alike(path: Path) -> None:
    transform = v2.Compose([v2.RandomCrop(16), v2.RGB(), v2.ToImage()])
    cached = precompute(Pictures(transform, "L", "RGB", "1"), path, images="png", num_workers=0)
    assert len({kind for kind, _ in cached.columns[0].variants}) == 3
    assert_equal_batches(cached)


def test_one_channel_that_becomes_three_floats(path: Path) -> None:
    """v2's Normalize with three means: the bytes are not the planes of the image alone."""
    dataset = Pictures(v2.Compose([*CROP, *FLOATS]), "L")
    loaders = [
        DataLoader(dataset, 4, seed=2, backend=each) for each in (H5(path, images="png"), "stock")
    ]
    assert_same(*map(list, loaders))
    assert next(iter(loaders[0]))["image"].shape == (4, 3, 16, 16)


@settings(deadline=None, max_examples=40)
@given(
    sides=st.lists(st.tuples(st.integers(5, 40), st.integers(5, 40)), min_size=1, max_size=5),
    mode=st.sampled_from(["L", "RGB", "RGBA", "CMYK", "YCbCr"]),
    second=st.booleans(),
    steps=st.lists(st.sampled_from(["crop", "resized", "flip", "border", "turn"]), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_what_is_put_into_place_is_what_torchvision_makes(
    sides: list[tuple[int, int]], mode: str, second: bool, steps: list[str], seed: int
) -> None:
    module: Any = v2 if second else v1
    kinds: dict[str, Any] = {
        "crop": lambda: module.RandomCrop(7, pad_if_needed=True),
        "resized": lambda: module.RandomResizedCrop((9, 6)),
        "flip": lambda: module.RandomHorizontalFlip(),
        "border": lambda: module.RandomCrop((8, 10), padding=5),
        "turn": lambda: module.RandomVerticalFlip(0.7),
    }
    chain = module.Compose(
        [*(kinds[step]() for step in steps), module.CenterCrop(5), module.PILToTensor()]
    )
    found = steps_of(chain)
    assert isinstance(found, Steps)
    images = [picture(number, size, mode) for number, size in enumerate(sides)]
    seeding = words(seed, 0, np.arange(len(images)))

    class Known:
        def __init__(self, image: Any) -> None:
            self.mode, self.size, self.image = image.mode, image.size, image

        def decode(self) -> Any:
            return self.image

    made = Made(found, [Known(image) for image in images], Draws(seeding))
    assert made.sizes.height.tolist() == [5] * len(images)
    out = torch.empty((len(images), len(images[0].getbands()), 5, 5), dtype=torch.uint8)
    made.into(out, Team())
    wanted = []
    for image, each in zip(images, seeding.tolist(), strict=True):
        with random_states_kept(cuda=False):
            seed_generators(tuple(each))
            wanted.append(chain(image))
    assert torch.equal(out, torch.stack(wanted))


# The backend


@pytest.mark.parametrize("images", ["raw", "jpeg", "png", "webp", "packed"])
@pytest.mark.parametrize("chain", ["v1 bytes", "v2 floats", "grey", "after the tensor"])
@pytest.mark.thinned(8)
def test_with_a_seed_the_samples_are_those_of_the_same_cache_one_by_one(
    path: Path, photos: Path, chain: str, images: str
) -> None:
    transform = CHAINS[chain]()
    transform.transforms.insert(0, v2.Resize((24, 26)))
    dataset = ImageFolder(photos, transform)
    options: dict[str, Any] = {"sampler": [3, 3, 0, 9, 5, 3, 7], "seed": 4}
    ours = DataLoader(dataset, 5, backend=H5(path, images=images), **options)
    plan = str(ours.explain())
    assert "batches are made at once" in plan
    assert ("are decoded in this process" in plan) == (images != "raw")
    found = [list(ours), list(ours)]
    threaded = DataLoader(dataset, 5, backend=Prefetch(H5(path, images=images)), **options)
    assert "a thread takes up to" in str(threaded.explain())
    assert_same([list(threaded), list(threaded)], found)
    workers = DataLoader(dataset, 5, num_workers=1, backend=H5(path, images=images), **options)
    assert "are decoded in this process" not in str(workers.explain())
    assert_same(list(workers), found[0])
    # Of a lossy cache the samples are not the dataset's: one by one, for a collation of one's own.
    backend = H5(path) if images == "jpeg" else "stock"
    single = DataLoader(dataset, 5, backend=backend, collate_fn=collated, **options)
    assert_same(found, [list(single), list(single)])


def collated(samples: list[Any]) -> Any:
    return default_collate(samples)


@pytest.mark.parametrize("chain", ["v2 floats", "twice resized"])
def test_without_a_seed_order_is_torchs_and_crops_follow_its_base_seed(
    path: Path, photos: Path, chain: str
) -> None:
    dataset = ImageFolder(photos, v1.Compose([v1.Resize((24, 24)), CHAINS[chain]()]))
    loader = DataLoader(dataset, 4, shuffle=True, backend=H5(path, images="packed"))

    def epoch(seed: int, of: Any = loader) -> list[Any]:
        torch.manual_seed(seed)
        return list(of)

    first = epoch(1)
    assert_same(epoch(1), first)
    assert not torch.equal(epoch(2)[0][0], first[0][0])
    theirs = torch.utils.data.DataLoader(dataset, 4, shuffle=True, num_workers=1)
    for ours, wanted in zip(first, epoch(1, theirs), strict=True):
        assert torch.equal(ours[1], wanted[1])
        assert (ours[0].shape, ours[0].dtype) == (wanted[0].shape, wanted[0].dtype)


def test_subsets_and_rows_of_datasets(path: Path, photos: Path) -> None:
    transform = v2.Compose([v2.RandomResizedCrop(12), *FLOATS])
    parts = [ImageFolder(photos, transform) for _ in range(2)]
    dataset = ConcatDataset([Subset(parts[0], [1, 4]), parts[1]])
    loader = DataLoader(dataset, 5, seed=1, backend=H5(path, images="packed"))
    assert "batches are made at once" in str(loader.explain())
    assert_same(list(loader), list(DataLoader(dataset, 5, seed=1)))


def test_shards(path: Path) -> None:
    dataset = Pictures(CHAINS["grey"]())
    for rank in range(3):
        precompute(dataset, path, images="png", num_workers=0, shard=(rank, 3), wait=False)
    from dataloaders.cache import join

    join(path)
    cached = precompute(dataset, path, images="png", num_workers=0)
    assert len(cached.shards) == 3
    assert_equal_batches(cached)


def test_a_copy_in_another_process_makes_the_same(path: Path) -> None:
    cached = precompute(Pictures(CHAINS["twice resized"]()), path, images="jpeg", num_workers=0)
    batches = made_at_once(cached)
    copied = pickle.loads(pickle.dumps(batches))
    rows, seeding = [4, 2, 2], words(9, 0, range(3))
    assert_same(copied.of(rows, Draws(seeding)), batches.of(rows, Draws(seeding)))


# What goes wrong


def spoilt(cached: CachedDataset, row: int) -> None:
    """Zeros in the middle of this row's encoded image, in the file."""
    file = cached.readers[0].file(row)
    assert file is not None
    data = bytearray(cached.path.read_bytes())
    begin = data.find(file) + len(file) // 4
    data[begin : begin + len(file) // 2] = bytes(len(file) // 2)
    with cached.path.open("r+b") as opened:
        opened.write(data)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("chain", ["v2 bytes", "v2 floats", "after the tensor"])
@pytest.mark.covering
def test_a_damaged_image_is_the_error_of_its_own_row(
    path: Path, chain: str, seed: int | None, num_workers: int
) -> None:
    dataset = Pictures(CHAINS[chain]())
    cached = precompute(dataset, path, images="png", num_workers=0)
    spoilt(cached, 5)
    with pytest.raises(CacheError) as wanted:
        CachedDataset(path)[5]
    assert "row 5" in str(wanted.value)
    loader = DataLoader(dataset, 4, seed=seed, num_workers=num_workers, backend=H5(path))
    assert made_at_once(cached)
    iterator = iter(loader)
    assert next(iterator)["label"].tolist() == [0, 1, 2, 3]
    with pytest.raises(CacheError) as found:
        next(iterator)
    assert str(wanted.value) in str(found.value)
    assert next(iterator)["label"].tolist() == [8, 9]


@pytest.mark.nightly
def test_a_damaged_image_among_those_of_the_proof(path: Path) -> None:
    dataset = Pictures(CHAINS["v2 floats"]())
    cached = precompute(dataset, path, images="png", num_workers=0)
    spoilt(cached, 0)
    batches = made_at_once(cached)
    seeding = words(1, 0, range(2))
    assert batches.of([0, 1], Draws(seeding)) is None
    assert_same(batches.of([1, 2], Draws(seeding)), one_by_one(cached, [1, 2], seeding))


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.nightly
def test_an_image_smaller_than_its_crop_is_torchvisions_error(path: Path, seed: Any) -> None:
    sizes = ((24, 30),) * 9 + ((12, 30),)
    dataset = Pictures(CHAINS["v2 floats"](), sizes=sizes)
    iterator = iter(DataLoader(dataset, 4, seed=seed, backend=H5(path, images="jpeg")))
    assert [len(next(iterator)["label"]) for _ in range(2)] == [4, 4]
    with pytest.raises(ValueError, match=r"crop size \(16, 16\) is larger than input image size"):
        next(iterator)


@pytest.mark.nightly
def test_batches_of_several_shapes_are_default_collates_error(path: Path) -> None:
    dataset = Pictures(v2.Compose([v2.RandomHorizontalFlip(), v2.ToImage()]), sizes=SIZES[:2])
    cached = precompute(dataset, path, images="png", num_workers=0)
    seeding = words(1, 0, range(2))
    assert made_at_once(cached).of([0, 1], Draws(seeding)) is None
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(iter(DataLoader(dataset, 4, backend=H5(path))))


def test_what_is_no_image_to_its_kind_is_left_to_the_rows_own_error(path: Path) -> None:
    cached = precompute(Pictures(CHAINS["v1 bytes"]()), path, images="png", num_workers=0)
    other = copy.copy(cached.readers[0])
    other._kinds = ["encoded:JPEG:RGB"]  # what a hostile file may say
    with pytest.raises(ValueError, match="no file of format JPEG"):
        header_of(other, 0)


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (v2.Compose([v2.RandomCrop(9), np.asarray]), "asarray at .*code of your own"),
        (v2.RandomCrop(9), "its tail makes no tensors of images"),
        (v2.Compose([v2.ColorJitter(0.4, hue=0.1), *CROP, *FLOATS]), "ColorJitter .*crops, flips"),
    ],
    ids=["own", "images", "colours"],
)
@pytest.mark.parametrize("images", ["png", "packed"])
def test_why_a_sample_is_made_by_itself(
    path: Path, photos: Path, images: str, transform: Any, why: str
) -> None:
    dataset = ImageFolder(photos, transform)
    loader = DataLoader(dataset, 4, backend=H5(path, images=images), seed=3)
    plan = str(loader.explain())
    lines = [line for line in plan.splitlines() if "samples are made one by one" in line]
    assert len(lines) == 1
    import re

    assert re.search(why, lines[0])
    assert "images kept as" not in plan
    if "ColorJitter" in why:
        assert_same(list(loader), list(DataLoader(dataset, 4, seed=3)))


def test_an_encoded_column_beside_a_raw_one(path: Path) -> None:
    class Both(Pictures):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return {**sample, "other": self.transform(picture(index + 3, (30, 30)))}

    dataset = Both(CHAINS["grey"]())
    images = {"image": Encoded("png")}
    ours = DataLoader(dataset, 4, seed=6, backend=H5(path, images=images))
    assert_same(list(ours), list(DataLoader(dataset, 4, seed=6)))
    assert "batches are made at once" in str(ours.explain())
