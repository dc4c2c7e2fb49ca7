"""A cache as a dataset: every way in which a loader reads one, in every kind of process."""

import copy
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, verify
from helpers.cached import Point, build, built, mixed, refused
from helpers.compare import bits
from helpers.datasets import Made
from helpers.pictures import Opened
from helpers.processes import is_true_in_a_fork, open_files

ROWS = 23


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("cache") / "mixed.h5"
    build(found, mixed(ROWS))
    return found


@pytest.fixture(scope="module")
def cached(path):
    return CachedDataset(path)


@pytest.fixture(scope="module", params=["one file", "parts"])
def either(request, cached):
    """Rows of one file, or of parts, opened by another name."""
    if request.param == "one file":
        return cached
    joined, link = cached.path.with_name("joined.h5"), cached.path.parent / "elsewhere" / "link.h5"
    built(mixed(ROWS), joined, rows=6, single_file=False)
    link.parent.mkdir()
    link.symlink_to(joined)
    return CachedDataset(link)


EXPECTED = [bits(sample) for sample in mixed(ROWS)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-ROWS, ROWS - 1), max_size=9), st.slices(ROWS + 3))
def test_many_rows_and_slices_are_what_single_rows_are(either, rows, part):
    many, single = either.__getitems__(rows), [either[row] for row in rows]
    for samples, expected in ((many, rows), (single, rows), (either[part], range(ROWS)[part])):
        assert [bits(sample) for sample in samples] == [EXPECTED[row] for row in expected]


def test_whole_numbers_of_any_type_and_rows_that_are_not_there(either):
    for index in (np.int64(3), np.uint8(3), torch.tensor(3), np.array(3)):
        assert bits(either[index]) == bits(either.__getitems__([index])[0]) == EXPECTED[3]
    for row in (ROWS, -ROWS - 1, 2**70):
        rule = f"row {row} of a cache of {ROWS} rows"
        refused(rule, either.__getitem__, row, error=IndexError)
        refused(rule, either.__getitems__, [0, row], error=IndexError)
    for row in ("a", 1.0, None):
        rule = "a row of a cache must be an int or a slice, not"
        refused(rule, either.__getitem__, row, error=TypeError)


def test_rows_are_copies(cached, tmp_path):
    build(tmp_path / "a.h5", [(torch.full((100,), row), np.full(100, row)) for row in range(9)])
    for tensor, array in CachedDataset(tmp_path / "a.h5").__getitems__(range(9)):
        assert tensor.untyped_storage().nbytes() == 800  # and hold no other row's memory
        assert array.base is None or array.base.nbytes == 800
    for sample, other in ((cached[2], cached[2]), cached.__getitems__([2, 2])):
        sample["boxes"].fill_(7)
        sample["either"] = None
        sample["image"].putpixel((0, 0), (1, 1, 1))
        sample["photo"].paste((0, 0, 0), (0, 0, 4, 3))
        sample["words"].append(1)
        assert bits(cached[2]) == bits(other) == EXPECTED[2]


def test_tails_and_transform(path, tmp_path):
    tails = [
        (("label",), lambda label: label * 10),
        (("nested", 0, "x"), str),
        (("label",), lambda label: -label),
    ]
    cached = CachedDataset(path, tails=tails)
    for sample in (cached[3], cached.__getitems__([3])[0], cached[3:4][0]):
        assert sample["label"] == -30
        assert sample["nested"][0] == Point("False", b"ab")
    cached = CachedDataset(path, tails=tails, transform=lambda sample: 1 // (sample["label"] + 10))
    assert cached[2:4] == [-1, -1]
    build(tmp_path / "a.h5", [1, 2])
    assert list(CachedDataset(tmp_path / "a.h5", tails=[((), str)])) == ["1", "2"]
    rule = r"no leaf at \('labels',\); they have \('image',\)"
    refused(rule, CachedDataset, path, tails=[(("labels",), str)])


def test_no_cache_at_all_and_one_that_is_closed(path, tmp_path):
    before = open_files()
    kept = [CachedDataset(path)[0] for _ in range(20)]
    assert open_files() <= before
    del kept
    (tmp_path / "b.parts").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.h5").touch()
    (tmp_path / "zeros.h5").write_bytes(bytes(10_000))
    Image.new("L", (9, 9)).save(tmp_path / "a.png")
    for name, rule in (
        ("a\0", "cannot be opened: embedded null byte"),
        ("b.h5", r"there is no cache at .*b\.h5 yet: .*b\.parts holds"),
        ("a.h5", r"there is no cache at .*a\.h5; build one with precompute"),
        ("pipe", "is no plain file; give the path of a file"),
        ("empty.h5", "no finished cache: it has no index; wait for"),
        ("zeros.h5", "no finished cache"),
        ("a.png", r"a\.png is no cache: it does not begin with"),
    ):
        refused(rule, CachedDataset, tmp_path / name)
    assert open_files() == before


def test_pickling(path, monkeypatch, tmp_path):
    monkeypatch.chdir(path.parent)
    cached = CachedDataset(path.name, tails=[(("label",), str)], transform=first_keys)
    monkeypatch.chdir("/")
    for again in (pickle.loads(pickle.dumps(cached)), copy.deepcopy(cached), copy.copy(cached)):
        assert again[1] == cached[1] == ["image", "1"]
        assert again.identity == cached.identity
    assert len(pickle.dumps(cached)) < 1000
    build(tmp_path / "a.h5", [1, 2])
    pickled = pickle.dumps(CachedDataset(tmp_path / "a.h5"))
    build(tmp_path / "a.h5", [1, 3])
    refused("is not the cache that was open: it was replaced", pickle.loads, pickled)


def first_keys(sample):
    return ["image", sample["label"]]


def pictures():
    """Images of one size, and what is random after them."""
    steps = [v2.Resize((20, 24)), v2.RandomCrop(16), v2.RandomHorizontalFlip()]
    floats = v2.ToImage(), v2.ToDtype(torch.float32, scale=True)
    return Opened(v2.Compose([*steps, *floats]), size=12, classes=("even", "odd"))


def test_rows_are_read_verified_and_made_batches(tmp_path):
    """Takes no lock and writes nothing: as on NFS without locks, and on read-only media."""
    joined = {"rows": 4, "single_file": False}
    for name, options in (("raw", {}), ("png", {"images": "png"}), ("joined", joined)):
        built(pictures(), tmp_path / f"{name}.h5", **options)
    numbers = Made(lambda index: torch.arange(4000 + 100 * index) // (index + 1), 30)
    built(numbers, tmp_path / "zstd.h5", compress="zstd")

    def note(event, args):
        of_files = ("fcntl.", "os.", "shutil.", "tempfile.")
        reads = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv")
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        is_open = event == "open" and args[2] & writes
        if is_open or (event.startswith(of_files) and event not in reads):
            print("forbidden:", event, args, file=sys.stderr, flush=True)
            os._exit(9)

    def read():
        sys.dont_write_bytecode = True
        sys.addaudithook(note)
        for path in tmp_path.glob("*.h5"):
            cached = pickle.loads(pickle.dumps(CachedDataset(path)))
            assert len(cached[:]) == len([cached[row] for row in range(len(cached))])
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(cached.__getitem__, range(4)))
            assert (cached.failed, verify(path)) == ([], [])
            if path.name != "zstd.h5":
                assert cached.classes == ["even", "odd"]
                backend = H5(path, build="never")
                assert len(list(DataLoader(pictures(), 3, seed=1, backend=backend))) == 4
        return True

    assert is_true_in_a_fork(read)
