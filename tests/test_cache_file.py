"""The file: plain HDF5 for everybody else, the same bytes for the same rows, every damage found."""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from dataloaders.cache import CachedDataset, merge, verify
from helpers.cached import build, mixed, refused, spoil
from helpers.compare import bits
from helpers.hostile import BLOCK, HEADER
from helpers.processes import run_script


def test_h5py_reads_the_same_values(path):
    samples = mixed(30)
    build(path, samples, failed=[(1, "é"), (31, "b")])
    with h5py.File(path) as file:
        assert dict(file.attrs) == {"format": b"dataloaders cache", "version": 4, "rows": 30}
        columns = file["columns"]
        for row, sample in enumerate(samples):
            image = np.asarray(sample["image"]).transpose(2, 0, 1)
            np.testing.assert_array_equal(columns["image"][row], image, strict=True)
            assert columns["label"][row] == row
            first, last = columns["name/offsets"][row : row + 2]
            assert bytes(columns["name/values"][first:last]).decode() == sample["name"]
            first, last = columns["boxes/offsets"][row : row + 2]
            shape = columns["boxes/shapes"][row]
            boxes = torch.from_numpy(columns["boxes/values"][first:last]).view(torch.bfloat16)
            assert torch.equal(boxes.reshape(*map(int, shape)), sample["boxes"])
            assert columns["nested/0/x"][row] == sample["nested"][0].x
        assert columns["nested/0/x"].dtype == bool
        assert columns["empty"].shape == (30, 0, 3)
        assert columns["empty"].dtype == ">f4"
        score = columns["score"]
        assert score.attrs["kinds"] == b"float none"
        assert list(score["codes"][:4]) == [0, 1, 0, 0]
        assert list(score["offsets"][:5]) == [0, 1, 1, 2, 3]
        assert list(score["values"][:3]) == [0, 2 / 7, 3 / 7]
        assert list(file["failed/rows"]) == [1, 31]
        assert bytes(file["failed/messages"][:]) == b'["\\u00e9", "b"]'


def test_many_columns(tmp_path):
    samples = [{f"column {n}": n + row for n in range(1000)} for row in range(3)]
    index = build(tmp_path / "a.h5", samples)
    assert index.user_block > 1 << 16
    assert list(CachedDataset(tmp_path / "a.h5")) == samples
    with h5py.File(tmp_path / "a.h5") as file:
        assert list(file["columns/column 999"]) == [999, 1000, 1001]
    rule = "more than 10000 leaves, which is the most"
    refused(rule, build, tmp_path / "b.h5", [tuple(range(10_001))])
    rule = "cannot be written as JSON"
    refused(rule, build, tmp_path / "b.h5", [1], fingerprint={"a": float("nan")})


def test_the_longest_index_that_is_written(tmp_path):
    index = build(tmp_path / "a.h5", [1])

    def text(length):
        return replace(index, fingerprint={"a": "b" * length}).text()

    one, other = ({"x": 1, "y": 2}, {"y": 2, "x": 1})
    assert replace(index, fingerprint=one).text() == replace(index, fingerprint=other).text()
    room = (8 << 20) - len(text(0))
    assert len(text(room)) == 8 << 20
    refused("takes 8388609 bytes, of 8388608 that it may: 1 columns are too many", text, room + 1)


@pytest.mark.parametrize("dimensions", [31, 32])
def test_a_row_of_many_dimensions(dimensions, tmp_path):
    samples = [torch.full((1,) * dimensions, row) for row in range(3)]
    index = build(tmp_path / "a.h5", samples)
    # HDF5 has 32 dimensions, of which rows take one.
    assert index.columns[0].shape == (None if dimensions == 32 else (1,) * 31)
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        assert bits(CachedDataset(tmp_path / "a.h5")[:]) == bits(samples)


def test_without_h5py_reading_works_and_building_says_what_to_do(tmp_path):
    """So no link or virtual dataset that somebody put into the file leads out of it."""
    build(tmp_path / "a.h5", mixed(3))
    source = """
        import sys
        sys.modules["h5py"] = None
        from backends.h5 import H5
        from dataloaders import DataLoader
        from dataloaders.cache import CachedDataset, precompute, verify
        from dataloaders.cli import main
        cached = CachedDataset("a.h5")
        (batch,) = DataLoader(cached, 3, collate_fn=list, backend=H5())
        print(len(batch), verify("a.h5"))
        print(main(["cache", "info", "a.h5"]), main(["cache", "verify", "a.h5"]))
        try:
            precompute([1, 2], "b.h5", num_workers=0)
        except ImportError as error:
            print(type(error).__name__, error)
        """
    done = run_script(tmp_path, source)
    assert done.stdout.startswith("3 []\n")
    assert "a.h5 is whole\n0 0\nMissingDependency building a cache needs h5py" in done.stdout
    assert "gpu-dataloaders[h5]" in done.stdout


# Files of format version 3 are read as ever: single, compressed, and joined from shards


FILES = Path(__file__).parent / "data" / "cache_v3"


def row(index):
    return {
        "image": np.full((2, 3, index % 2 + 1), index, np.uint8),
        "label": index,
        "name": None if index == 4 else "ab" * index,
    }


@pytest.mark.parametrize(
    ("name", "sample"),
    [("one.h5", row), ("zstd.h5", lambda index: f"abc{index}" * 6000), ("joined.h5", row)],
)
def test_files_of_version_3_are_read_as_ever(name, sample, tmp_path):
    for file in FILES.glob("*.h5"):
        shutil.copy(file, tmp_path)
    cached, samples = CachedDataset(tmp_path / name), bits([sample(index) for index in range(6)])
    merge(cached.path, tmp_path / "merged.h5")
    assert bits(list(cached)) == bits(list(CachedDataset(tmp_path / "merged.h5"))) == samples
    assert verify(cached.path) == []
    if cached.shards:  # beside it, as they were joined then
        assert cached.shards[1].name == "joined.00001-of-00002.h5"
        cached.shards[1].unlink()
        rule = r"joined\.00001-of-00002\.h5 of the cache .* is missing"
        refused(rule, CachedDataset, cached.path)


# Every flipped bit is found, wherever it is, and what it hit is named


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of a few blocks, with every sort of column, and failed samples."""
    path = tmp_path_factory.mktemp("whole") / "a.h5"
    samples = [{**sample, "large": np.full(20_000, row, np.uint8)}
               for row, sample in enumerate(mixed(16))]  # fmt: skip
    index = build(path, samples, failed=[(3, "broken")], fingerprint={"a": "b"}, head=["c"])
    return path.read_bytes(), index


def flipped(path, whole, offset, bit):
    spoil(path, offset, bytes([whole[offset] ^ 1 << bit]), whole)
    return verify(path)


def test_what_a_flipped_bit_hits_is_named(tmp_path, whole):
    data, index = whole
    places = [
        ("the index:", HEADER // 2),
        ("the zeros after the index", index.user_block - 1),
        ("HDF5's own records", index.user_block),
        ("the table of checksums", index.checksums.values.offset),
        *(("list of failed", extent.offset) for extent in vars(index.failed).values()),
    ]
    for column in index.columns:
        for part, _, extent in column.parts():
            if extent.size:
                name = f"column {column.name!r}" + ("" if part == "values" else f" ({part})")
                places.append((name, extent.offset))
    assert len(places) > 20
    for name, offset in places:
        damages = flipped(tmp_path / "a.h5", data, offset, offset % 8)
        hit = [each for each in damages if each.offset <= offset < each.offset + each.bytes]
        assert any(name in damage.what for damage in hit), (offset, name, damages)
        assert all(damage.bytes <= max(BLOCK, index.user_block) for damage in hit)
    for offset, bit in product(range(HEADER), range(8)):  # in the header, every bit counts
        (damage,) = flipped(tmp_path / "a.h5", data, offset, bit)
        assert damage.what.startswith("the index: ")


def test_several_damages_in_the_order_of_the_file(path):
    index = build(path, [np.full(BLOCK, row % 250, np.uint8) for row in range(300)])
    data = path.read_bytes()
    spoil(path, index.user_block - 1)
    one, other = index.user_block + 2 * BLOCK, index.user_block + 5 * BLOCK
    spoil(path, one, data[other : other + BLOCK])  # swapped
    spoil(path, other, data[one : one + BLOCK])
    first, *damages = verify(path)
    assert [damage.offset for damage in damages] == [one, other]
    assert "zeros" in first.what
    assert "column 'sample'" in damages[0].what
