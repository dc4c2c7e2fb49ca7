"""Images of a cache that are encoded anew, or packed as the dataset's own files."""

from __future__ import annotations

import io
import itertools
import pickle
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.functional import InterpolationMode

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, Encoded, precompute, verify
from dataloaders.cache.build.builder import estimate
from dataloaders.cache.build.fingerprint import fingerprint
from dataloaders.cache.build.rows import Gathered
from dataloaders.cache.format.writing import About, write_cache
from dataloaders.cache.sample.cell import Cell, cell_of, fits, leaf_of
from dataloaders.cache.sample.decode import KEPT
from dataloaders.cache.sample.encoding import encoded
from dataloaders.cache.sample.images import Images
from dataloaders.cli import main
from dataloaders.errors import CacheError, OptionError
from helpers.cached import MODES
from helpers.compare import assert_same, bits

SIZE = 6
NEAREST = InterpolationMode.NEAREST
LOSSLESS = [(name, mode) for name in ("PNG", "WEBP") for mode in KEPT[name]]
FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


def smooth(number: int, height: int = 24, width: int = 30) -> Any:
    """A picture with gradients, as photos have."""
    y, x = np.mgrid[:height, :width]
    planes = [np.sin(x / (9 + number)) * 80 + 120, np.cos(y / 7) * 70 + 110, (x + y) * 3 + number]
    return Image.fromarray(np.stack(planes, 2).astype(np.uint8))


class Photos(Dataset[Any]):
    """A picture, a mask of two modes and a number, from memory."""

    def __init__(self, *members: Any, mode: str = "RGB", size: int = SIZE) -> None:
        self.transform = v2.Compose(list(members)) if members else None
        self.mode, self.size = mode, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        image = smooth(index, 24 + index).convert(self.mode if index == 2 else "RGB")
        if self.transform is not None:
            image = self.transform(image)
        mask = smooth(index).convert("1" if index % 2 else "L")
        return {"image": image, "mask": mask, "label": index}


def mask(number: int, mode: str = "RGB", height: int = 24, width: int = 30) -> Any:
    """Classes as VOC's have them: indices of few colours, and 255 round them."""
    y, x = np.mgrid[:height, :width]
    indices = ((x // 7 + y // 5 + number) % 5).astype(np.uint8)
    indices[y // 5 != (y + 1) // 5] = 255
    image = Image.fromarray(indices)
    image.putpalette([value * 37 % 256 for value in range(256 * len(mode))], mode)
    return image


class Masks(Dataset[Any]):
    """A picture and a mask with a palette, as VOCSegmentation gives them."""

    def __init__(self, transform: Any = None, target_transform: Any = None) -> None:
        self.transform, self.target_transform = transform, target_transform

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        height = 24 + index % 2
        image, target = smooth(index, height), mask(index, "RGB", height)
        if index == 3:
            target.info["transparency"] = 255
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of three files, of several formats; one is to be turned by its EXIF."""
    folder = tmp_path_factory.mktemp("photos")
    exif = Image.Exif()
    exif[0x0112] = 6
    for number in range(SIZE):
        kind = folder / f"class{number % 2}"
        kind.mkdir(exist_ok=True)
        image = smooth(number, 24 + number)
        if number == 3:
            image = image.convert("L")
        suffix, options = ("jpg", {"exif": exif}) if number < 4 else ("png", {})
        image.save(kind / f"{number}.{suffix}", **options)
    return folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.h5"


def make(dataset: Any, path: Path, images: Any = None, **options: Any) -> CachedDataset:
    return precompute(dataset, path, images=images, **{"num_workers": 0, **options})


def seeded(dataset: Any, index: int) -> Any:
    torch.manual_seed(index + 100)
    random.seed(index)
    np.random.seed(index)
    return dataset[index]


def assert_all_equal(cached: Any, dataset: Any) -> None:
    assert len(cached) == len(dataset)
    for index in range(len(dataset)):
        assert bits(seeded(cached, index)) == bits(seeded(dataset, index))


def kinds(cached: CachedDataset) -> dict[str, list[str]]:
    return {column.name: [kind for kind, _ in column.variants] for column in cached.columns}


# One image


@st.composite
def pictures(draw: st.DrawFn, modes: st.SearchStrategy[str]) -> Any:
    mode = draw(modes)
    size = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    count = len(Image.new(mode, size).tobytes())
    return Image.frombytes(mode, size, draw(st.binary(min_size=count, max_size=count)))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_lossless_formats_give_the_very_pixels_back(data: st.DataObject) -> None:
    name, mode = data.draw(st.sampled_from(LOSSLESS))
    image = data.draw(pictures(st.just(mode)))
    cell = cell_of(image, "sample")
    kept = encoded(cell, Encoded(name.lower()))
    assert kept.kind == f"encoded:{name}:{mode}"
    assert fits(kept.kind, kept.values.dtype.str, kept.values.ndim, None)
    back = leaf_of(kept.kind, kept.values)
    assert type(back) is Image.Image
    assert back.info == {}
    assert bits(back) == bits(leaf_of(cell.kind, cell.values))


@pytest.mark.parametrize("opaque", [True, False])
def test_webp_keeps_alpha_and_the_colours_below_it(opaque: bool) -> None:
    image = smooth(0).convert("RGBA")
    image.putalpha(255 if opaque else 0)
    kept = encoded(cell_of(image, "sample"), Encoded("webp"))
    assert bits(leaf_of(kept.kind, kept.values)) == bits(image)


@pytest.mark.parametrize("mode", KEPT["JPEG"])
def test_jpeg_is_near_and_smaller(mode: str) -> None:
    image = smooth(1, 200, 300).convert(mode)
    cell = cell_of(image, "sample")
    sizes, errors = [], []
    for quality in (95, 60):
        kept = encoded(cell, Encoded("jpeg", quality=quality))
        assert kept.kind == f"encoded:JPEG:{mode}"
        back = leaf_of(kept.kind, kept.values)
        assert (back.mode, back.size) == (image.mode, image.size)
        difference = np.asarray(back).astype(int) - np.asarray(image)
        errors.append(np.abs(difference).mean())
        sizes.append(len(kept.values))
    assert sizes[1] < sizes[0] < cell.values.nbytes / 4
    assert 0 < errors[0] < errors[1] < 8


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in KEPT for mode in MODES if mode not in KEPT[name]],
)
def test_modes_that_a_format_cannot_keep(name: str, mode: str) -> None:
    image = Image.new(mode, (4, 3))
    with pytest.raises(CacheError, match=f"mode '{mode}', 4 x 3 pixels, which {name.lower()} can"):
        encoded(cell_of(image, "sample"), Encoded(name.lower()))


def test_the_message_names_what_can_keep_it() -> None:
    with pytest.raises(CacheError, match=r"which jpeg cannot keep; png and webp can\. Call"):
        encoded(cell_of(Image.new("RGBA", (4, 3)), "sample"), Encoded("jpeg"))


@pytest.mark.parametrize("name", ["jpeg", "png", "webp"])
def test_images_that_are_empty_or_too_large(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CacheError, match="it is empty"):
        encoded(cell_of(Image.new("RGB", (0, 4)), "sample"), Encoded(name))
    if name != "png":
        with pytest.raises(CacheError, match=r"70000 x 1 pixels.* too large\. Give max_side"):
            encoded(cell_of(Image.new("L", (70000, 1)), "sample"), Encoded(name))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    large = cell_of(smooth(0, 40, 40), "sample")
    with pytest.raises(CacheError, match="it is too large"):  # it could not be read again
        encoded(large, Encoded(name))
    assert leaf_of(*vars_of(encoded(large, Encoded(name, max_side=20)))).size == (20, 20)


def vars_of(cell: Cell) -> tuple[str, Any]:
    return cell.kind, cell.values


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.sampled_from(["RGB", "1"]))
def test_the_longer_side_is_bounded(width: int, height: int, most: int, mode: str) -> None:
    image = smooth(0, height, width).convert(mode)
    cell = cell_of(image, "sample")
    kept = leaf_of(*vars_of(encoded(cell, Encoded("png", max_side=most))))
    if max(width, height) <= most:
        assert bits(kept) == bits(image)
        return
    assert max(kept.size) == most
    scale = most / max(width, height)
    assert all(
        abs(now - before * scale) <= 0.5 or now == 1
        for now, before in zip(kept.size, image.size, strict=True)
    )
    assert bits(kept) == bits(image.resize(kept.size, Image.Resampling.LANCZOS))


def test_nothing_but_pixels_gets_into_a_file() -> None:
    image = smooth(0)
    image.info = {"icc_profile": b"secret", "exif": b"Exif\0\0secret", "dpi": (7, 7)}
    for name in ("jpeg", "png", "webp"):
        kept = encoded(cell_of(image, "sample"), Encoded(name))
        assert b"secret" not in kept.values.tobytes()
        assert bits(encoded(cell_of(smooth(0), "sample"), Encoded(name)).values) == bits(
            kept.values
        )


# What may be asked for


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("gif",), r"Encoded\('gif'\): it must be \"jpeg\", \"png\" or \"webp\""),
        (("jpeg", 0), r"Encoded\(quality=0\): it must be an int from 1 to 100"),
        (("jpeg", 101), "quality=101"),
        (("jpeg", True), "quality=True"),
        (("jpeg", 90.0), "quality=90.0"),
        (("png", 90), r"Encoded\('png', quality=90\): png is stored without loss"),
        (("webp", None, 0), r"Encoded\(max_side=0\): it must be None or a whole number of pixels"),
        (("webp", None, 65536), "max_side=65536"),
    ],
)
def test_options_of_a_format(options: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        Encoded(*options)


@pytest.mark.parametrize(
    "choice", ["gif", 3, ["jpeg"], {"image": "packed"}, {"image": None}, {1: "png"}]
)
def test_ways_that_there_are_not(choice: Any, path: Path) -> None:
    with pytest.raises(OptionError, match="images="):
        make(Photos(), path, choice)
    assert not path.exists()


def test_ways_in_words() -> None:
    told = {
        "raw": [None, "raw", {}, {"image": "raw"}],
        "jpeg, quality 90": ["jpeg", Encoded("jpeg"), Encoded("jpeg", quality=90)],
        "webp, max_side 5": [Encoded("webp", max_side=5)],
        "a: jpeg, quality 3; b: png": [{"b": "png", "a": Encoded("jpeg", 3), "c": "raw"}],
        "packed": ["packed"],
    }
    for text, choices in told.items():
        assert {str(Images.of(choice)) for choice in choices} == {text}


# A whole cache


@pytest.mark.parametrize("images", ["png", Encoded("webp")])
def test_a_lossless_cache_is_the_dataset(path: Path, images: Any) -> None:
    dataset = Photos(v2.Resize((20, 20)), v2.RandomCrop(9), *FLOATS)
    if images == "png":
        cached = make(dataset, path, images)
        assert kinds(cached)["mask"] == ["encoded:PNG:L", "encoded:PNG:1"]
    else:
        cached = make(dataset, path, {"image": images})
        assert kinds(cached)["mask"] == ["image:L", "image:1"]
    assert kinds(cached)["label"] == ["int"]
    assert cached.index.head == ("Resize(size=[20, 20], interpolation=bilinear, antialias=True)",)
    assert_all_equal(cached, dataset)
    assert_all_equal(pickle.loads(pickle.dumps(cached)), dataset)
    assert verify(path) == []


def test_a_lossy_cache(path: Path) -> None:
    dataset = Photos()
    how = {"image": Encoded("jpeg", quality=80, max_side=16), "mask": "png"}
    cached = make(dataset, path, how)
    assert kinds(cached) == {
        "image": ["encoded:JPEG:RGB"],
        "mask": ["encoded:PNG:L", "encoded:PNG:1"],
        "label": ["int"],
    }
    for row in range(SIZE):
        assert bits(cached[row]["mask"]) == bits(dataset[row]["mask"])
        assert max(cached[row]["image"].size) == 16
        file = cached.readers[0].file(row)
        assert file is not None
        assert bits(Image.open(io.BytesIO(file)).convert("RGB")) == bits(cached[row]["image"])
    assert cached.readers[2].file(0) is None


# Images with a palette


@pytest.mark.parametrize("images", ["raw", "png", {"0": "webp"}, {"1": "raw"}])
def test_masks_with_a_palette_are_kept_as_png(path: Path, images: Any) -> None:
    cached = make(Masks(), path, images)
    assert kinds(cached)["1"] == ["encoded:PNG:P"]
    assert cached.columns[1].most_pixels == 25 * 30
    assert_all_equal(cached, Masks())
    assert_all_equal(pickle.loads(pickle.dumps(cached)), Masks())
    assert verify(path) == []
    for row in range(SIZE):
        assert cached[row][1].info == ({"transparency": 255} if row == 3 else {})
        file = cached.readers[1].file(row)
        assert file is not None
        assert np.array_equal(np.array(Image.open(io.BytesIO(file))), np.array(Masks()[row][1]))
    with pytest.raises(CacheError, match="largest=2999 allows"):
        CachedDataset(path, largest=4 * 25 * 30 - 1)


@pytest.mark.parametrize("images", ["jpeg", "webp", {"1": "jpeg"}])
def test_masks_with_a_palette_are_nothing_else(path: Path, images: Any) -> None:
    how = images if isinstance(images, str) else images["1"]
    told = f"column '1' is an image of mode 'P', 30 x 24 pixels, which {how} cannot keep; png can"
    text = rf"{told}\. Name the columns to encode and leave this one out: images="
    with pytest.raises(CacheError, match=text):
        make(Masks(), path, images)


def test_an_index_has_no_colours_in_between(path: Path) -> None:
    cached = make(Masks(), path, Encoded("png", max_side=13))
    for row in range(SIZE):
        kept, whole = cached[row][1], Masks()[row][1]
        assert max(kept.size) == 13
        assert bits(kept) == bits(whole.resize(kept.size, Image.Resampling.NEAREST))


def test_a_palette_is_part_of_what_a_sample_gives(path: Path) -> None:
    class Other(Masks):
        __qualname__, __module__ = Masks.__qualname__, Masks.__module__

        def __getitem__(self, index: int) -> Any:
            image, target = super().__getitem__(index)
            target.putpalette(bytes(target.getpalette()[:-1]) + b"\7")
            return image, target

    make(Masks(), path)
    assert fingerprint(Masks()).items() <= make(Masks(), path).index.fingerprint.items()
    with pytest.raises(CacheError, match="the contents of sample 0, "):
        make(Other(), path, check="contents")


def test_a_transparent_colour_of_a_palette_is_kept_for_code_that_looks_at_it(path: Path) -> None:
    dataset = Masks(target_transform=v2.Compose([v2.CenterCrop(20), transparent]))
    cached = make(dataset, path)
    assert cached.index.head == ("CenterCrop(size=(20, 20))",)
    assert [cached[row][1] for row in range(SIZE)] == [None, None, None, 255, None, None]


def transparent(image: Any) -> Any:
    """Somebody's own transform."""
    return image.info.get("transparency")


BOTH: dict[str, tuple[Any, Any, bool]] = {
    "pictures": (
        lambda: v2.Compose([v2.CenterCrop(20), v2.RandomCrop(16), *FLOATS]),
        lambda: v2.Compose(
            [v2.Resize(22, NEAREST), v2.RandomCrop(16),
             v2.RandomHorizontalFlip(), v2.PILToTensor()]
        ),
        True,
    ),
    "v1": (
        lambda: v1.Compose([v1.RandomCrop(16), v1.ToTensor()]),
        lambda: v1.Compose([v1.RandomResizedCrop(16, interpolation=NEAREST), v1.ToTensor()]),
        True,
    ),
    "colours": (
        lambda: v2.Compose([v2.RandomCrop(16), v2.PILToTensor()]),
        lambda: v2.Compose([v2.RandomCrop(16, padding=2), v2.RGB(), v2.PILToTensor()]),
        True,
    ),
    "somebody's own": (
        lambda: v2.Compose([v2.RandomCrop(16), *FLOATS]),
        lambda: v2.Compose([v2.RandomCrop(16), indices]),
        False,
    ),
}  # fmt: skip


def indices(image: Any) -> Any:
    """Somebody's own transform."""
    return torch.from_numpy(np.array(image)).long()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.thinned(5)
def test_batches_of_masks_are_those_of_stock(
    path: Path, workers: int, name: str, workers_end_fast: None
) -> None:
    images, masks, at_once = BOTH[name]
    dataset = Masks(images(), masks())
    options: Any = {"batch_size": 4, "shuffle": True, "num_workers": workers, "seed": 5}
    theirs = epochs(DataLoader(dataset, **options))
    ours = DataLoader(dataset, backend=H5(path), **options)
    assert_same(epochs(ours), theirs)
    assert kinds(CachedDataset(path))["1"] == ["encoded:PNG:P"]
    assert ("batches are made at once" in str(ours.explain())) == at_once


# Columns of files


def test_files_of_one_length_are_a_fixed_column(path: Path) -> None:
    class Same(Photos):
        def __getitem__(self, index: int) -> Any:
            return smooth(1)

    cached = make(Same(), path, "jpeg")
    assert cached.columns[0].fixed
    assert {bits(image) for image in (cached[3], *cached[2:5])} == {bits(cached[0])}
    assert cached.readers[0].file(5) == cached.column("sample")[0].tobytes()


def test_files_that_are_of_one_length_only_where_one_looked(path: Path) -> None:
    """The file is laid out for rows of one length, before it turns out that there are others."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)

    class Odd(Photos):
        def __getitem__(self, index: int) -> Any:
            return Image.fromarray(noise[: 31 if index == 5 else 40])

    dataset = Odd(size=31)  # even ones are looked at
    cached = make(dataset, path, "png", rows=4)
    assert not cached.columns[0].fixed
    assert_all_equal(cached, dataset)


def test_files_are_not_compressed_again(path: Path) -> None:
    class Large(Photos):
        def __getitem__(self, index: int) -> Any:
            return smooth(index, 120, 160), torch.zeros(9000)

    cached = make(Large(), path, "png", compress="zstd")
    assert [column.packing is None for column in cached.columns] == [True, False]
    assert_all_equal(cached, Large())
    assert make(Large(), path).identity == cached.identity


def test_it_takes_less_room_and_says_so_before(tmp_path: Path) -> None:
    class Large(Photos):
        def __getitem__(self, index: int) -> Any:
            return smooth(index, 300, 400)

    raw, small = tmp_path / "raw.h5", tmp_path / "small.h5"
    make(Large(), raw, "raw")
    make(Large(), small, "jpeg")
    assert small.stat().st_size < raw.stat().st_size / 5
    told = {how: estimate(Large(), raw, images=how, num_workers=0) for how in ("raw", "jpeg")}
    assert told["jpeg"].bytes < told["raw"].bytes / 10
    assert told["jpeg"].bytes <= small.stat().st_size


def test_what_the_file_has_counts_where_nothing_is_said(path: Path, photos: Path) -> None:
    dataset = ImageFolder(photos)
    for images, other in (("jpeg", "raw"), ("packed", "png"), ("raw", "packed")):
        built = make(dataset, path, images, overwrite=True)
        assert built.index.fingerprint["images"] == str(Images.of(images))
        for again in (None, images):
            assert make(dataset, path, again).identity == built.identity
        old, new = Images.of(images), Images.of(other)
        with pytest.raises(CacheError, match=f"images: {old} when it was built, {new} now; build"):
            make(dataset, path, other)


def test_a_mode_that_cannot_be_kept_names_its_sample(path: Path) -> None:
    dataset = Photos(mode="RGBA")
    text = "sample 2 cannot be kept: column 'image' is an image of mode 'RGBA'"
    with pytest.raises(CacheError, match=text):
        make(dataset, path, {"image": "jpeg"})
    cached = make(dataset, path, {"image": "jpeg"}, on_error="skip")
    assert [number for number, _ in cached.failed] == [2]
    assert text in cached.failed[0][1]
    assert len(make(dataset, path)) == SIZE - 1  # only opened: nothing is encoded


@pytest.mark.parametrize(
    ("members", "images", "text"),
    [
        ([v2.ToImage(), v2.CenterCrop(9)], {"image": "jpeg"}, "'image': ...}: there is no PIL ima"),
        ([], {"picture": "jpeg"}, "'picture': ...}: unknown; the columns are 'image', 'mask', 'l"),
        ([], {"label": "png"}, "'label': ...}: there is no PIL image in it"),
    ],
)
def test_columns_that_hold_no_images(path: Path, members: Any, images: Any, text: str) -> None:
    with pytest.raises(CacheError, match=text):
        make(Photos(*members), path, images)
    assert not path.exists()


ENDS: dict[str, tuple[list[Any], int]] = {
    "validation": ([v2.Resize(20), v2.CenterCrop(16), *FLOATS], 2),
    "bytes": ([v2.Resize(20), v2.PILToTensor()], 1),
    "tensors before a random member": ([v2.CenterCrop(20), v2.ToImage(), v2.RandomCrop(9)], 1),
    "nothing but tensors": ([v2.ToImage(), v2.RandomCrop(9)], 0),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_makes_tensors_stays_live(path: Path, name: str) -> None:
    members, computed = ENDS[name]
    dataset = Photos(*members)
    cached = make(dataset, path, {"image": "png"})
    assert kinds(cached)["image"] == ["encoded:PNG:RGB"]
    assert (len(cached.index.head), len(cached.index.tail)) == (computed, len(members) - computed)
    assert_all_equal(cached, dataset)
    assert_all_equal(make(dataset, path), dataset)
    assert_all_equal(make(dataset, path, {"image": "png"}), dataset)


def test_samples_without_images(path: Path) -> None:
    class Tensors(Photos):
        def __getitem__(self, index: int) -> Any:
            return torch.full((3, 4, 4), index), index

    with pytest.raises(CacheError, match="images='jpeg, quality 90': there is no PIL image in the"):
        make(Tensors(), path, "jpeg")
    assert len(make(Tensors(size=0), path, "jpeg")) == 0


# Packed


def turned(image: Any) -> Any:
    """Somebody's own transform, which looks at what a loader leaves of a file's EXIF."""
    return image.rotate(90 if image.getexif().get(0x0112) == 6 else 0, expand=True)


CHAINS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "a compose": lambda: v2.Compose([v2.Resize(20), v2.RandomResizedCrop(16), *FLOATS]),
    "one member": lambda: v2.RandomCrop(9),
    "somebody's own": lambda: turned,
    "own within": lambda: v2.Compose([turned, v2.RandomCrop(9)]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_packed_is_the_dataset(path: Path, photos: Path, name: str) -> None:
    dataset = ImageFolder(photos, CHAINS[name](), target_transform=lambda target: [target, "a"])
    cached = make(dataset, path, "packed")
    assert kinds(cached) == {"0": ["file:RGB"], "1": ["json"]}
    assert cached.index.head == ()
    assert len(cached.index.tail) == {"none": 0, "a compose": 4, "own within": 2}.get(name, 1)
    assert_all_equal(cached, dataset)
    for row, (file, _) in enumerate(dataset.samples):
        assert cached.readers[0].file(row) == Path(file).read_bytes()
    assert_all_equal(make(dataset, path), dataset)


def test_packed_needs_the_files_no_longer(path: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(photos, folder)
    dataset = ImageFolder(folder, v2.Compose([v2.Resize(20), v2.RandomCrop(16)]))
    cached = make(dataset, path, "packed")
    shutil.rmtree(folder)
    again = pickle.loads(pickle.dumps(cached))
    assert_all_equal(again, ImageFolder(photos, dataset.transform))


def test_packed_parts_of_several_folders(path: Path, photos: Path) -> None:
    def folder() -> Any:
        return ImageFolder(photos, v2.Compose([v2.Resize(20), v2.RandomCrop(16)]))

    first, second = random_split(folder(), [4, 2])
    dataset = ConcatDataset([second, Subset(folder(), [5, 0]), first])
    cached = make(dataset, path, "packed")
    assert len(cached.index.tail) == 2  # equal transforms are one
    assert_all_equal(cached, dataset)


def test_packed_with_different_transforms(path: Path, photos: Path) -> None:
    dataset = ConcatDataset([ImageFolder(photos, v2.RandomCrop(size)) for size in (9, 10)])
    with pytest.raises(CacheError, match="samples go through its transforms in different ways"):
        make(dataset, path, "packed")


def test_packed_targets_that_are_random(path: Path, photos: Path) -> None:
    dataset = ImageFolder(photos, target_transform=lambda target: random.random())
    text = "ImageFolder draws .* generator of Python's random; sample 0 read twice differs in"
    with pytest.raises(CacheError, match=text):
        make(dataset, path, "packed")


@pytest.mark.parametrize("broken", [0, 1])
def test_packed_files_that_are_broken(
    path: Path, photos: Path, tmp_path: Path, broken: int
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(photos, folder)
    dataset = ImageFolder(folder)
    file = Path(dataset.samples[broken][0])
    file.write_bytes(file.read_bytes()[:-90])
    with pytest.raises(
        CacheError, match=f"sample {broken} cannot be kept: {file}: it cannot be de"
    ):
        make(dataset, path, "packed")
    cached = make(dataset, path, "packed", on_error="skip")
    assert [number for number, _ in cached.failed] == [broken]
    assert len(cached) == SIZE - 1
    file.unlink()
    with pytest.raises(FileNotFoundError):
        make(dataset, path, "packed", overwrite=True)


def test_packed_files_all_broken(path: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(photos, folder)
    for file in folder.rglob("*.*"):
        file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    dataset = ImageFolder(folder)
    with pytest.raises(CacheError, match=r"sample 0 cannot be kept: .* is no file of format BM"):
        make(dataset, path, "packed")
    with pytest.raises(CacheError, match="no sample could be read"):
        make(dataset, path, "packed", on_error="skip")


def test_packed_and_empty(path: Path, photos: Path) -> None:
    assert len(make(Subset(ImageFolder(photos), []), path, "packed")) == 0


# A file that somebody made to do harm


def hostile(path: Path, kind: str, data: bytes, rows: int = 2) -> CachedDataset:
    """A cache whose rows are these bytes, sound in everything else."""
    cell = Cell(kind, np.frombuffer(data, np.uint8))
    gathered = Gathered()
    for row in range(rows):
        gathered.add(row, 0, [cell])
    write_cache(path, About(rows), 0, rows, gathered.entries(), gathered.blocks)
    return CachedDataset(path)


def refuse(path: Path, kind: str, data: bytes, text: str) -> None:
    cached = hostile(path, kind, data)
    for read in (lambda: cached[1], lambda: cached.__getitems__([1])):
        with pytest.raises(
            CacheError, match=f"column 'sample', row 1: a cell of kind '{kind}'.*{text}"
        ):
            read()


def png(width: int, height: int, mode: int = 2, data: bytes = b"") -> bytes:
    def chunk(name: bytes, inside: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + inside))
        return struct.pack(">I", len(inside)) + name + inside + crc

    head = struct.pack(">IIBBBBB", width, height, 8, mode, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def saved(image: Any, name: str) -> bytes:
    file = io.BytesIO()
    image.save(file, name)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["encoded:PNG:RGB", "encoded:PNG:P", "file:RGB"])
def test_a_decompression_bomb(path: Path, kind: str) -> None:
    mode = 3 if kind == "encoded:PNG:P" else 2
    refuse(path, kind, png(60000, 60000, mode), "DecompressionBombError: Image size")
    refuse(path, kind, png(2**31 - 1, 2**31 - 1, mode), "Bomb")
    refuse(path, kind, png(200, 200, mode), "it cannot be decoded")  # no pixels after all


def test_bytes_of_something_else(path: Path) -> None:
    colour, grey = smooth(0), smooth(0).convert("L")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    refuse(path, "encoded:JPEG:RGB", saved(colour, "PNG"), "it is no file of format JPEG")
    refuse(path, "encoded:JPEG:RGB", saved(grey, "JPEG"), "it is a JPEG of mode L")
    refuse(path, "encoded:WEBP:RGBA", saved(colour, "PNG"), "it is no file of format WEBP")
    refuse(path, "encoded:PNG:L", saved(colour, "PNG"), "it is a PNG of mode RGB")
    refuse(path, "encoded:PNG:P", saved(colour, "PNG"), "it is a PNG of mode RGB")
    refuse(path, "file:RGB", eps, "it is no file of format BMP, GIF")
    refuse(path, "file:RGB", b"", "it is no file of format")
    refuse(path, "encoded:JPEG:RGB", saved(smooth(0, 90, 90), "JPEG")[:-200], "truncated")


@pytest.mark.parametrize(
    "kind",
    ["encoded:JPEG:RGBA", "encoded:EPS:RGB", "encoded:RGB", "encoded:", "encoded", "file:L", "file",
     "file:", "encoded:jpeg:RGB", "encoded:JPEG:RGB:", "encoded:PNG:I;16:x"],
)  # fmt: skip
def test_kinds_that_there_are_not(path: Path, kind: str) -> None:
    assert not fits(kind, "|u1", 1, None)
    with pytest.raises(CacheError, match="cannot hold"):
        hostile(path, kind, b"abc")
    with pytest.raises(CacheError, match="cannot hold"):
        leaf_of(kind, np.zeros(3, np.uint8))


# As a backend


def epochs(loader: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(list(loader) for _ in range(2)))


def test_what_the_backend_says(path: Path, photos: Path, tmp_path: Path) -> None:
    dataset = ImageFolder(photos)

    def plan(backend: H5, of: Any = dataset) -> str:
        return str(backend.explain(DataLoader(of)))

    with pytest.raises(OptionError, match="images='gif'"):
        H5(images="gif")  # type: ignore[arg-type]
    assert "with images as packed, built at" in plan(H5(path, images="packed"))
    assert "with images" not in plan(H5(path))
    make(dataset, path, Encoded("jpeg", 70))
    assert f"rows of {path} with images as jpeg, quality 70\n" in plan(H5(path))
    assert "with images as webp, built" in plan(H5(images="webp"))
    cropped = ImageFolder(photos, v2.Compose([v2.RandomCrop(9), v2.PILToTensor()]))
    own = ImageFolder(photos, v2.Compose([v2.RandomCrop(9), np.asarray]))
    for backend in (H5(path), H5(images="raw"), H5(images="packed")):
        assert "batches are made at once" in plan(backend, cropped)
        assert backend.takes_ahead(DataLoader(cropped))
        itself = (
            "samples are made one by one: asarray at transform.transforms[1] is not supported for"
        )
        assert itself in plan(backend, own).replace("transforms.transform", "transform")
        assert not backend.takes_ahead(DataLoader(own))
    assert "images stored as jpeg, quality 70 are decoded in this process" in plan(
        H5(path), cropped
    )
    packed, why = H5(tmp_path / "no.h5", images="packed"), "an image that Pillow did not open from"
    told = plan(packed, Photos())
    assert "cannot serve this loader: sample 0 cannot be kept" in told
    assert why in told
    with pytest.raises(CacheError, match=why):
        next(iter(DataLoader(Photos(), backend=packed)))
    with pytest.raises(CacheError, match="images: jpeg, quality 70 when it was built, png now"):
        next(iter(DataLoader(dataset, backend=H5(path, images="png"))))


@pytest.mark.nightly
def test_caches_in_the_users_folder_have_names_of_their_own(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path))
    dataset = ImageFolder(photos, v2.Compose([v2.Resize(20), v2.CenterCrop(16), *FLOATS]))
    for images in (None, "raw", "packed", "jpeg"):
        epochs(DataLoader(dataset, backend=H5(images=images)))
    files = sorted((tmp_path / "h5").glob("*.h5"))
    found = sorted(CachedDataset(file).index.fingerprint["images"] for file in files)
    assert found == ["jpeg, quality 90", "packed", "raw"]


# On the command line


@pytest.fixture
def command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def carry_out(*words: Any) -> tuple[int, str]:
        capfd.readouterr()
        try:
            status = main(["cache", *map(str, words)])
        except SystemExit as error:
            status = int(error.code or 0)
        read = capfd.readouterr()
        return status, read.out + read.err

    return carry_out


def test_a_packed_cache_and_back(
    command: Callable[..., tuple[int, str]], path: Path, photos: Path, tmp_path: Path
) -> None:
    assert command("build", photos, path, "--images", "packed", "--workers", 0)[0] == 0
    status, said = command("info", path)
    assert status == 0
    assert "file:RGB" in said
    assert "built from images: packed" in said


def test_an_encoded_cache_and_back(
    command: Callable[..., tuple[int, str]], path: Path, photos: Path, tmp_path: Path
) -> None:
    words = ("--images", "jpeg", "--quality", 70, "--max-side", 20, "--workers", 0)
    assert command("build", photos, path, *words)[0] == 0
    status, said = command("info", path)
    assert status == 0
    assert "encoded:JPEG:RGB" in said
    assert "built from images: jpeg, quality 70, max_side 20" in said
    assert command("build", photos, tmp_path / "b.h5", "--images", "0=webp")[0] == 0
    assert kinds(CachedDataset(tmp_path / "b.h5"))["0"] == ["encoded:WEBP:RGB"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--images gif", "images='gif': it must be"),
        ("--quality 80", "--images is not given; give --images jpeg"),
        ("--images packed --max-side 9", "--images is packed"),
        ("--images raw --quality 9", "--images is raw"),
        ("--images png --quality 80", "png is stored without loss"),
        ("--images image=png --quality 80", "--quality is for jpeg"),
        ("--images image=png,image=jpeg", "each column once"),
        ("--images image=png,mask", "give column=jpeg,other=png"),
        ("--images image=gif", "gif"),
        ("--images jpeg --quality 0", "quality=0"),
    ],
)
def test_words_that_cannot_be(
    command: Callable[..., tuple[int, str]], path: Path, photos: Path, words: str, text: str
) -> None:
    status, said = command("build", photos, path, *words.split())
    assert status != 0
    assert text in said
    assert not path.exists()
