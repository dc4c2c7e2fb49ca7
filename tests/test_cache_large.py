"""Caches beyond what fits 32 bits: samples over 100 MB, more than 2 GiB of rows, a million rows."""

import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
import torch

from dataloaders.cache import CachedDataset, precompute, verify
from helpers.numbered import Made

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]  # gigabytes, whatever the disk

ROWS = 21
MEGABYTES = 105  # of a sample
MARKS = (0, 12_345_678, -1)


@pytest.fixture
def path(tmp_path):
    """Of a cache: in memory where there is room, and gigabytes do not stay behind."""
    shared = Path("/dev/shm")
    room = shared.is_dir() and shutil.disk_usage(shared).free > 8 << 30
    enough = psutil.virtual_memory().available > 12 << 30
    with tempfile.TemporaryDirectory(dir=shared if room and enough else tmp_path) as folder:
        yield Path(folder) / "large.h5"


def volumes(one_shape):
    """Scans of 105 MB, all of one shape or each longer than the one before."""

    def sample(index):
        frames = MEGABYTES + (0 if one_shape else index)
        volume = torch.zeros(frames, 1000, 1000, dtype=torch.uint8)
        volume.view(-1)[list(MARKS)] = torch.tensor([1, 100, 200], dtype=torch.uint8) + index
        return volume, index

    return Made(sample, ROWS)


@pytest.mark.parametrize("one_shape", [True, False])
def test_samples_of_100_megabytes_that_are_more_than_2_gib(path, one_shape):
    dataset = volumes(one_shape)
    cached = precompute(dataset, path, num_workers=2)
    assert path.stat().st_size > 1 << 31
    for index in (0, ROWS // 2, ROWS - 1):  # the last lies behind 2 GiB
        volume, number = cached[index]
        expected = dataset[index][0]
        assert number == index
        assert volume.shape == expected.shape
        assert torch.equal(volume, expected)
    assert verify(path) == []
    with h5py.File(path) as file:
        last = file["columns/0" if one_shape else "columns/0/values"]
        row = 10**6 * MEGABYTES if one_shape else 1
        assert last.shape[0] * row > 1 << 31


def test_a_million_rows(path):
    million = Made(lambda index: (index, "x" * (index % 3)), 1_000_000)
    cached = precompute(million, path, num_workers=2)
    assert len(cached) == 1_000_000
    assert np.array_equal(cached.column("0"), np.arange(1_000_000))
    rows = np.random.default_rng(0).integers(0, 1_000_000, 1000).tolist()
    assert cached.__getitems__(rows) == [(row, "x" * (row % 3)) for row in rows]
    assert verify(path) == []
    assert CachedDataset(path)[-1] == (999_999, "")
