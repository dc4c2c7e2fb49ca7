"""What a row takes in memory stands in the index; what is larger is not unpacked, nor decoded."""

import io
import json
import pickle
import tracemalloc
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from dataloaders.cache import CachedDataset, Encoded, join, precompute, verify
from dataloaders.errors import CacheError
from helpers.cached import build
from helpers.compare import bits
from helpers.hostile import HEADER, seal
from helpers.older import say_less
from helpers.photos import picture

COMPRESSES = all(map(find_spec, ("zstandard", "hdf5plugin")))


class Pictures(Dataset[Any]):
    """Images of several sizes, and arrays of several lengths."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        size = (30 + index, 40 - index)
        return {"image": picture(index, *size), "rest": np.arange(index * 7), "one": index}


class Files(Dataset[Any]):
    """The same as files."""

    transform = None

    def __len__(self):
        return 9

    def encoded(self, index):
        file = io.BytesIO()
        picture(index, 30 + index, 40 - index).save(file, "JPEG")
        return file.getvalue()

    def __getitem__(self, index):
        return Image.open(io.BytesIO(self.encoded(index))).convert("RGB"), index


LARGEST = max((30 + index) * (40 - index) for index in range(9))


def said(path):
    return [(c.name, c.most_values, c.most_pixels) for c in CachedDataset(path).columns]


def changed(path, number, **values):
    """Have the index say something else of a column, its digest right."""
    data = path.read_bytes()
    length, block = (int.from_bytes(data[at : at + 8], "little") for at in (16, 24))
    fields = json.loads(data[HEADER : HEADER + length])
    fields["columns"][number].update(values)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(seal(text, block) + data[block:])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_index_says(tmp_path, workers):
    precompute(Pictures(), tmp_path / "raw.h5", num_workers=workers, rows=2)
    assert said(tmp_path / "raw.h5") == [
        ("image", 3 * LARGEST, None), ("rest", 56, None), ("one", None, None)
    ]  # fmt: skip
    precompute(Pictures(), tmp_path / "png.h5", num_workers=workers, rows=2, images="png")
    (name, values, pixels), *_ = said(tmp_path / "png.h5")
    offsets = np.diff(CachedDataset(tmp_path / "png.h5").readers[0]._offsets.astype(int))
    assert (name, values, pixels) == ("image", offsets.max(), LARGEST)
    precompute(Files(), tmp_path / "packed.h5", num_workers=workers, rows=2, images="packed")
    assert said(tmp_path / "packed.h5")[0][2] == LARGEST


def test_images_that_are_made_smaller_and_none(tmp_path):
    precompute(Pictures(), tmp_path / "a.h5", num_workers=0, images=Encoded("jpeg", max_side=10))
    most = max(w * h for w, h in (s["image"].size for s in CachedDataset(tmp_path / "a.h5")))
    assert said(tmp_path / "a.h5")[0][2] == most <= 100
    build(tmp_path / "b.h5", [None, "a", "abc"])
    assert said(tmp_path / "b.h5") == [("sample", 3, None)]


def test_an_image_of_more_pixels_is_not_decoded(tmp_path):
    for name, dataset, images in (("png.h5", Pictures(), "png"), ("packed.h5", Files(), "packed")):
        path = tmp_path / name
        precompute(dataset, path, num_workers=0, images=images)
        changed(path, 0, most_pixels=LARGEST - 1)
        cached = CachedDataset(path)
        largest = max(range(9), key=lambda index: (30 + index) * (40 - index))
        message = rf"row {largest}: .*: it has \d+ x \d+ pixels, and it may have {LARGEST - 1}"
        with pytest.raises(CacheError, match=message):
            cached[largest]
        with pytest.raises(CacheError, match=message):
            cached.__getitems__([0, largest])
        assert cached[8] is not None  # of fewer


def bomb():
    """A small file of 79 million pixels, just below what Pillow itself warns of."""
    file = io.BytesIO()
    Image.new("1", (8900, 8900)).save(file, "PNG")
    return file.getvalue()


def test_a_bomb_in_place_of_an_image(tmp_path):
    data = bomb()
    path = tmp_path / "a.h5"

    class Large(Files):
        def encoded(self, index):
            file = io.BytesIO()
            random = np.random.default_rng(index).integers(0, 256, (99, 99, 3), np.uint8)
            Image.fromarray(random).save(file, "PNG")
            return file.getvalue()

    precompute(Large(), path, num_workers=0, images="packed")
    cached = CachedDataset(path)
    entry = cached.columns[0]
    whole = bytearray(path.read_bytes())
    first = entry.values.offset
    assert len(data) < 40_000
    # Row 0 keeps its length, and is another file, with zeros behind its end.
    end = first + len(cached.readers[0].file(0) or b"")
    assert end - first > 20_000
    whole[first:end] = data[: end - first].ljust(end - first, b"\0")
    path.write_bytes(whole)
    del cached
    tracemalloc.start()
    try:
        with pytest.raises(CacheError, match=r"8900 x 8900 pixels, and it may have 9801"):
            CachedDataset(path)[0]
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


class Sparse(Dataset[Any]):
    """Rows of zeros, of several lengths, which take next to nothing when they are compressed."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(100_000 * (index + 1))


@pytest.mark.skipif(not COMPRESSES, reason="gpu-dataloaders[compressed] is not installed")
def test_a_compressed_row_that_is_larger_than_the_index_says(tmp_path):
    path = tmp_path / "a.h5"
    precompute(Sparse(), path, num_workers=0, compress="zstd")
    assert said(path) == [("sample", 400_000, None)]
    entry = CachedDataset(path).columns[0]
    assert entry.packing is not None
    assert entry.offsets is not None
    whole = bytearray(path.read_bytes())
    table = np.array([0, 0, 0, 0, 1_000_000], "<u8").tobytes()
    whole[entry.offsets.offset : entry.offsets.offset + len(table)] = table
    path.write_bytes(whole)
    tracemalloc.start()
    try:
        message = "row 3: it has 1000000 values, and it may have 400000 at most"
        with pytest.raises(CacheError, match=message):
            CachedDataset(path)[3]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    changed(path, 0, most_values=(1 << 26) + 1)  # of four bytes
    with pytest.raises(CacheError, match="most_values is 67108865, and no whole number from 0"):
        CachedDataset(path)


@pytest.mark.parametrize(
    ("number", "values", "message"),
    [
        (0, {"most_pixels": 0}, "most_pixels is 0, and no whole number from 1"),
        (0, {"most_pixels": "a"}, "most_pixels is 'a'"),
        (0, {"most_pixels": 2**60}, "most_pixels is 1152921504606846976"),
        (0, {"most_values": -1}, "most_values is -1"),
        (1, {"most_pixels": 9}, "most_pixels is there, and no encoded image"),
        (2, {"most_values": 1}, "most_values is there, and all rows have one shape"),
        (1, {"most": 1}, "lacks, or should not have, 'most'"),
    ],
)
def test_what_the_index_cannot_say(tmp_path, number, values, message):
    path = tmp_path / "a.h5"
    precompute(Pictures(), path, num_workers=0, images="png")
    changed(path, number, **values)
    with pytest.raises(CacheError, match=message):
        CachedDataset(path)


def test_files_that_do_not_say_are_read_as_ever(tmp_path):
    for name, dataset, options in (
        ("png", Pictures(), {"images": "png"}),
        ("packed", Files(), {"images": "packed"}),
        *([("zstd", Sparse(), {"compress": "zstd"})] if COMPRESSES else []),
    ):
        path = tmp_path / f"{name}.h5"
        before = [bits(sample) for sample in precompute(dataset, path, num_workers=0, **options)]
        say_less(path)
        assert [bits(sample) for sample in precompute(dataset, path, num_workers=0)] == before
        assert {each[1:] for each in said(path)} == {(None, None)}
        assert verify(path) == []


def test_a_joined_file_says_the_most_of_its_shards(tmp_path):
    whole = precompute(Pictures(), tmp_path / "whole.h5", num_workers=0, images="png")
    for rank in range(3):
        precompute(
            Pictures(), tmp_path / "a.h5", num_workers=0, images="png", shard=(rank, 3), wait=False
        )
    join(tmp_path / "a.h5")
    assert said(tmp_path / "a.h5") == said(whole.path)
    say_less(sorted((tmp_path / "a.parts").glob("*.h5"))[1])
    join(tmp_path / "a.h5")
    assert said(tmp_path / "a.h5") == [(each[0], None, None) for each in said(whole.path)]
    assert [bits(s) for s in CachedDataset(tmp_path / "a.h5")] == [bits(s) for s in whole]


def test_a_limit_of_ones_own(tmp_path):
    for name, dataset, options, most in (
        ("raw", Pictures(), {}, 3 * LARGEST),
        ("png", Pictures(), {"images": "png"}, 4 * LARGEST),
        *([("zstd", Sparse(), {"compress": "zstd"}, 1_600_000)] if COMPRESSES else []),
    ):
        path = tmp_path / f"{name}.h5"
        whole = precompute(dataset, path, num_workers=0, **options)
        before = [bits(sample) for sample in whole]
        limited = CachedDataset(path, largest=most)
        assert [bits(sample) for sample in limited] == before
        again = pickle.loads(pickle.dumps(limited))
        assert again.largest == most
        message = rf"has values that take .* in memory, and largest={most - 1} allows"
        with pytest.raises(CacheError, match=message):
            CachedDataset(path, largest=most - 1)
        say_less(path)  # it does not say: each row is held to it
        found = CachedDataset(path, largest=most - 1)
        assert bits(found[0]) == before[0]
        with pytest.raises(CacheError, match="and it may have"):
            found[:]
        assert len(CachedDataset(path, largest=most)[:]) == len(before)


def test_a_limit_for_a_joined_cache_and_for_rows_of_one_shape(tmp_path):
    for rank in range(3):
        precompute(Pictures(), tmp_path / "a.h5", num_workers=0, shard=(rank, 3), wait=False)
    join(tmp_path / "a.h5")
    assert len(CachedDataset(tmp_path / "a.h5", largest=3 * LARGEST)[:]) == 9
    with pytest.raises(CacheError, match="column 'image' has values that take"):
        CachedDataset(tmp_path / "a.h5", largest=3 * LARGEST - 1)[:]
    build(tmp_path / "b.h5", [np.zeros((10, 10)), np.ones((10, 10))])
    assert len(CachedDataset(tmp_path / "b.h5", largest=800)[:]) == 2
    with pytest.raises(CacheError, match="column 'sample' has values that take 800 bytes"):
        CachedDataset(tmp_path / "b.h5", largest=799)
