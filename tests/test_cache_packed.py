"""`images="packed"`: the image files that a dataset opens, found by recording its own code."""

import io
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image
from torchvision.transforms import v2

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute
from helpers.cached import assert_all_equal, built, refused, stored_file
from helpers.datasets import MapDataset
from helpers.pictures import OF_TORCHVISION, image_files, saved, smooth

SIZE = 5
CHAIN = v2.Compose([v2.Resize(18), v2.RandomCrop(9), v2.RandomHorizontalFlip(), v2.ToImage()])
pack = partial(built, images="packed")

pytestmark = [
    # An image that is opened and not read to its end stays open.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
    pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities"),
]


class Bytes(MapDataset):
    """Samples that ``make(dataset, bytes, index)`` makes of files in memory."""

    def __init__(self, make, files=None, transform=CHAIN):
        files = files or [saved(smooth(number), "JPEG") for number in range(SIZE)]
        super().__init__(None, len(files), make=make, files=files, transform=transform)

    def sample(self, index):
        return self.make(self, self.files[index], index)


def opened(file):
    return Image.open(io.BytesIO(file))


def rgb(file):
    return opened(file).convert("RGB")


def as_dict(self, file, index):
    image = rgb(file)
    return {"image": self.transform(image), "size": image.size, "label": {"number": index}}


def as_hugging_face(self, file, index):
    image = opened(file)
    image.load()
    if image.getexif().get(0x0112) is not None:
        image = ImageOps.exif_transpose(image)
    return {"image": self.transform(image.convert("RGB")), "label": index}


def views_before_and_after(self, file, index):
    image = rgb(file)
    return self.transform(image), self.transform(image), {"before": image}


def with_masks_and_numbers(self, file, index):
    mask = opened(saved(smooth(index, mode="L").quantize(7), "PNG"))
    edges = np.asarray(opened(saved(smooth(index, mode="L"), "PNG"))) > 99
    image = self.transform(rgb(file))
    return image, mask, mask.copy().convert("L"), edges, random.Random(index).random()


def as_it_is(self, file, index):
    return self.transform(opened(file)), index


def assert_packed(cached, dataset, files=()):
    """Samples equal the dataset's, and the first column of files has these."""
    assert_all_equal(cached, dataset)
    number = [column.variants[0][0] for column in cached.columns].index("file:RGB")
    assert [stored_file(cached, number, row) for row in range(len(files))] == list(files)


@pytest.mark.parametrize(
    ("make", "format"),
    [
        (as_dict, "JPEG"),
        (as_hugging_face, "PNG"),
        (views_before_and_after, "WEBP"),
        (with_masks_and_numbers, "TIFF"),
        (as_it_is, "JPEG"),
    ],
)
def test_a_dataset_of_ones_own(tmp_path, make, format):
    dataset = Bytes(make, [saved(smooth(number), format) for number in range(SIZE)])
    cached = pack(dataset, tmp_path / "a.h5", num_workers=2 if make is as_dict else 0)
    assert cached.index.head == ()
    for each in (cached, pack(dataset, tmp_path / "a.h5")):  # built, opened
        assert_packed(each, dataset, dataset.files)


def test_parts_of_several_datasets(tmp_path):
    greys = [saved(smooth(number, mode="L"), "JPEG") for number in (7, 8)]
    one, other = Bytes(as_dict), Bytes(as_dict, greys)
    dataset = Subset(ConcatDataset([Subset(one, [4, 1]), other]), [3, 0, 1, 2])
    wanted = [greys[1], one.files[4], one.files[1], greys[0]]
    assert_packed(pack(dataset, tmp_path / "a.h5"), dataset, wanted)


ODD = {  # those that a loader might turn, or of which it might take another part
    name: file
    for name, file in image_files().items()
    if name in (
        "jpeg turned", "jpeg cmyk", "jpeg progressive", "jpeg several", "png palette", "png alpha",
        "png 16 grey", "png bits", "gif animated", "webp alpha lossless", "bmp",
    )
}  # fmt: skip
ODD |= {name: saved(smooth(1), name) for name in ("TIFF", "PPM")}


def test_a_folder_of_files_of_every_kind(tmp_path):
    (tmp_path / "class").mkdir()
    for number, file in enumerate(ODD.values()):
        (tmp_path / "class" / f"{number:02}.png").write_bytes(file)
    plain = ImageFolder(tmp_path)
    cached = pack(plain, tmp_path / "a.h5")
    assert_packed(cached, plain, ODD.values())
    for (ours, _), (theirs, _) in zip(cached, plain, strict=True):  # of the default loader
        assert type(ours) is type(theirs)
        assert dict(ours.getexif()) == dict(theirs.getexif())
        assert ours.info.keys() == theirs.info.keys()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_files_that_are_cut_short(tmp_path):
    cut = [data[: len(data) * part // 6] for data in ODD.values() for part in (0, 3, 4, 6)]
    wrong = []
    for number, data in enumerate(cut):
        try:
            rgb(data)
        except (OSError, SyntaxError):
            wrong.append(number)
    assert len(ODD) * 3 - len(wrong) < 6  # the first picture of several is whole
    cached = pack(Bytes(as_dict, cut), tmp_path / "a.h5", on_error="skip")
    assert [number for number, _ in cached.failed] == wrong


def looked_at(self, file, index):
    image = rgb(file)
    return image, np.asarray(image).mean()


def decoded_by_torchvision(self, file, index):
    return decode_image(torch.frombuffer(bytearray(file), dtype=torch.uint8))


def another_frame(self, file, index):
    image = opened(file)
    image.seek(1)
    return image.convert("RGB")


@pytest.mark.parametrize(
    ("make", "files", "call"),
    [
        (lambda self, file, index: rgb(file).resize((8, 8)), None, r"Image\.resize\(\(8, 8\)"),
        (looked_at, None, r"Image\.im"),
        (decoded_by_torchvision, None, "the decoder decode_"),
        (another_frame, [ODD["gif animated"]], r"Image\.seek"),
    ],
)
def test_an_image_that_was_touched(tmp_path, make, files, call):
    first = make.__code__.co_firstlineno
    lines = "|".join(str(first + after) for after in range(4))
    rule = (
        rf"^sample 0 cannot be kept: images='packed' .* keeps .*{call}.* at .*{__file__}:({lines})"
        r".*images='jpeg' \(--images\), 'png' or 'webp'$"
    )
    refused(rule, pack, Bytes(make, files), tmp_path / "a.h5")
    said = str(H5(tmp_path / "b.h5", images="packed").explain(DataLoader(Bytes(make, files))))
    assert f"{__file__}:" in said


def test_what_cannot_be_packed(tmp_path):
    def later(self, file, index):  # where no study looks
        return rgb(file).rotate(90) if index == 50 else rgb(file)

    path, many = tmp_path / "a.h5", [saved(smooth(0), "JPEG")] * 150
    files = [saved(smooth(n, mode="L" if n == 1 else "RGB"), "JPEG") for n in range(SIZE)]
    voc = OF_TORCHVISION["voc_segmentation"](tmp_path, transforms=v2.CenterCrop(5))
    for dataset, rule in (
        (Bytes(lambda self, file, index: smooth(index)), "an image that Pillow did not open from"),
        (voc, r"Image\.crop"),  # one transform of image and target
        (Bytes(as_it_is, files), r"sample 1 cannot be kept.*its images are of mode L"),
        (Bytes(later, many), r"sample 50 cannot be kept.*Image\.trans"),
    ):
        refused(rule, pack, dataset, path)
    dataset = Bytes(as_it_is, files, v2.Compose([v2.RGB(), CHAIN]))
    assert_packed(pack(dataset, path), dataset, files)
    cached = pack(Bytes(later, many), tmp_path / "b.h5", on_error="skip")
    assert [number for number, _ in cached.failed] == [50]


@pytest.mark.parametrize("name", OF_TORCHVISION)
def test_torchvisions_datasets(tmp_path, name):
    target = v2.RandomHorizontalFlip() if name == "voc_segmentation" else str
    transform = v2.Compose([v2.RandomCrop(5), v2.ToImage()])
    dataset = OF_TORCHVISION[name](tmp_path, transform=transform, target_transform=target)
    assert_packed(pack(dataset, tmp_path / "a.h5"), dataset)


@pytest.mark.filterwarnings("ignore:the cache .* holds what other versions computed")
def test_a_file_of_an_earlier_version(tmp_path):
    transform = v2.Compose([v2.RandomCrop(6), v2.ToImage()])
    cached = CachedDataset(Path(__file__).parent / "data" / "cache_v3" / "packed.h5")
    for number, (image, label) in enumerate(cached):
        (tmp_path / f"class{label}").mkdir(exist_ok=True)
        file = tmp_path / f"class{label}" / f"{number}.{'jpg' if number < 3 else 'png'}"
        file.write_bytes(stored_file(cached, 0, number))
        assert image.size == (12, 9 + [0, 2, 1, 3][number])
    dataset = ImageFolder(tmp_path, transform)
    found = precompute(dataset, cached.path, images="packed")
    assert_packed(found, dataset, [Path(file).read_bytes() for file, _ in dataset.samples])
