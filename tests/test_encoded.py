"""The encoded files behind a dataset: torchvision's folders, and datasets that say themselves."""

from __future__ import annotations

import io
import pickle
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split
from torchvision.datasets import DatasetFolder, ImageFolder
from torchvision.datasets.folder import default_loader, pil_loader

from dataloaders.cache import precompute
from dataloaders.datasets.files import FORMATS, EncodedFile, Source, source_of
from dataloaders.datasets.torchvision_files import files_of
from dataloaders.errors import BackendUnavailable, CacheError
from helpers.vision_datasets import FILES, caltech256, celeba, inaturalist, photo, places365

SIZE = 5

# torchvision's: an image that is opened and not read to its end stays open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    values = np.random.default_rng(0)
    for number in range(SIZE):
        kind = folder / f"class{number % 2}"
        kind.mkdir(exist_ok=True)
        pixels = values.integers(0, 256, (9 + number, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(kind / f"{number}.{'png' if number < 3 else 'jpg'}")
    return folder


def known(dataset: Any) -> Source:
    source = source_of(dataset)
    assert not isinstance(source, str), source
    return source


def assert_is(source: Source, index: int, path: str, target: Any) -> None:
    file = source.encoded(index)
    assert file.data == Path(path).read_bytes()
    assert file.name == path
    assert source.target(index) == target
    assert source.sample(index, "image") == ("image", target)
    ours, theirs = file.decode(), default_loader(path)
    assert (ours.mode, ours.size, ours.tobytes()) == ("RGB", theirs.size, theirs.tobytes())


def test_a_folder_of_images(photos: Path) -> None:
    dataset = ImageFolder(photos, transform=abs, target_transform=lambda target: target + 10)
    source = known(dataset)
    assert len(source) == SIZE
    for index, (path, target) in enumerate(dataset.samples):
        assert_is(source, index, path, target + 10)
        assert source.transform(index) is abs
    assert source.transforms == [abs]


@pytest.mark.parametrize("loader", [default_loader, pil_loader])
def test_a_folder_of_files(photos: Path, loader: Callable[[Any], Any]) -> None:
    dataset = DatasetFolder(str(photos), loader, extensions=("png",))
    source = known(dataset)
    assert len(source) == 3
    assert_is(source, 2, *dataset.samples[2])
    assert source.transform(0) is None


def test_parts_of_several_folders(photos: Path) -> None:
    one, other = ImageFolder(photos, transform=abs), ImageFolder(photos, transform=len)
    dataset = ConcatDataset([Subset(one, [4, 1]), ConcatDataset([other, Subset(one, [0])])])
    source = known(Subset(dataset, [7, 0, 3]))
    assert len(source) == 3
    for index, (number, transform) in enumerate([(0, abs), (4, abs), (1, len)]):
        assert_is(source, index, *one.samples[number])
        assert source.transform(index) is transform
    assert set(source.transforms) == {abs, len}
    whole = known(dataset)
    assert whole.target(-1) == whole.target(7)
    assert whole.image(-1).tobytes() == whole.image(7).tobytes()
    assert len(known(random_split(one, [3, 2])[1])) == 2


class Own(Dataset[Any]):
    """A dataset that says itself what its files are."""

    def __init__(self, files: list[Any]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def encoded(self, index: int) -> Any:
        return self.files[index]

    def target(self, index: int) -> Any:
        return {"label": index}


class Assembled(Own):
    transform = abs

    def assemble(self, image: Any, target: Any) -> Any:
        return {"image": image, **target}


def test_a_dataset_that_says_what_its_files_are(photos: Path) -> None:
    path = ImageFolder(photos).samples[0][0]
    data = Path(path).read_bytes()
    source = known(Own([path, Path(path), data, bytearray(data), memoryview(data)]))
    assert len(source) == 5
    for index in range(5):
        assert source.encoded(index).data == data
        assert source.sample(index, "image") == ("image", {"label": index})
    assert [source.encoded(index).name for index in (1, 2)] == [path, ""]
    assert source.transform(0) is None
    nested = known(Subset(Assembled([data]), [0]))
    assert nested.sample(0, "image") == {"image": "image", "label": 0}
    assert nested.transform(0) is abs


def test_what_is_no_file(photos: Path) -> None:
    with pytest.raises(CacheError, match=r"Own\.encoded\(0\) gives int; it must give the bytes"):
        known(Own([3])).encoded(0)
    with pytest.raises(FileNotFoundError):
        known(Own(["nowhere.jpg"])).encoded(0)


class Doubled(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index // 2)


class Gathered(ImageFolder):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def test_datasets_whose_files_are_not_known(photos: Path) -> None:
    for dataset in (Doubled(photos), Gathered(photos), TensorDataset(), [1, 2]):
        reason = str(source_of(dataset))
        assert f"{type(dataset).__name__} is not known to decode files; give it the me" in reason
        assert "encoded(index) that returns the file's bytes or path, and target(index)" in reason
    for dataset in (Subset(Doubled(photos), [0]), ConcatDataset([ImageFolder(photos), [1]])):
        assert "is not known to decode files" in str(source_of(dataset))
    other = ImageFolder(photos, loader=Image.open)
    assert "ImageFolder loads files by open (image backend 'PIL')" in str(source_of(other))


def saved(image: Any, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def odd_files() -> dict[str, bytes]:
    """Files that a loader might turn, or of which it might take another part."""
    values = np.random.default_rng(3)
    colour = Image.fromarray(values.integers(0, 256, (7, 11, 3), dtype=np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    clear = colour.convert("RGBA")
    clear.putalpha(Image.fromarray(values.integers(0, 256, (7, 11), dtype=np.uint8)))
    deep = Image.fromarray(values.integers(0, 65536, (7, 11), dtype=np.uint16))
    return {
        "exif": saved(colour, "JPEG", exif=turned),
        "cmyk": saved(colour.convert("CMYK"), "JPEG"),
        "progressive": saved(colour.resize((99, 80)), "JPEG", progressive=True),
        "several": saved(colour, "MPO", save_all=True, append_images=[colour.rotate(90)]),
        "palette": saved(colour.quantize(9), "PNG", transparency=3),
        "alpha": saved(clear, "PNG"),
        "deep": saved(deep, "PNG"),
        "bits": saved(colour.convert("1"), "PNG"),
        "animated": saved(colour, "GIF", save_all=True, append_images=[colour.rotate(90)]),
        "webp": saved(clear, "WEBP"),
        "tiff": saved(colour, "TIFF", compression="tiff_lzw"),
        "bmp": saved(colour, "BMP"),
        "ppm": saved(colour.convert("L"), "PPM"),
    }


@pytest.mark.parametrize("name", odd_files())
def test_decoding_is_that_of_the_default_loader(tmp_path: Path, name: str) -> None:
    data = odd_files()[name]
    path = tmp_path / "file"
    path.write_bytes(data)
    file = EncodedFile(data)
    ours, theirs = file.decode(), default_loader(path)
    assert type(ours) is type(theirs)
    assert (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes())
    assert dict(ours.getexif()) == dict(theirs.getexif())
    assert ours.info.keys() == theirs.info.keys()
    assert file.format in (*FORMATS, "MPO")
    file.check()


@pytest.mark.parametrize("name", odd_files())
def test_files_that_end_early(name: str) -> None:
    data = odd_files()[name]
    for length in {0, 1, 10, len(data) // 2, len(data) * 2 // 3}:
        file = EncodedFile(data[:length])
        for use in (file.decode, file.check):
            if name in ("several", "animated") and length > len(data) // 2:
                use()  # the first picture is whole
                continue
            with pytest.raises(ValueError, match=r"it is no file of format|it cannot be"):
                use()


def test_formats_that_run_programs_are_not_opened() -> None:
    file = EncodedFile(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    for use in (file.decode, file.check):
        with pytest.raises(ValueError, match="it is no file of format BMP, GIF, JPEG"):
            use()


def test_an_image_larger_than_pillow_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(Image.new("RGB", (60, 60)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1700)
    with pytest.raises(ValueError, match="DecompressionBombError: Image size"):
        EncodedFile(data).decode()


@pytest.mark.parametrize("name", FILES)
def test_torchvisions_datasets(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "scipy" not in sys.modules:  # Caltech101 imports it, for what is not asked for here
        for module in ("scipy", "scipy.io"):
            monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    dataset = FILES[name](tmp_path, transform=abs, target_transform=repr)
    source = known(dataset)
    assert len(source) == len(dataset)
    assert source.user_code
    assert source.transforms == [abs]
    assert pickle.loads(pickle.dumps(files_of(dataset))) is not None  # as workers get it
    pixels = FILES[name](tmp_path / "again")
    for index in range(len(dataset)):
        assert source.transform(index) is abs
        image, target = pixels[index]
        for ours in (source.image(index), source.encoded(index).decode()):
            assert (ours.mode, ours.size) == ("RGB", image.size)
            assert ours.tobytes() == image.tobytes()
        whole, told = source.sample(index, "image")
        assert whole == "image"
        assert _without_addresses(told) == _without_addresses(repr(target))
    assert not known(pixels).user_code


def _without_addresses(told: str) -> str:
    return re.sub("0x[0-9A-F]+", "", told)  # of masks: an image tells where it is in memory


@pytest.mark.parametrize("make", [caltech256, celeba, inaturalist])
def test_images_that_are_handed_on_in_the_files_own_mode(tmp_path: Path, make: Any) -> None:
    dataset = make(tmp_path)
    source = known(dataset)
    assert source.encoded(1).decode().mode == "RGB"
    path = source.encoded(1).name
    photo(Path(path), 3, 1)
    assert dataset[1][0].mode == "L"
    for use in (source.encoded(1).decode, source.encoded(1).check):
        with pytest.raises(ValueError, match="it is of mode L, which the dataset hands on"):
            use()
    with pytest.raises(BackendUnavailable, match=f"{path} is an image of mode L, which"):
        source.image(1)
    with pytest.raises(CacheError, match="it is of mode L"):
        precompute(dataset, tmp_path / "x.h5", images="packed")


def _loaded(images: Any, index: int) -> None:
    images(index)[0].load()  # some datasets open a file, and read it later


def test_errors_are_those_of_the_datasets_own_loader(tmp_path: Path) -> None:
    for name in ("image_folder", "gtsrb", "celeba"):
        dataset = FILES[name](tmp_path / name)
        source = known(dataset)
        Path(source.encoded(0).name).write_bytes(b"text")
        whole = Path(source.encoded(1).name)
        whole.write_bytes(whole.read_bytes()[:-40])
        Path(source.encoded(2).name).unlink()
        for index in range(3):
            errors = []
            for images in (source.image, dataset.__getitem__):
                with pytest.raises(Exception, match=r".") as caught:
                    _loaded(images, index)
                errors.append((caught.type, str(caught.value)))
            assert errors[0] == errors[1]


def test_a_joint_transform(tmp_path: Path) -> None:
    dataset = places365(tmp_path, transform=abs)
    dataset.transform = len  # which the dataset does not look at
    assert known(dataset).transforms == [abs]
    dataset.transforms = None
    assert known(dataset).transforms == [None]
    dataset.transforms = lambda image, target: (image, target)
    assert "Places365: its transforms= is applied to image and target" in str(source_of(dataset))
