"""Datasets of every kind read for a graph: through the chain, they give the dataset's own samples.

The real classes of torchvision, over tiny files of the right layout.
"""

from __future__ import annotations

import io
import random
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from torchvision.datasets import MNIST, DatasetFolder, FakeData, ImageFolder
from torchvision.transforms import v2

from backends.dali.sources import Failed, Source, source_for
from backends.dali.sources.proof import as_tensor
from dataloaders.cache import CachedDataset, Encoded, precompute
from dataloaders.errors import BackendUnavailable
from dataloaders.transforms.read import Run
from helpers.compare import bits
from helpers.image_files import noise, saved
from helpers.vision_datasets import (
    ARRAYS,
    FILES,
    caltech101,
    celeba,
    image_folder,
    photo,
    places365,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
    # torchvision's: an image that is opened and not read, as OxfordIIITPet's masks, stays open.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


def crop() -> Any:
    return v2.Compose([v2.RandomCrop(5, padding=1), v2.RandomHorizontalFlip(), v2.ToImage()])


def later(target: Any) -> Any:
    return ("changed", target)


@pytest.fixture(autouse=True)
def _scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caltech101 imports SciPy, for annotations that are not asked for here."""
    if "scipy" not in sys.modules:
        for name in ("scipy", "scipy.io"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


def known(dataset: Any) -> Source:
    source = source_for(dataset)
    assert isinstance(source, Source), source
    return source


def image_in(source: Source, index: int) -> Any:
    """The image of a source as the dataset hands it to its transform."""
    (found,) = source.images([index])
    assert not isinstance(found, Failed), found.error
    if source.kind == "encoded":
        image = Image.open(io.BytesIO(found.data.tobytes())).convert("RGB")
    elif source.form == "bytes":
        return as_tensor(found.data, wraps=source.wraps)
    else:
        assert found.data.shape == (found.height, found.width, source.channels)
        image = Image.fromarray(found.data if source.channels == 3 else found.data[..., 0])
    assert (image.height, image.width) == (found.height, found.width)
    return image


def assert_gives(dataset: Any, source: Source, *, length: int | None = None) -> None:
    """Each sample by its parts is the dataset's own, under the same random numbers."""
    assert len(source) == len(dataset) == (len(dataset) if length is None else length)
    for index in range(len(dataset)):
        torch.manual_seed(index)
        theirs = dataset[index]
        torch.manual_seed(index)
        image = image_in(source, index)
        ours = source.sample(index, image if source.transform is None else source.transform(image))
        assert bits(ours) == bits(theirs)


# Files


@pytest.mark.parametrize("name", FILES)
def test_a_dataset_of_files(tmp_path: Path, name: str) -> None:
    dataset = FILES[name](tmp_path, transform=crop())
    source = known(dataset)
    assert (source.kind, source.channels, source.form) == ("encoded", 3, "pil")
    assert source.transform is dataset.transform
    assert not source.user_code
    assert_gives(dataset, source)


@pytest.mark.parametrize("name", FILES)
def test_a_dataset_of_files_with_targets_changed(tmp_path: Path, name: str) -> None:
    dataset = FILES[name](tmp_path, transform=v2.ToImage(), target_transform=later)
    source = known(dataset)
    assert source.user_code
    assert source.sample(0, "image")[1][0] == "changed"
    assert_gives(dataset, source)


@pytest.mark.parametrize("name", FILES)
def test_a_dataset_of_files_as_it_is(tmp_path: Path, name: str) -> None:
    dataset = FILES[name](tmp_path)
    source = known(dataset)
    assert source.transform is None
    for index in range(len(dataset)):
        image = image_in(source, index)
        theirs = dataset[index][0]
        assert (image.size, image.tobytes()) == (theirs.size, theirs.tobytes())


class Own(Dataset[Any]):
    """A dataset that says itself what its files are."""

    def __init__(self, files: list[Any], transform: Any = None) -> None:
        self.files = files
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def encoded(self, index: int) -> Any:
        return self.files[index]

    def target(self, index: int) -> Any:
        return {"label": index}


class OwnWhole(Own):
    def __getitem__(self, index: int) -> Any:
        image = Image.open(io.BytesIO(self.files[index])).convert("RGB")
        return self.transform(image), self.target(index)


class OwnOther(OwnWhole):
    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image + 1, target


def test_a_dataset_that_says_what_its_files_are() -> None:
    files = [saved(noise(9, 8, seed=n), "PNG" if n else "TIFF") for n in range(3)]
    dataset = OwnWhole(files, crop())
    source = known(dataset)
    assert source.user_code
    assert_gives(dataset, source)
    assert len(known(Own(files))) == 3  # it has no samples of its own to compare
    assert "sample 0 is another one" in str(source_for(OwnOther(files, crop())))


class OwnPart(Subset[Any]):
    """A part of a dataset that says itself what its files are."""

    def encoded(self, index: int) -> bytes:
        return saved(noise(9, 8, seed=index + 50), "PNG")

    def target(self, index: int) -> int:
        return index

    def __getitem__(self, index: Any) -> Any:
        return Image.open(io.BytesIO(self.encoded(index))).convert("RGB"), index

    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


def test_a_part_that_says_what_its_files_are(tmp_path: Path) -> None:
    dataset = OwnPart(image_folder(tmp_path), [3, 1])
    for outer, index in ((dataset, 1), (Subset(dataset, [1]), 0), (ConcatDataset([dataset]), 1)):
        (found,) = known(outer).images([index])
        assert not isinstance(found, Failed)
        assert found.data.tobytes() == dataset.encoded(1)


def test_errors_of_files_are_the_datasets_own(tmp_path: Path) -> None:
    dataset = image_folder(tmp_path, transform=v2.ToImage())
    paths = [path for path, _ in dataset.samples]
    Path(paths[0]).write_bytes(b"text")
    Path(paths[1]).unlink()
    Path(paths[2]).write_bytes(Path(paths[2]).read_bytes()[:-20])
    source = known(dataset)
    for index in range(3):
        found = source.image(index)
        with pytest.raises(Exception, match=r".") as caught:
            dataset[index]
        assert isinstance(found, Failed)
        assert type(found.error) is caught.type
        assert str(found.error) == str(caught.value)
        assert found.name == paths[index]
    found = Own([b"text", tmp_path / "nowhere", 3])
    errors = [known(found).image(index) for index in range(3)]
    names = ["UnidentifiedImageError", "FileNotFoundError", "CacheError"]
    assert [type(error.error).__name__ for error in errors] == names  # type: ignore[union-attr]


def test_images_that_are_handed_on_in_the_files_own_mode(tmp_path: Path) -> None:
    dataset = caltech101(tmp_path, transform=v2.ToImage())
    source = known(dataset)
    path = Path(dataset.root) / "101_ObjectCategories" / "ant" / "image_0002.jpg"
    photo(path, 3, 1)
    found = source.image(1)
    assert isinstance(found, Failed)
    assert isinstance(found.error, BackendUnavailable)
    assert f"{path} is an image of mode L, which the dataset hands on as it is" in str(found.error)
    assert not isinstance(source.image(0), Failed)
    assert "sample 0 of it can be read, and by its parts raises" in str(
        source_for(Subset(dataset, [1]))
    )


def test_images_of_two_modes_that_the_transform_makes_one(tmp_path: Path) -> None:
    dataset = caltech101(tmp_path, transform=v2.Compose([v2.RGB(), crop()]))
    base = Path(dataset.root) / "101_ObjectCategories"
    photo(base / "ant" / "image_0002.jpg", 3, 1)
    source = known(dataset)
    assert_gives(dataset, source)
    noise(9, 8, 4).convert("CMYK").save(base / "ant" / "image_0003.jpg")
    found = source.image(2)
    assert isinstance(found, Failed)
    assert "is an image of mode CMYK" in str(found.error)
    cached = precompute(Subset(dataset, [0, 1]), tmp_path / "x.h5", images="packed")
    assert_gives(cached, known(cached))


def test_what_stands_in_the_way_of_files(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "a", loader=Image.open)
    assert "loads files by open" in str(source_for(folder))
    annotated = caltech101(tmp_path / "b", target_type=["category", "annotation"])
    assert "Caltech101: it reads annotations" in str(source_for(annotated))
    without = celeba(tmp_path / "c", target_type=[])
    assert known(without).sample(0, "image") == ("image", None)
    without.target_transform = later
    assert "CelebA: it has no targets" in str(source_for(without))
    joint = places365(tmp_path / "d")
    joint.transforms = lambda image, target: (image, target)
    assert "transforms= is applied to image and target at once" in str(source_for(joint))


class Doubled(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image, target * 2


def test_datasets_that_are_not_known(tmp_path: Path) -> None:
    image_folder(tmp_path)
    assert "is not known to decode files" in str(source_for(Doubled(tmp_path / "photos")))
    for dataset in (TensorDataset(torch.zeros(3)), [1, 2], object()):
        assert "is not known to decode files; give it" in str(source_for(dataset))
    assert "is not known" in str(source_for(FakeData(3)))


# Pixels in memory


@pytest.mark.parametrize("name", ARRAYS)
def test_a_dataset_in_memory(tmp_path: Path, name: str) -> None:
    make, channels = ARRAYS[name]
    dataset = make(tmp_path, transform=crop())
    source = known(dataset)
    assert (source.kind, source.channels, source.form) == ("pixels", channels, "pil")
    assert not source.user_code
    assert_gives(dataset, source)
    dataset.target_transform = later
    assert source.user_code
    assert_gives(dataset, source)
    many = source.images([3, 0, 3])
    assert [each.data.tobytes() for each in many] == [  # type: ignore[union-attr]
        source.image(index).data.tobytes()  # type: ignore[union-attr]
        for index in (3, 0, 3)
    ]
    assert all(each.data.flags.c_contiguous for each in many)  # type: ignore[union-attr]


def test_rows_that_are_not_there(tmp_path: Path) -> None:
    dataset = ARRAYS["mnist"][0](tmp_path)
    source = known(dataset)
    found = source.images([0, 99])
    assert not isinstance(found[0], Failed)
    with pytest.raises(IndexError) as caught:
        dataset[99]
    assert isinstance(found[1], Failed)
    assert (type(found[1].error), str(found[1].error)) == (IndexError, str(caught.value))


def test_pixels_that_are_none(tmp_path: Path) -> None:
    dataset = ARRAYS["mnist"][0](tmp_path)
    dataset.data = dataset.data.float()
    assert "MNIST.data holds torch.float32 [1, 28, 28]" in str(source_for(dataset))


def test_other_code_over_pixels_in_memory(tmp_path: Path) -> None:
    class Inverted(MNIST):
        def __getitem__(self, index: int) -> Any:
            image, target = super().__getitem__(index)
            return image.point(lambda value: 255 - value), target

    ARRAYS["mnist"][0](tmp_path)
    shutil.move(tmp_path / "MNIST", tmp_path / "Inverted")
    assert "Inverted is not known" in str(source_for(Inverted(str(tmp_path))))


# Caches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folder")
    image_folder(root)
    return root / "photos"


def finished() -> Any:
    return v2.Compose([v2.Resize((8, 9)), v2.RandomHorizontalFlip(), v2.ToImage()])


@pytest.mark.parametrize("images", ["raw", "png", "webp", Encoded("jpeg"), "packed"])
def test_a_cache(folder: Path, tmp_path: Path, images: Any) -> None:
    cached = precompute(
        ImageFolder(str(folder), transform=finished()), tmp_path / "x.h5", images=images
    )
    source = known(cached)
    assert source.kind == ("pixels" if images == "raw" else "encoded")
    assert source.channels == 3
    members = ["Resize"] * (images == "packed") + ["RandomHorizontalFlip", "ToImage"]
    assert [type(member).__name__ for member in source.transform.transforms] == members
    assert_gives(cached, source, length=7)
    found = source.image(-1)
    assert found.name == f"row -1 of {cached.path}" or found.name == f"row 6 of {cached.path}"
    assert isinstance(source.image(7), Failed)


@pytest.mark.parametrize("images", ["raw", "png", "jpeg", "webp"])
def test_a_cache_of_grey_images(tmp_path: Path, images: str) -> None:
    dataset = ARRAYS["mnist"][0](tmp_path, transform=v2.Compose([v2.RandomCrop(20), v2.ToImage()]))
    cached = precompute(dataset, tmp_path / "x.h5", images=images)  # type: ignore[arg-type]
    source = known(cached)
    assert (source.kind, source.channels) == ("pixels", 1)
    assert_gives(cached, source)


def test_a_cache_without_transforms(folder: Path, tmp_path: Path) -> None:
    cached = precompute(ImageFolder(str(folder)), tmp_path / "x.h5")
    assert known(cached).transform is None
    assert_gives(cached, known(cached))


class Images(Dataset[Any]):
    """Images alone, or as tensors."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return self.make(noise(9, 8, seed=index))


def test_a_cache_of_images_alone(tmp_path: Path) -> None:
    precompute(Images(lambda image: image), tmp_path / "x.h5")
    cached = CachedDataset(tmp_path / "x.h5", transform=crop())
    source = known(cached)
    assert source.transform is cached.transform
    assert_gives(cached, source)


def test_a_cache_of_tensors(tmp_path: Path) -> None:
    cached = precompute(
        Images(lambda image: (torch.from_numpy(np.array(image)).permute(2, 0, 1), 3)),
        tmp_path / "x.h5",
    )
    cached = CachedDataset(tmp_path / "x.h5", tails=[((0,), Run([v2.RandomCrop(5)]))])
    source = known(cached)
    assert (source.form, source.channels, source.kind) == ("bytes", 3, "pixels")
    assert_gives(cached, source)


def test_a_cache_of_what_begins_with_to_image(folder: Path, tmp_path: Path) -> None:
    transform = v2.Compose(
        [v2.ToImage(), v2.Resize((9, 8)), v2.RandomCrop(5), v2.ToDtype(torch.float32, scale=True)]
    )
    cached = precompute(ImageFolder(str(folder), transform=transform), tmp_path / "x.h5")
    source = known(cached)
    assert (source.form, source.wraps, source.channels) == ("bytes", True, 3)
    assert_gives(cached, source)


def test_what_stands_in_the_way_of_a_cache(folder: Path, tmp_path: Path) -> None:
    precompute(ImageFolder(str(folder)), tmp_path / "x.h5")
    whole = CachedDataset(tmp_path / "x.h5", transform=lambda sample: sample)
    assert "x.h5: its transform= is applied to whole samples" in str(source_for(whole))
    precompute(Images(lambda image: (image, image)), tmp_path / "y.h5")
    assert "y.h5: 2 of its columns have images" in str(source_for(CachedDataset(tmp_path / "y.h5")))
    tails = [((n,), Run([v2.ToImage()])) for n in range(2)]
    both = CachedDataset(tmp_path / "y.h5", tails=tails)
    assert "y.h5: 2 columns have transforms" in str(source_for(both))
    precompute(Images(lambda image: image.convert("CMYK")), tmp_path / "z.h5")
    assert "z.h5: 0 of its columns have images" in str(source_for(CachedDataset(tmp_path / "z.h5")))
    inks = CachedDataset(tmp_path / "z.h5", tails=[((), Run([v2.ToImage()]))])
    assert "has cells of kind image:CMYK, no images" in str(source_for(inks))


def test_a_damaged_file_in_a_cache(folder: Path, tmp_path: Path) -> None:
    class Last(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def encoded(self, index: int) -> bytes:
            return saved(noise(9, 8, seed=index), "JPEG")

        def target(self, index: int) -> int:
            return index

        def __getitem__(self, index: int) -> Any:
            return Image.open(io.BytesIO(self.encoded(index))).convert("RGB"), index

    cached = precompute(Last(), tmp_path / "x.h5", images="packed")
    source = known(cached)
    data = bytearray((tmp_path / "x.h5").read_bytes())
    start = data.index(Last().encoded(1))
    data[start : start + 200] = bytes(200)
    (tmp_path / "x.h5").write_bytes(data)
    again = CachedDataset(tmp_path / "x.h5")
    found = known(again).image(1)
    assert isinstance(found, Failed)
    with pytest.raises(type(found.error), match="row 1"):
        again[1]
    assert len(source) == 3


# Parts and rows of these


def test_parts_and_rows(tmp_path: Path) -> None:
    transform = crop()
    one = image_folder(tmp_path / "one", transform=transform, target_transform=later)
    other = FILES["food101"](tmp_path / "other", transform=transform)
    for dataset in (
        Subset(one, [4, 1, 1]),
        ConcatDataset([one, other]),
        Subset(ConcatDataset([Subset(other, [2, 0]), one]), [7, 0, 3]),
        random_split(one, [3, 4], torch.Generator().manual_seed(3))[1],
    ):
        source = known(dataset)
        assert source.transform is transform
        assert_gives(dataset, source)
    row = ConcatDataset([one, other])
    assert known(row).sample(-1, "image") == ("image", other[-1][1])
    assert isinstance(known(row).image(-99), Failed)
    assert isinstance(known(Subset(one, [0])).image(5), Failed)
    assert known(ConcatDataset([one, other])).user_code


@st.composite
def nested(draw: st.DrawFn, leaves: list[Any], depth: int = 3) -> Any:
    if not depth or draw(st.booleans()):
        return draw(st.sampled_from(leaves))
    if draw(st.booleans()):
        return ConcatDataset(draw(st.lists(nested(leaves, depth - 1), min_size=1, max_size=3)))
    inner = draw(nested(leaves, depth - 1))
    places = draw(st.lists(st.integers(-len(inner), len(inner) - 1), min_size=1, max_size=5))
    sort = draw(st.sampled_from([list, tuple, np.array, torch.tensor]))
    return Subset(inner, sort(places))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_nesting(two_folders: list[Any], data: st.DataObject) -> None:
    dataset = data.draw(nested(two_folders))
    source = known(dataset)
    assert len(source) == len(dataset)
    places = list(range(-len(dataset), len(dataset)))
    for index, found in zip(places, source.images(places), strict=True):
        assert not isinstance(found, Failed), found.error
        image, target = dataset[index]
        assert (found.height, found.width) == tuple(image.shape[-2:])
        assert source.sample(index, found.name) == (found.name, target)


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    transform = v2.ToImage()
    roots = [tmp_path_factory.mktemp(name) for name in ("one", "other")]
    one = image_folder(roots[0], transform=transform, target_transform=later)
    return [one, FILES["food101"](roots[1], transform=transform)]


def test_parts_and_rows_in_memory(tmp_path: Path) -> None:
    one = ARRAYS["cifar10"][0](tmp_path / "one", transform=crop())
    other = ARRAYS["svhn"][0](tmp_path / "other", transform=crop())  # equal, and another object
    dataset = Subset(ConcatDataset([one, other]), [13, 0, 6, 7])
    assert_gives(dataset, known(dataset))
    assert len(known(Subset(one, [5, 2])).images([1, 0])) == 2


def test_rows_that_one_graph_cannot_serve(tmp_path: Path) -> None:
    one = image_folder(tmp_path / "one", transform=crop())
    other = FILES["food101"](tmp_path / "other", transform=v2.ToImage())
    assert "datasets with different transforms" in str(source_for(ConcatDataset([one, other])))
    grey = ARRAYS["mnist"][0](tmp_path / "grey", transform=crop())
    reason = str(source_for(ConcatDataset([one, grey])))
    assert "a ConcatDataset joins RGB files and grey pixels" in reason


# The proof


def test_random_states_are_kept(folder: Path) -> None:
    own = torch.Generator().manual_seed(5)

    class Drawing:
        def __init__(self) -> None:
            self.generator = own

        def __call__(self, image: Any) -> Any:
            random.random()
            np.random.rand()
            return torch.rand(3, generator=self.generator) + torch.rand(3)

    dataset = DatasetFolder(str(folder), ImageFolder(str(folder)).loader, (".jpg",), Drawing())
    states = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        own.get_state(),
    )
    known(dataset)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert torch.equal(own.get_state(), states[3])


def test_an_empty_dataset() -> None:
    assert len(known(Own([]))) == 0
