"""`images="packed"`: the image files that a dataset opens, found by recording its own code."""

from __future__ import annotations

import io
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.io import decode_image
from torchvision.transforms import v2
from torchvision.transforms.functional import to_tensor

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute
from dataloaders.cache.sample.cell import leaf_of
from dataloaders.cache.sample.file import EncodedFile
from dataloaders.errors import CacheError
from helpers.compare import bits
from helpers.vision_datasets import FILES

SIZE = 5

pytestmark = [
    # An image that is opened and not read to its end stays open.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
    pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities"),
]


def picture(number: int, mode: str = "RGB") -> Any:
    y, x = np.mgrid[: 20 + number, :24]
    planes = [x * 9 + number, y * 11, (x + y) * 5]
    return Image.fromarray(np.stack(planes, 2).astype(np.uint8)).convert(mode)


def saved(image: Any, format: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


CHAIN = v2.Compose([v2.Resize(18), v2.RandomCrop(9), v2.RandomHorizontalFlip(), v2.ToImage()])


class Bytes(Dataset[Any]):
    """Samples that ``make(dataset, bytes, index)`` makes of files in memory."""

    def __init__(
        self,
        make: Callable[..., Any],
        files: list[bytes] | None = None,
        transform: Any = CHAIN,
    ) -> None:
        self.make, self.transform = make, transform
        self.files = files or [saved(picture(number)) for number in range(SIZE)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return self.make(self, self.files[index], index)


def opened(file: bytes) -> Any:
    return Image.open(io.BytesIO(file))


def as_dict(self: Any, file: bytes, index: int) -> Any:
    image = opened(file).convert("RGB")
    return {"image": self.transform(image), "size": image.size, "label": {"number": index}}


def untransformed(self: Any, file: bytes, index: int) -> Any:
    return {"image": opened(file).convert("RGB"), "label": index}


def with_statement(self: Any, file: bytes, index: int) -> Any:
    with opened(file) as image:
        return self.transform(image.convert("RGB")), index


def as_webdataset(self: Any, file: bytes, index: int) -> Any:
    with io.BytesIO(file) as stream:
        image: Any = Image.open(stream)
        image.load()
        image = image.convert("RGB")
    return self.transform(image), {"key": f"{index:06}"}


def as_hugging_face(self: Any, file: bytes, index: int) -> Any:
    image: Any = opened(file)
    image.load()
    if image.getexif().get(0x0112) is not None:
        image = ImageOps.exif_transpose(image)
    return {"image": self.transform(image.convert("RGB")), "label": index}


def two_views(self: Any, file: bytes, index: int) -> Any:
    image = opened(file).convert("RGB")
    return self.transform(image), self.transform(image), index


def before_and_after(self: Any, file: bytes, index: int) -> Any:
    image = opened(file).convert("RGB")
    return {"before": image, "after": self.transform(image)}


def with_mask(self: Any, file: bytes, index: int) -> Any:
    palette = picture(index, "L").quantize(7)
    mask = opened(saved(palette, "PNG"))
    return self.transform(opened(file).convert("RGB")), mask, mask.copy().convert("L")


def with_numbers(self: Any, file: bytes, index: int) -> Any:
    edges = np.asarray(opened(saved(picture(index, "L"), "PNG"))) > 99
    return self.transform(opened(file).convert("RGB")), edges, random.Random(index).random()


def as_it_is(self: Any, file: bytes, index: int) -> Any:
    return self.transform(opened(file)), index


SAMPLES = (
    as_dict, untransformed, with_statement, as_webdataset, as_hugging_face, two_views,
    before_and_after, with_mask, with_numbers, as_it_is,
)  # fmt: skip


def pack(dataset: Any, path: Path, **options: Any) -> CachedDataset:
    return precompute(dataset, path, images="packed", **{"num_workers": 0, **options})


def assert_packed(cached: Any, dataset: Any, files: list[bytes]) -> None:
    """Samples equal the dataset's, and the first column of files has these."""
    assert len(cached) == len(dataset)
    for index in range(len(dataset)):
        torch.manual_seed(index)
        theirs = dataset[index]
        torch.manual_seed(index)
        assert bits(cached[index]) == bits(theirs)
    if not files:
        return
    names = [column.name for column in cached.columns if column.variants[0][0] == "file:RGB"]
    number = [column.name for column in cached.columns].index(names[0])
    assert [cached.readers[number].file(row) for row in range(len(files))] == files


@pytest.mark.parametrize("make", SAMPLES)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_dataset_of_ones_own(tmp_path: Path, make: Any, format: str) -> None:
    dataset = Bytes(make, [saved(picture(number), format) for number in range(SIZE)])
    cached = pack(dataset, tmp_path / "a.h5")
    assert_packed(cached, dataset, dataset.files)
    assert cached.index.head == ()
    assert_packed(pack(dataset, tmp_path / "a.h5"), dataset, dataset.files)  # opened


def test_workers_make_the_same(tmp_path: Path) -> None:
    dataset = Bytes(as_dict)
    assert_packed(pack(dataset, tmp_path / "a.h5", num_workers=2), dataset, dataset.files)


def test_parts_of_several_datasets(tmp_path: Path) -> None:
    one, other = Bytes(as_dict), Bytes(as_dict, [saved(picture(number, "L")) for number in (7, 8)])
    dataset = Subset(ConcatDataset([Subset(one, [4, 1]), other]), [3, 0, 1, 2])
    wanted = [other.files[1], one.files[4], one.files[1], other.files[0]]
    assert_packed(pack(dataset, tmp_path / "a.h5"), dataset, wanted)


class Plain:
    """A dataset that is none of torch's."""

    __init__, __len__, __getitem__ = Bytes.__init__, Bytes.__len__, Bytes.__getitem__


def test_a_part_of_what_is_no_dataset_of_torchs(tmp_path: Path) -> None:
    whole: Any = Plain(as_dict)  # type: ignore[arg-type]
    assert_packed(pack(Subset(whole, [2, 0]), tmp_path / "a.h5"), Subset(whole, [2, 0]), [])


def by_keyword(self: Any, file: bytes, index: int) -> Any:
    return self.transform(opened(file).convert("RGB")), self.transform(image=index)


class Mirrored:
    """A transform of somebody's own that looks at pixels, and takes other things, too."""

    def __call__(self, picture: Any = None, *, image: int = 0) -> Any:
        return np.asarray(picture)[:, ::-1].copy() if picture is not None else image + 1


def test_a_transform_of_ones_own_stays_live(tmp_path: Path) -> None:
    dataset = Bytes(by_keyword, transform=Mirrored())
    assert_packed(pack(dataset, tmp_path / "a.h5"), dataset, dataset.files)


def odd_files() -> dict[str, bytes]:
    """Files that a loader might turn, or of which it might take another part."""
    values = np.random.default_rng(3)
    colour = Image.fromarray(values.integers(0, 256, (27, 31, 3), dtype=np.uint8))
    turned = Image.Exif()
    turned[0x0112] = 6
    clear = colour.convert("RGBA")
    clear.putalpha(Image.fromarray(values.integers(0, 256, (27, 31), dtype=np.uint8)))
    deep = Image.fromarray(values.integers(0, 65536, (27, 31), dtype=np.uint16))
    return {
        "exif": saved(colour, "JPEG", exif=turned),
        "cmyk": saved(colour.convert("CMYK"), "JPEG"),
        "progressive": saved(colour.resize((99, 80)), "JPEG", progressive=True),
        "several": saved(colour, "MPO", save_all=True, append_images=[colour.rotate(90)]),
        "palette": saved(colour.quantize(9), "PNG", transparency=3),
        "keyed": saved(colour, "PNG", transparency=(1, 2, 3)),
        "alpha": saved(clear, "PNG"),
        "deep": saved(deep, "PNG"),
        "bits": saved(colour.convert("1"), "PNG"),
        "animated": saved(colour, "GIF", save_all=True, append_images=[colour.rotate(90)]),
        "webp": saved(clear, "WEBP"),
        "tiff": saved(colour, "TIFF", compression="tiff_lzw"),
        "turned tiff": saved(colour, "TIFF", exif=turned),
        "bmp": saved(colour, "BMP"),
        "ppm": saved(colour.convert("L"), "PPM"),
    }


@pytest.mark.parametrize("make", [as_dict, untransformed, with_statement, as_webdataset])
def test_files_of_every_kind(tmp_path: Path, make: Any) -> None:
    dataset = Bytes(make, list(odd_files().values()))
    assert_packed(pack(dataset, tmp_path / "a.h5"), dataset, dataset.files)


def test_files_that_are_cut_short_where_pillow_may_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    dataset = Bytes(as_dict, [saved(picture(number))[: -30 * number] for number in (1, 2, 3)])
    assert_packed(pack(dataset, tmp_path / "a.h5"), dataset, dataset.files)


def test_a_folder_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    for number, file in enumerate(odd_files().values()):
        (tmp_path / "class" / f"{number:02}.png").write_bytes(file)
    dataset = ImageFolder(tmp_path, CHAIN)
    cached = pack(dataset, tmp_path / "a.h5")
    assert_packed(cached, dataset, list(odd_files().values()))


def test_other_images_of_files_of_every_kind(tmp_path: Path) -> None:
    def pixels(self: Any, file: bytes, index: int) -> Any:
        other = self.files[index - 1]
        values = [
            np.asarray(each).astype(int) for each in (opened(other), opened(other).convert("RGB"))
        ]
        return opened(file).convert("RGB"), *values, opened(other).size

    dataset = Bytes(pixels, list(odd_files().values()))
    assert_packed(pack(dataset, tmp_path / "a.h5"), dataset, dataset.files)


# What is no file as it is


def resized(self: Any, file: bytes, index: int) -> Any:
    return opened(file).convert("RGB").resize((8, 8)), index


def looked_at(self: Any, file: bytes, index: int) -> Any:
    image = opened(file).convert("RGB")
    return {"image": image, "mean": np.asarray(image).mean()}


def floats(self: Any, file: bytes, index: int) -> Any:
    return to_tensor(opened(file).convert("RGB"))


def decoded_by_torchvision(self: Any, file: bytes, index: int) -> Any:
    return decode_image(torch.frombuffer(bytearray(file), dtype=torch.uint8))


def smaller(self: Any, file: bytes, index: int) -> Any:
    image: Any = opened(file)
    image.draft("RGB", (8, 8))
    return image.convert("RGB")


def greyed(self: Any, file: bytes, index: int) -> Any:
    return self.transform(opened(file).convert("L").convert("RGB"))


def turned_back(self: Any, file: bytes, index: int) -> Any:
    return ImageOps.exif_transpose(opened(file)).convert("RGB")


def another_frame(self: Any, file: bytes, index: int) -> Any:
    image: Any = opened(file)
    image.seek(1)
    return image.convert("RGB")


EXIF, GIF = [odd_files()["exif"]], [odd_files()["animated"]]


@pytest.mark.parametrize(
    ("make", "files", "call"),
    [
        (resized, None, r"Image\.resize\(\(8, 8\)"),
        (looked_at, None, r"Image\.im"),
        (floats, None, r"Image\.im"),
        (decoded_by_torchvision, None, "the decoder decode_"),
        (smaller, None, r"Image\.draft"),
        (greyed, None, r"Image\.convert\('L'"),
        (turned_back, EXIF, r"Image\.transpose"),
        (another_frame, GIF, r"Image\.seek"),
    ],
)
def test_an_image_that_was_touched(tmp_path: Path, make: Any, files: Any, call: str) -> None:
    first = make.__code__.co_firstlineno
    lines = "|".join(str(first + after) for after in range(1, 4))
    text = (
        rf"^sample 0 cannot be kept: images=\"packed\" keeps .*{call}.* at .*{__file__}:({lines})"
    )
    with pytest.raises(CacheError, match=text + r".*images=\"jpeg\", \"png\" or \"webp\"$"):
        pack(Bytes(make, files), tmp_path / "a.h5")
    assert not (tmp_path / "a.h5").exists()
    said = str(H5(tmp_path / "b.h5", images="packed").explain(DataLoader(Bytes(make, files))))
    assert f"{__file__}:" in said


def in_memory(self: Any, file: bytes, index: int) -> Any:
    return picture(index)


def test_an_image_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="it has an image that Pillow did not open from a file"):
        pack(Bytes(in_memory), tmp_path / "a.h5")


def later(self: Any, file: bytes, index: int) -> Any:
    image = opened(file).convert("RGB")
    return image.rotate(90) if index == 50 else image


def test_one_that_was_touched_where_no_study_looks(tmp_path: Path) -> None:
    dataset = Bytes(later, [saved(picture(0))] * 150)
    with pytest.raises(CacheError, match=r"sample 50 cannot be kept.*Image\.trans"):
        pack(dataset, tmp_path / "a.h5")
    cached = pack(dataset, tmp_path / "a.h5", on_error="skip")
    assert [number for number, _ in cached.failed] == [50]


def suspicious(self: Any, file: bytes, index: int) -> Any:
    image = opened(file)
    if type(image).__mro__[1].__name__ != "ImageFile":
        raise TypeError("what is this?")
    return image.convert("RGB")


def test_code_that_does_not_take_stand_ins(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"not run on recorded images \(TypeError: what is this"):
        pack(Bytes(suspicious), tmp_path / "a.h5")


def test_images_in_the_mode_of_the_file(tmp_path: Path) -> None:
    files = [saved(picture(number, "L" if number == 1 else "RGB")) for number in range(SIZE)]
    with pytest.raises(CacheError, match=r"sample 1 cannot be kept.*its images are of mode L"):
        pack(Bytes(as_it_is, files), tmp_path / "a.h5")
    dataset = Bytes(as_it_is, files, v2.Compose([v2.RGB(), CHAIN]))
    assert_packed(pack(dataset, tmp_path / "a.h5"), dataset, files)


# torchvision's datasets


def number_of(target: Any) -> int:
    return len(str(type(target))) % 7


@pytest.mark.parametrize("name", FILES)
def test_torchvisions_datasets(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "scipy" not in sys.modules:  # Caltech101 imports it, for what is not asked for here
        for module in ("scipy", "scipy.io"):
            monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    transform = v2.Compose([v2.RandomCrop(5), v2.ToImage()])
    dataset = FILES[name](tmp_path, transform=transform, target_transform=number_of)
    cached = pack(dataset, tmp_path / "a.h5")
    assert_packed(cached, dataset, [])
    assert "file:RGB" in [kind for column in cached.columns for kind, _ in column.variants]


def test_masks_are_kept_and_their_transforms_live(tmp_path: Path) -> None:
    for name in ("voc_segmentation", "pets_segmented"):
        flip = v2.RandomHorizontalFlip()
        dataset = FILES[name](tmp_path / name, transform=CHAIN, target_transform=flip)
        assert_packed(pack(dataset, tmp_path / f"{name}.h5"), dataset, [])


def test_one_transform_of_image_and_target(tmp_path: Path) -> None:
    dataset = FILES["voc_segmentation"](tmp_path, transforms=v2.CenterCrop(5))
    with pytest.raises(CacheError, match=r"Image\.crop"):
        pack(dataset, tmp_path / "a.h5")


# A cache from before


@pytest.mark.filterwarnings("ignore:the cache .* holds what other versions computed")
@pytest.mark.parametrize(
    ("name", "transform"),
    [("packed", v2.Compose([v2.RandomCrop(6), v2.ToImage()])), ("packed_plain", None)],
)
def test_a_file_of_an_earlier_version(tmp_path: Path, name: str, transform: Any) -> None:
    cached = CachedDataset(Path(__file__).parent / "data" / "cache_v3" / f"{name}.h5")
    for number, (image, label) in enumerate(cached):
        (tmp_path / f"class{label}").mkdir(exist_ok=True)
        kind = "jpg" if number < 3 else "png"
        (tmp_path / f"class{label}" / f"{number}.{kind}").write_bytes(
            cached.readers[0].file(number)
        )
        assert image.size == (12, 9 + [0, 2, 1, 3][number])
    dataset = ImageFolder(tmp_path, transform)
    files = [Path(file).read_bytes() for file, _ in dataset.samples]
    for file, _ in dataset.samples:
        Path(file).rename(f"{file}.away")  # no sample is read to open it
    found = precompute(dataset, cached.path, images="packed")
    for file, _ in dataset.samples:
        Path(f"{file}.away").rename(file)
    assert_packed(found, dataset, files)


# A file


def decoded(data: bytes) -> Any:
    return leaf_of("file:RGB", np.frombuffer(data, np.uint8))


def checked(data: bytes) -> Any:
    EncodedFile(data).check()


@pytest.mark.parametrize("name", odd_files())
def test_decoding_is_that_of_the_default_loader(tmp_path: Path, name: str) -> None:
    data = odd_files()[name]
    path = tmp_path / "file"
    path.write_bytes(data)
    ours, theirs = decoded(data), default_loader(path)
    assert type(ours) is type(theirs)
    assert (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes())
    assert dict(ours.getexif()) == dict(theirs.getexif())
    assert ours.info.keys() == theirs.info.keys()
    checked(data)


@pytest.mark.parametrize("name", odd_files())
def test_files_that_end_early(name: str) -> None:
    data = odd_files()[name]
    for length in {0, 1, 10, len(data) // 2, len(data) * 2 // 3}:
        for use in (decoded, checked):
            if name in ("several", "animated") and length > len(data) // 2:
                use(data[:length])  # the first picture is whole
                continue
            with pytest.raises(
                (ValueError, CacheError), match=r"it is no file of format|it cannot be"
            ):
                use(data[:length])


def test_formats_that_run_programs_are_not_opened() -> None:
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    for use in (decoded, checked):
        with pytest.raises((ValueError, CacheError), match="it is no file of format BMP, GIF, JPE"):
            use(data)


def test_an_image_larger_than_pillow_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(Image.new("RGB", (60, 60)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1700)
    with pytest.raises(CacheError, match="DecompressionBombError: Image size"):
        decoded(data)
