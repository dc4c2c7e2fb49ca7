"""How large rows and caches may be: no row takes more than the index or a limit allows."""

import pickle
import resource
import shutil
import struct
import tempfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from dataloaders.cache import CachedDataset, Encoded, precompute, verify
from helpers.cached import build_of_bytes, built, refused, spoil, stored_file
from helpers.compare import bits
from helpers.datasets import Made
from helpers.hostile import Whole, say_less
from helpers.pictures import saved, smooth
from helpers.processes import takes_less_than
from helpers.recorded import Photos

LARGEST = max((30 + index) * (40 - index) for index in range(9))


def photo(index):
    """Images of several sizes, and arrays of several lengths."""
    image = smooth(index, 30 + index, 40 - index)
    return {"image": image, "rest": np.arange(index * 7), "one": index}


PICTURES = Made(photo, 9)
FILES = Photos([saved(photo(index)["image"]) for index in range(9)], lambda image: image)
# Rows of zeros, of several lengths, which take next to nothing when they are compressed.
SPARSE = Made(lambda index: torch.zeros(100_000 * (index + 1)), 4)
CASES = {
    "one shape": (Made(lambda index: np.full((10, 10), index), 2), {}, 800),
    "raw": (PICTURES, {}, 3 * LARGEST),
    "png": (PICTURES, {"images": "png"}, 4 * LARGEST),
    "packed": (FILES, {"images": "packed"}, None),
    "zstd": (SPARSE, {"compress": "zstd"}, 1_600_000),
    "text": (Made("ab".__mul__, 4), {}, 4 * 6),
}


def said(path):
    return [(c.name, c.most_values, c.most_pixels) for c in CachedDataset(path).columns]


def changed(path, number, **values):
    """Have the index say something else of a column, its digest right."""
    whole = Whole(path.read_bytes())
    path.write_bytes(whole.changed({f"columns.{number}.{name}": v for name, v in values.items()}))


def test_what_the_index_says(tmp_path):
    def first(name, dataset=PICTURES, **options):
        cached = built(dataset, tmp_path / name, num_workers=2, rows=2, **options)
        return cached, said(cached.path)[0]

    raw, _ = first("raw.h5")
    told = [("image", 3 * LARGEST, None), ("rest", 56, None), ("one", None, None)]
    assert said(raw.path) == told
    png, told = first("png.h5", images="png")
    assert told == ("image", max(len(stored_file(png, 0, row)) for row in range(9)), LARGEST)
    assert first("b.h5", FILES, images="packed")[1][2] == LARGEST
    small, told = first("c.h5", images=Encoded("jpeg", max_side=10))
    most = max(w * h for w, h in (sample["image"].size for sample in small))
    assert told[2] == most <= 100
    tiny = Made(lambda index: Image.new("L", (1, 1), index), 2)
    assert first("e.h5", tiny, images="png")[1][2] == 1
    joined = built(PICTURES, tmp_path / "f.h5", images="png", rows=3, single_file=False)
    assert said(joined.path) == said(png.path)
    assert len(CachedDataset(joined.path, largest=4 * LARGEST)[:]) == 9
    rule = "column 'image' has values that take"
    refused(rule, CachedDataset, joined.path, largest=4 * LARGEST - 1)
    say_less(joined.shards[1])
    joined.path.unlink()  # what one of its shards does not say, it does not
    built(PICTURES, joined.path, images="png", rows=3, single_file=False)
    assert said(joined.path) == [(each[0], None, None) for each in said(png.path)]
    assert bits(list(CachedDataset(joined.path))) == bits(list(png))


def test_a_compressed_row_that_is_larger_than_the_index_says(path):
    entry = built(SPARSE, path, compress="zstd").columns[0]
    assert said(path) == [("sample", 400_000, None)]
    spoil(path, entry.offsets.offset, np.array([0, 0, 0, 0, 1_000_000], "<u8").tobytes())
    with takes_less_than(1 << 20):
        rule = "row 3: it has 1000000 values, and it may have 40000"
        refused(rule, lambda: CachedDataset(path)[3])
    changed(path, 0, most_values=1 << 26)
    assert said(path) == [("sample", 1 << 26, None)]
    one_piece = {"packing.piece": 65_537, "packing.pieces.1": 32}
    whole = path.read_bytes()
    for values in (one_piece, {"most_values": (1 << 26) + 1}):  # of four bytes each
        path.write_bytes(whole)
        changed(path, 0, **values)
        refused("is malformed: packing of column 'sample' is", CachedDataset, path)


def test_a_tiff_file_whose_tiles_are_larger_than_all_images(path):
    """libtiff allocates a whole tile: a file of 300 bytes took 768 MiB."""
    tags = [(256, 4, 8), (257, 4, 8), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1),
            (322, 4, 16384), (323, 4, 16384), (324, 4, 138), (325, 4, 150)]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    file = struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(8)
    build_of_bytes(path, "file:RGB", file + zlib.compress(bytes(100_000)))
    rule = r"it has 268435456 pixels, and it may have 262144"
    refused(rule, CachedDataset(path, largest=1 << 20).__getitem__, 0)


@pytest.mark.parametrize("name", CASES)
def test_files_that_do_not_say_and_a_limit_of_ones_own(path, name):
    dataset, options, most = CASES[name]
    whole = built(dataset, path, **options)
    before = bits(list(whole))
    if most is not None:
        limited = CachedDataset(path, largest=most)
        assert bits(list(limited)) == before
        assert pickle.loads(pickle.dumps(limited)).largest == most
        message = rf"has values that take .* in memory, and largest={most - 1} allows"
        refused(message, CachedDataset, path, largest=most - 1)
    say_less(path)
    assert bits(list(built(dataset, path))) == before
    assert {each[1:] for each in said(path)} == {(None, None)}
    assert verify(path) == []
    if most is not None and name != "one shape":  # it does not say: each row is held to it
        found = CachedDataset(path, largest=most - 1)
        assert bits(found[0]) == bits(whole[0])
        refused("and it may have", found.__getitem__, slice(None))
        assert len(CachedDataset(path, largest=most)[:]) == len(whole)
    if name in ("png", "packed"):  # an image of more pixels is not decoded
        changed(path, 0, most_pixels=LARGEST - 1)
        cached = CachedDataset(path)
        for read, rows in ((cached.__getitem__, 5), (cached.__getitems__, [0, 5])):
            refused(rf"row 5: .*: it has \d+ pixels, and it may have {LARGEST - 1}", read, rows)
        assert cached[8] is not None  # of fewer


@pytest.mark.parametrize("value", [[[]] * 200_000, "\N{GRINNING FACE}" + "a" * 400_000])
def test_a_limit_counts_what_objects_take_in_memory(path, value):
    assert built([value], path).path.stat().st_size < 1 << 20
    rule = r"values that take .* in memory, and largest=1048576"
    refused(rule, CachedDataset, path, largest=1 << 20)


def test_a_file_for_which_there_is_no_room_among_the_addresses(path):
    built([np.zeros(64 << 20, np.uint8)], path)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    least = psutil.Process().memory_info().vms + (16 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (least, limits[1]))
    try:
        refused("a.h5 cannot be mapped: Cannot allocate memory", CachedDataset, path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# Beyond what fits 32 bits: samples over 100 MB, more than 2 GiB of rows, a million rows


@pytest.fixture
def large_path(tmp_path):
    """Of a cache: in memory where there is room, and gigabytes do not stay behind."""
    shared = Path("/dev/shm")
    room = shared.is_dir() and shutil.disk_usage(shared).free > 8 << 30
    enough = psutil.virtual_memory().available > 12 << 30
    with tempfile.TemporaryDirectory(dir=shared if room and enough else tmp_path) as folder:
        yield Path(folder) / "large.h5"


@pytest.mark.nightly
@pytest.mark.timeout(600)  # gigabytes, whatever the disk
def test_samples_of_100_megabytes_that_are_more_than_2_gib(large_path):
    def scan(index):  # each longer than the one before
        volume = torch.zeros(105 + index, 1000, 1000, dtype=torch.uint8)
        volume.view(-1)[[0, 12_345_678, -1]] = torch.tensor([1, 100, 200]).byte() + index
        return volume, index

    cached = precompute(Made(scan, 21), large_path, num_workers=2, single_file=True)
    for index in (0, 10, 20):  # the last lies behind 2 GiB
        volume, number = cached[index]
        assert number == index
        assert torch.equal(volume, scan(index)[0])
    assert verify(large_path) == []
    with h5py.File(large_path) as file:
        assert file["columns/0/values"].size > 1 << 31
