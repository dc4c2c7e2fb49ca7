"""The file: plain HDF5 for everybody else, the same to the bit for the same rows."""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from dataloaders.cache import CachedDataset, verify
from dataloaders.cache.format.hdf5 import _our_errors
from dataloaders.errors import CacheError
from helpers.cached import build, mixed
from helpers.compare import bits
from helpers.processes import run_script


def digest(path):
    return hashlib.blake2b(path.read_bytes()).hexdigest()


@pytest.mark.nightly
def test_another_process_makes_the_same_file(tmp_path):
    build(tmp_path / "here.h5", mixed(40), failed=[(3, "no")], fingerprint={"b": 1, "a": [2]})
    source = f"""
        import sys, os
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from helpers.cached import build, mixed
        junk = [os.urandom(1 << 20) for _ in range(20)]
        build(Path("there.h5"), mixed(40), failed=[(3, "no")], fingerprint={{"a": [2], "b": 1}})
        """
    done = run_script(tmp_path, source, env={"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"})
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "here.h5") == digest(tmp_path / "there.h5")
    assert str(tmp_path).encode() not in (tmp_path / "here.h5").read_bytes()


def test_the_kinds_of_columns(tmp_path):
    index = build(tmp_path / "a.h5", mixed(12))
    columns = {column.name: column for column in index.columns}
    assert list(columns) == [
        "image", "photo", "label", "score", "name", "boxes", "words", "either", "nested/0/x",
        "nested/0/y", "nested/1/1", "empty",
    ]  # fmt: skip
    assert columns["image"].shape == (3, 6, 5)
    assert columns["image"].codes is None
    assert columns["photo"].shape is None
    assert columns["photo"].shapes is not None
    assert columns["photo"].shapes.size == 12 * 3
    assert columns["score"].variants == (("float", 0), ("none", 0))
    assert columns["score"].shape == ()
    assert columns["score"].codes is not None
    assert columns["name"].offsets is not None
    assert columns["name"].shapes is None
    assert columns["boxes"].dtype == "<u2"
    assert columns["either"].variants == (("array", 1), ("scalar", 0))
    assert columns["nested/0/y"].shape == (2,)  # all strings of one length
    assert columns["nested/1/1"].shape == (0,)
    assert columns["empty"].dtype == ">f4"


def test_large_columns_begin_on_a_page(tmp_path):
    index = build(tmp_path / "a.h5", mixed(2000))
    places = [extent.offset for column in index.columns for _, d, extent in column.parts()
              if extent.size * np.dtype(d).itemsize >= 4096]  # fmt: skip
    assert len(places) > 5
    assert all(place % 4096 == 0 for place in places)


def test_h5py_reads_the_same_values(tmp_path):
    samples = mixed(30)
    path = tmp_path / "a.h5"
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
        assert list(score["values"][:4]) == [0, 0, 2 / 7, 3 / 7]
        assert list(file["failed/rows"]) == [1, 31]
        assert bytes(file["failed/messages"][:]) == b'["\\u00e9", "b"]'


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump (hdf5-tools) is not installed")
def test_h5dump_reads_the_same_values(tmp_path):
    samples = mixed(30)
    build(tmp_path / "a.h5", samples)
    (tmp_path / "b.h5").symlink_to(tmp_path / "a.h5")

    def dump(*options):
        command = ["h5dump", "-y", "-w", "0", *options, str(tmp_path / "b.h5")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def numbers(name):
        found = re.findall(r"DATA \{(.*?)\}", dump("-d", name), re.DOTALL)[0]
        return [float(number) for number in re.findall(r"-?\d[\d.e-]*", found)]

    assert numbers("/columns/label") == list(range(30))
    images = np.stack([np.asarray(sample["image"]).transpose(2, 0, 1) for sample in samples])
    assert numbers("/columns/image") == images.reshape(-1).tolist()
    assert numbers("/columns/name/offsets")[:5] == [0, 0, 2, 6, 12]
    assert '"dataloaders cache"' in dump("-a", "/format")
    assert "TRUE" in dump("-d", "/columns/nested/0/x")
    everything = dump()
    assert everything.count("DATASET") == 1 + sum(
        len(list(column.parts())) for column in CachedDataset(tmp_path / "a.h5").columns
    )


def test_the_reader_in_the_documentation(tmp_path):
    text = (Path(__file__).parent.parent / "docs" / "cache-format.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    exec(source, names)
    samples = mixed(20)
    build(tmp_path / "a.h5", samples)
    for row, sample in enumerate(samples):
        leaves = names["read"](tmp_path / "a.h5", row)
        for name in ("image", "photo"):
            np.testing.assert_array_equal(leaves[name].transpose(1, 2, 0), np.asarray(sample[name]))
        for name in ("label", "score", "name", "words", "either", "empty"):
            np.testing.assert_equal(leaves[name], sample[name])
        boxes = sample["boxes"].view(torch.uint16).numpy()
        np.testing.assert_array_equal(leaves["boxes"], boxes, strict=True)
        assert leaves["nested/0/y"].tobytes() == b"ab"
        assert leaves["nested/1/1"] is None


def test_no_times_inside(tmp_path):
    build(tmp_path / "a.h5", mixed(3))

    def look(name, found):
        info = h5py.h5o.get_info(found.id)
        assert (info.atime, info.mtime, info.ctime, info.btime) == (0, 0, 0, 0), name

    with h5py.File(tmp_path / "a.h5") as file:
        file.visititems(look)


def test_no_rows(tmp_path):
    index = build(tmp_path / "a.h5", [], failed=[(0, "broken"), (1, "too")])
    assert (index.rows, index.samples, index.columns, index.structure) == (0, 2, (), None)
    cached = CachedDataset(tmp_path / "a.h5")
    assert len(cached) == 0
    assert list(cached) == cached[:] == cached.__getitems__([]) == []
    assert cached.failed == [(0, "broken"), (1, "too")]
    assert verify(tmp_path / "a.h5") == []
    with h5py.File(tmp_path / "a.h5") as file:
        assert list(file["failed/rows"]) == [0, 1]


@pytest.mark.parametrize("sample", [{}, (), {"a": [(), {}]}], ids=str)
def test_samples_without_leaves(tmp_path, sample):
    build(tmp_path / "a.h5", [sample] * 5)
    cached = CachedDataset(tmp_path / "a.h5")
    if sample == {"a": [(), {}]}:
        assert [bits(each) for each in cached] == [bits(sample)] * 5
    else:
        assert list(cached) == cached[:] == [sample] * 5


def test_many_columns(tmp_path):
    samples = [{f"column {n}": n + row for n in range(2000)} for row in range(3)]
    index = build(tmp_path / "a.h5", samples)
    assert index.user_block > 1 << 16
    assert list(CachedDataset(tmp_path / "a.h5")) == samples
    with h5py.File(tmp_path / "a.h5") as file:
        assert list(file["columns/column 1999"]) == [1999, 2000, 2001]
    with pytest.raises(CacheError, match="more than 10000 leaves, which is the most"):
        build(tmp_path / "b.h5", [tuple(range(10_001))])


def test_a_row_of_many_dimensions(tmp_path):
    samples = [torch.full((1,) * 32, row) for row in range(3)]
    index = build(tmp_path / "a.h5", samples)
    assert index.columns[0].shape is None  # HDF5 has 32 dimensions, of which rows take one
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        assert [bits(sample) for sample in CachedDataset(tmp_path / "a.h5")] == list(
            map(bits, samples)
        )


# What goes wrong


def test_a_fingerprint_that_is_no_json(tmp_path):
    for fingerprint in ({"a": {1, 2}}, {"a": float("nan")}):
        with pytest.raises(CacheError, match="fingerprint cannot be written as JSON"):
            build(tmp_path / "a.h5", [1], fingerprint=fingerprint)
    with pytest.raises(CacheError, match="index of the cache takes"):
        build(tmp_path / "a.h5", [1], fingerprint={"a": "b" * (8 << 20)})


NO_ROOM = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import numpy as np
from helpers.cached import build
from dataloaders.errors import CacheError
from dataloaders.cache import CachedDataset
def attempt(make):
    try:
        make()
    except (CacheError, OSError) as error:
        print(error)
attempt(lambda: build(Path("a.h5"), [np.ones(1 << 16)] * 20))
attempt(lambda: CachedDataset("a.h5"))
"""


def check_no_room(output, reason):
    first, second = output.splitlines()
    assert re.search(reason, first)
    assert "no finished cache" in second


def test_a_full_disk_that_hdf5_tells_in_its_text_only():
    text = (
        "Disable slist on flush dest failure failed (file write failed: time = Sun Nov  2 10:01:20 "
        "2025\n, filename = 'a.h5', file descriptor = 5, errno = 28, error message = 'No space "
        "left on device', buf = 0x1, total write size = 2048)"
    )
    with pytest.raises(OSError, match="No space left"), _our_errors(h5py, Path("a.h5")):
        raise RuntimeError(text)


def test_a_limit_of_the_size_of_files(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, 10 << 20))"
    done = run_script(tmp_path, f"import h5py\n{limit}\n{NO_ROOM}")
    assert done.returncode == 0, done.stderr
    check_no_room(done.stdout, "File too large|file too large")


def test_without_h5py_reading_works_and_building_says_what_to_do(tmp_path):
    build(tmp_path / "a.h5", mixed(3))
    source = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        sys.modules["h5py"] = None
        from pathlib import Path
        from helpers.cached import build
        from dataloaders.cache import CachedDataset, verify
        print(len(CachedDataset("a.h5")[:]), verify("a.h5"))
        try:
            build(Path("b.h5"), [1])
        except ImportError as error:
            print(type(error).__name__, error)
        """
    done = run_script(tmp_path, source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 []\nMissingDependency building a cache needs h5py")
    assert "gpu-dataloaders[h5]" in done.stdout


def test_a_photo_of_its_own(tmp_path):
    """One image, alone, not in any container: the column is named for want of a key."""
    build(tmp_path / "a.h5", [Image.new("L", (3, 2), 9)])
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["columns/sample"].shape == (1, 1, 2, 3)
    assert os.stat(tmp_path / "a.h5").st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
