"""Images of a cache that are encoded anew, or packed as the dataset's own files."""

import io
import itertools
import pickle
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.functional import InterpolationMode

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, Encoded, estimate, verify
from dataloaders.cache.sample.encoding import encoded
from dataloaders.cache.sample.leaf import fits, value_of
from dataloaders.cache.sample.sample import split
from dataloaders.errors import OptionError
from helpers.cached import (
    MODES,
    assert_all_equal,
    build_of_bytes,
    built,
    images,
    refused,
    seeded,
    stored_file,
)
from helpers.compare import assert_same, bits
from helpers.datasets import Made
from helpers.pictures import saved, smooth, write_folder

SIZE = 6
NEAREST = InterpolationMode.NEAREST
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

    size, colour, transform, target_transform = SIZE, 0, None, None

    def sample(self, index):
        height = 24 + index % 2
        y, x = np.mgrid[:height, :30]
        indices = ((x // 7 + y // 5 + index) % 5).astype(np.uint8)
        indices[y // 5 != (y + 1) // 5] = 255
        target = Image.fromarray(indices)
        target.putpalette([value * 37 % 256 for value in range(767)] + [self.colour])
        if index == 3:
            target.info["transparency"] = 255
        image = smooth(index, height)
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target


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


def test_modes_and_what_a_format_keeps_of_them():
    for name, mode in itertools.product(KEPT, MODES):
        if mode not in KEPT[name]:
            rule = f"mode '{mode}', 4 x 3 pixels, which {name} can"
            refused(rule, encode, Image.new(mode, (4, 3)), name)
    rule = r"which jpeg cannot keep; png and webp can\. Call"
    refused(rule, encode, Image.new("RGBA", (4, 3)), "jpeg")
    image = smooth(0, mode="RGBA")
    image.putalpha(0)
    assert bits(decode(encode(image, "webp"))) == bits(image)  # the colours below it, too


@pytest.mark.parametrize("name", KEPT)
def test_images_that_are_empty_or_too_large_and_what_else_is_in_them(name, monkeypatch):
    refused("it is empty", encode, Image.new("RGB", (0, 4)), name)
    if name != "png":
        rule = r"70000 x 1 pixels.* too large\. Give max_side"
        refused(rule, encode, Image.new("L", (70000, 1)), name)
    image, clean = smooth(0, 40, 40), encode(smooth(0, 40, 40), name)
    image.info = {"icc_profile": b"secret", "exif": b"Exif\0\0secret", "dpi": (7, 7)}
    assert encode(image, name).values.tobytes() == clean.values.tobytes()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    refused("it is too large", encode, image, name)  # it could not be read again
    assert decode(encode(image, name, max_side=20)).size == (20, 20)


@settings(max_examples=100)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.sampled_from(["RGB", "1"]))
def test_the_longer_side_is_bounded(width, height, most, mode):
    image = smooth(0, height, width).convert(mode)
    kept = decode(encode(image, "png", max_side=most))
    if max(width, height) <= most:
        assert bits(kept) == bits(image)
        return
    assert max(kept.size) == most
    for now, before in zip(kept.size, image.size, strict=True):
        assert abs(now - before * most / max(width, height)) <= 0.5 or now == 1
    assert bits(kept) == bits(image.resize(kept.size, Image.Resampling.LANCZOS))


def test_ways_that_there_are_not(path):
    for options in (("gif",), ("jpeg", 0), ("jpeg", 101), ("jpeg", True), ("jpeg", 90.0),
                    ("png", 90), ("webp", None, 0), ("webp", None, 65536)):  # fmt: skip
        rule = r"\(--.*\).*: (it must be|format must|png is stored)"
        refused(rule, Encoded, *options, error=OptionError)
    for choice in ("gif", 3, ["jpeg"], {"image": "packed"}, {"image": None}, {1: "png"}):
        refused("images=", built, Photos(), path, images=choice, error=OptionError)
    assert not path.exists()


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ([None, "raw", {}, {"image": "raw"}], "raw"),
        ([{"image": Encoded("jpeg")}, {"image": Encoded("jpeg", quality=90)}],
         "image: jpeg, quality 90"),
        ([{"mask": "png", "image": Encoded("webp", max_side=5), "label": "raw"}],
         "image: webp, max_side 5; mask: png"),
    ],
)  # fmt: skip
def test_ways_in_words_and_what_the_file_has_counts_where_nothing_is_said(path, choices, text):
    first = built(Photos(), path, images=choices[0])
    assert first.index.fingerprint["images"] == text
    for again in (None, *choices):
        assert built(Photos(), path, images=again).identity == first.identity
    rule = f"images: {text} when it was built, png now; build"
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


def test_masks_with_a_palette_that_are_made_smaller_or_may_not_be_png(path):
    cached = built(Masks(), path, images=Encoded("png", max_side=13))
    for row in range(SIZE):
        kept, whole = cached[row][1], Masks()[row][1]
        assert max(kept.size) == 13
        assert bits(kept) == bits(whole.resize(kept.size, Image.Resampling.NEAREST))
    text = r"column '1' is an image of mode 'P', 30 x 24 pixels, which jpeg cannot keep; png can"
    rule = rf"{text}\. Name the columns to encode and leave this"
    refused(rule, built, Masks(), path, images="jpeg", overwrite=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_masks_are_those_of_stock(path, workers, workers_end_fast):
    def indices(image):
        """Somebody's own transform."""
        return torch.from_numpy(np.array(image)).long() + image.info.get("transparency", 0)

    dataset = Masks(
        transform=v2.Compose([v2.CenterCrop(20), v2.RandomCrop(16), *FLOATS]),
        target_transform=v2.Compose([v2.Resize(22, NEAREST), v2.RandomCrop(16), indices]),
    )
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers, "seed": 5}
    ours, theirs = (DataLoader(dataset, backend=each, **options) for each in (H5(path), "stock"))
    for _ in range(2):
        assert_same(list(ours), list(theirs))
    cached = CachedDataset(path)
    assert kinds(cached)["1"] == ["encoded:PNG:P"]
    assert cached.index.head[0].startswith("dataset.transform: CenterCrop(")
    dataset.colour = 7  # its palette is part of what a sample gives
    refused("the contents of sample 0, ", built, dataset, path, check="contents")


def test_files_are_small_said_to_be_so_and_not_compressed_again(path, tmp_path):
    large = Made(lambda index: (smooth(index, 300, 400), torch.zeros(9000)), SIZE)
    told, size = {}, {}
    for how in ("raw", "jpeg"):
        told[how] = estimate(large, tmp_path / how, images=how, num_workers=0).bytes
        size[how] = built(large, tmp_path / how, images=how).path.stat().st_size
    assert size["jpeg"] < size["raw"] / 5
    assert told["jpeg"] < min(told["raw"] / 5, size["jpeg"] + 1)
    cached = built(large, path, images="jpeg", compress="zstd")
    assert [column.packing is None for column in cached.columns] == [True, False]


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
        (Photos(transform=v2.Compose([v2.ToImage(), v2.CenterCrop(9)])), {"image": "jpeg"},
         "there is no PIL image in 'image' of Photos"),
        (Photos(), {"picture": "jpeg"}, "'picture' of Photos .*, whose columns are 'image', 'ma"),
        (Photos(), {"label": "png"}, "there is no PIL image in 'label'"),
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
    for file in photos.rglob("*.*"):
        file.write_bytes(EPS)
    rule = r"sample 0 cannot be kept: .* is no file of format BM"
    refused(rule, built, dataset, path, **options)
    refused("no sample could be read", built, dataset, path, on_error="skip", **options)


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


def test_what_the_backend_says(path, photos, tmp_path):
    dataset = ImageFolder(photos, v2.Compose([v2.RandomCrop(9), v2.PILToTensor()]))

    def plan(backend, of=dataset):
        return str(backend.explain(DataLoader(of)))

    def first(backend, of=dataset):
        return next(iter(DataLoader(of, backend=backend)))

    assert "with images as packed, built at" in plan(H5(path, images="packed"))
    assert "with images" not in plan(H5(path))
    built(dataset, path, images=Encoded("jpeg", 70))
    assert f"rows of {path} with images as jpeg, quality 70\n" in plan(H5(path))
    packed = H5(tmp_path / "no.h5", images="packed")
    assert "cannot serve this loader: sample 0 cannot be kept" in plan(packed, Photos())
    refused("an image that Pillow did not open from", first, packed, Photos())
    rule = "images: jpeg, quality 70 when it was built, png now"
    refused(rule, first, H5(path, images="png"))
    refused("images='gif'", H5, images="gif", error=OptionError)
