"""Images of a cache that are encoded anew, or packed as the dataset's own files."""

import io
import pickle
import random
import shutil
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image
from torchvision.transforms import v2

from dataloaders.cache import CachedDataset, Encoded, precompute, verify
from dataloaders.cache.sample.encoding import encoded
from dataloaders.cache.sample.leaf import fits, value_of
from dataloaders.cache.sample.sample import split
from dataloaders.errors import OptionError
from helpers.cached import (
    assert_all_equal,
    build_of_bytes,
    built,
    images,
    refused,
    seeded,
    stored_file,
)
from helpers.compare import assert_same, bits
from helpers.datasets import Made, MapDataset
from helpers.pictures import OF_TORCHVISION, image_files, saved, smooth, write_folder

SIZE = 6
pytestmark = [
    # An image that is opened and not read to its end stays open.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
    pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities"),
]
KEPT = {
    "jpeg": ("L", "RGB", "CMYK"),
    "png": ("1", "L", "LA", "RGB", "RGBA", "I;16"),
    "webp": ("L", "LA", "RGB", "RGBA"),
}
FLOATS = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]


class Photos(Made):
    """A picture, a mask of two modes and a number, from memory."""

    size, mode, transform = SIZE, "RGB", None

    def sample(self, index):
        image = smooth(index, 24 + index).convert(self.mode if index == 2 else "RGB")
        if self.transform is not None:
            image = self.transform(image)
        mask = smooth(index).convert("1" if index % 2 else "L")
        return {"image": image, "mask": mask, "label": index}


class Masks(Made):
    """A picture and a mask with a palette, as VOCSegmentation gives them."""

    size = SIZE

    def sample(self, index):
        height = 24 + index % 2
        y, x = np.mgrid[:height, :30]
        indices = ((x // 7 + y // 5 + index) % 5).astype(np.uint8)
        indices[y // 5 != (y + 1) // 5] = 255
        target = Image.fromarray(indices)
        target.putpalette([value * 37 % 256 for value in range(63)])
        if index == 3:
            target.info["transparency"] = 255
        return smooth(index, height), target


@pytest.fixture
def photos(tmp_path):
    return write_folder(tmp_path / "photos", SIZE)


def encode(image, how, **options):
    (leaf,) = split(image)[1]
    return encoded(leaf, Encoded(how, **options))


def kinds(cached):
    """The kinds of the leaves of each column."""
    return {column.name: [kind for kind, _ in column.variants] for column in cached.columns}


def decode(leaf):
    return value_of(leaf.kind, leaf.values)


@settings(max_examples=200)
@given(st.data())
def test_lossless_formats_give_the_very_pixels_back(data):
    name = data.draw(st.sampled_from(["png", "webp"]))
    image = data.draw(images(KEPT[name], smallest=1))
    kept = encode(image, name)
    assert kept.kind == f"encoded:{name.upper()}:{image.mode}"
    assert fits(kept.kind, kept.values.dtype.str, kept.values.ndim, None)
    back = decode(kept)
    assert (type(back), back.info) == (Image.Image, {})
    assert bits(back) == bits(decode(split(image)[1][0]))


@pytest.mark.parametrize("name", KEPT)
def test_images_that_are_too_large_and_what_else_is_in_them(name, monkeypatch):
    image, clean = smooth(0, 40, 40), encode(smooth(0, 40, 40), name)
    image.info = {"icc_profile": b"secret", "exif": b"Exif\0\0secret", "dpi": (7, 7)}
    assert encode(image, name).values.tobytes() == clean.values.tobytes()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    refused("it is too large", encode, image, name)  # it could not be read again
    assert decode(encode(image, name, max_side=20)).size == (20, 20)


def test_ways_that_there_are_not(path):
    for options in (("gif",), ("jpeg", 0), ("jpeg", 101), ("jpeg", True), ("jpeg", 90.0),
                    ("png", 90), ("webp", None, 0), ("webp", None, 65536)):  # fmt: skip
        rule = r"\(--.*\).*: (it must be|format must|png is stored)"
        refused(rule, Encoded, *options, error=OptionError)
    for choice in ("gif", 3, ["jpeg"], {"image": "packed"}, {"image": None}, {1: "png"}):
        refused("images=", built, Photos(), path, images=choice, error=OptionError)
    assert not path.exists()


def test_what_the_file_has_counts_where_nothing_is_said(path):
    images = {"mask": "png", "image": Encoded("jpeg", max_side=5), "label": "raw"}
    first = built(Photos(), path, images=images)
    for again in (None, {"image": Encoded("jpeg", 90, 5), "mask": "png"}):
        assert built(Photos(), path, images=again).identity == first.identity
    rule = "images: image: jpeg, quality 90, max_side 5; mask: png when it was built, png now; bui"
    refused(rule, built, Photos(), path, images="png")


@pytest.mark.parametrize(
    ("images", "members", "computed"),
    [
        ("png", [v2.Resize((20, 20)), v2.RandomCrop(9), *FLOATS], 1),
        ({"image": Encoded("webp")}, [v2.Resize(20), v2.CenterCrop(16), *FLOATS], 2),
        ({"image": "png"}, [v2.CenterCrop(20), v2.ToImage(), v2.RandomCrop(9)], 1),
    ],
)
def test_a_lossless_cache_is_the_dataset_and_what_makes_tensors_stays_live(
    path, images, members, computed
):
    dataset = Photos(transform=v2.Compose(members))
    cached = built(dataset, path, images=images)
    kind = "encoded:PNG" if images == "png" else "image"
    assert kinds(cached)["mask"] == [f"{kind}:L", f"{kind}:1"]
    assert (len(cached.index.head), len(cached.index.tail)) == (computed, len(members) - computed)
    assert_all_equal(pickle.loads(pickle.dumps(cached)), dataset)
    assert verify(path) == []


def test_a_lossy_cache(path):
    cached = built(Photos(), path, images={"image": Encoded("jpeg", 80, 16), "mask": "png"})
    assert kinds(cached)["image"] == ["encoded:JPEG:RGB"]
    for row, sample in enumerate(cached):
        assert bits(sample["mask"]) == bits(Photos()[row]["mask"])
        file = stored_file(cached, 0, row)
        assert bits(Image.open(io.BytesIO(file)).convert("RGB")) == bits(sample["image"])


@pytest.mark.parametrize("images", ["raw", {"0": "webp"}])
def test_masks_with_a_palette_are_kept_as_png(path, images):
    cached = built(Masks(), path, images=images)
    assert kinds(cached)["1"] == ["encoded:PNG:P"]
    assert_all_equal(cached, Masks())
    for row in range(SIZE):
        assert cached[row][1].info == ({"transparency": 255} if row == 3 else {})
        file = Image.open(io.BytesIO(stored_file(cached, 1, row)))
        assert np.array_equal(np.array(file), np.array(Masks()[row][1]))
    refused("largest=2999 allows", CachedDataset, path, largest=4 * 25 * 30 - 1)


def test_a_mode_that_cannot_be_kept_names_its_sample(path):
    dataset, images = Photos(mode="RGBA"), {"image": "jpeg"}
    text = "sample 2 cannot be kept: column 'image' is an image of mode 'RGBA'"
    refused(text, built, dataset, path, images=images)
    ((number, said),) = built(dataset, path, images=images, on_error="skip").failed
    assert (number, text in said) == (2, True)
    assert len(built(dataset, path)) == SIZE - 1  # only opened: nothing is encoded


@pytest.mark.parametrize(
    ("dataset", "images", "text"),
    [
        (Photos(), {"picture": "jpeg"}, "'picture' of Photos .*, whose columns are 'image', 'ma"),
        (Made(torch.full, 3, sample=lambda index: torch.full((3, 4, 4), index)), "jpeg",
         "images='jpeg, quality 90' .*: there is no PIL image in any column of Made"),
    ],
)  # fmt: skip
def test_columns_that_hold_no_images(path, dataset, images, text):
    refused(text, built, dataset, path, images=images)
    assert len(built(Photos(size=0), path, images="jpeg")) == 0


def test_packed_needs_the_files_no_longer(path, photos):
    chain = v2.Compose([v2.RGB(), v2.RandomCrop(9)])
    dataset = ImageFolder(photos, chain, lambda target: [target, "a"])
    cached = built(dataset, path, images="packed")
    assert kinds(cached) == {"0": ["file:RGB"], "1": ["json"]}
    assert (cached.index.head, len(cached.index.tail)) == ((), 2)
    expected = [seeded(dataset, row) for row in range(SIZE)]
    shutil.rmtree(photos)
    cached = pickle.loads(pickle.dumps(cached))
    assert_same([seeded(cached, row) for row in range(SIZE)], expected, strides=False)


def test_packed_files_that_are_broken(path, photos):
    options = {"images": "packed", "overwrite": True}
    dataset = ImageFolder(photos)
    file = Path(dataset.samples[1][0])
    file.write_bytes(file.read_bytes()[:-90])
    rule = f"sample 1 cannot be kept: {file}: it cannot be de"
    refused(rule, built, dataset, path, **options)
    cached = built(dataset, path, on_error="skip", **options)
    assert [number for number, _ in cached.failed] == [1]


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"


def png(width, height, mode=2, data=b""):
    def chunk(name, inside):
        crc = struct.pack(">I", zlib.crc32(name + inside))
        return struct.pack(">I", len(inside)) + name + inside + crc

    head = struct.pack(">IIBBBBB", width, height, 8, mode, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


COLOUR = saved(smooth(0), "PNG")


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        *((kind, png(*size, 3 if kind[-1] == "P" else 2), text)
          for kind in ("encoded:PNG:RGB", "encoded:PNG:P", "file:RGB")
          for size, text in (((60000, 60000), "DecompressionBombError: Image size"),
                             ((2**31 - 1, 2**31 - 1), "Bomb"),
                             ((200, 200), "it cannot be decoded"))),  # no pixels after all
        ("encoded:JPEG:RGB", COLOUR, "it is no file of format JPEG"),
        ("encoded:JPEG:RGB", saved(smooth(0).convert("L"), "JPEG"), "it is a JPEG of mode L"),
        ("encoded:WEBP:RGBA", COLOUR, "it is no file of format WEBP"),
        ("encoded:PNG:L", COLOUR, "it is a PNG of mode RGB"),
        ("encoded:PNG:P", COLOUR, "it is a PNG of mode RGB"),
        ("file:RGB", EPS, "it is no file of format BMP, GIF"),
        ("file:RGB", b"", "it is no file of format"),
        ("encoded:JPEG:RGB", saved(smooth(0, 90, 90), "JPEG")[:-200], "truncated"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_such_image(path, kind, data, text):
    cached = build_of_bytes(path, kind, data)
    for read, row in ((cached.__getitem__, 1), (cached.__getitems__, [1])):
        refused(f"column 'sample', row 1: a leaf of kind '{kind}'.*{text}", read, row)


# `images="packed"`: the files that a dataset opens, found by recording its own code


CHAIN = v2.Compose([v2.Resize(18), v2.RandomCrop(9), v2.RandomHorizontalFlip(), v2.ToImage()])
pack = partial(built, images="packed")


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


def test_what_cannot_be_packed(tmp_path):
    def later(self, file, index):  # where no study looks
        return rgb(file).rotate(90) if index == 50 else rgb(file)

    path, many = tmp_path / "a.h5", [saved(smooth(0), "JPEG")] * 150
    files = [saved(smooth(n, mode="L" if n == 1 else "RGB"), "JPEG") for n in range(SIZE)]
    voc = OF_TORCHVISION["voc_segmentation"](tmp_path, transforms=v2.CenterCrop(5))
    for dataset, rule in (
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
