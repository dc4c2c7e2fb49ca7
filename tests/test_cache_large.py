"""Caches beyond what fits 32 bits: samples over 100 MB, more than 2 GiB of rows, a million rows."""

import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
import torch

from dataloaders.cache import precompute, verify
from helpers.datasets import Made

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]  # gigabytes, whatever the disk


@pytest.fixture
def path(tmp_path):
    """Of a cache: in memory where there is room, and gigabytes do not stay behind."""
    shared = Path("/dev/shm")
    room = shared.is_dir() and shutil.disk_usage(shared).free > 8 << 30
    enough = psutil.virtual_memory().available > 12 << 30
    with tempfile.TemporaryDirectory(dir=shared if room and enough else tmp_path) as folder:
        yield Path(folder) / "large.h5"


@pytest.mark.parametrize("one_shape", [True, False])
def test_samples_of_100_megabytes_that_are_more_than_2_gib(path, one_shape):
    def scan(index):  # all of one shape, or each longer than the one before
        volume = torch.zeros(105 + (0 if one_shape else index), 1000, 1000, dtype=torch.uint8)
        volume.view(-1)[[0, 12_345_678, -1]] = (
            torch.tensor([1, 100, 200], dtype=torch.uint8) + index
        )
        return volume, index

    cached = precompute(Made(scan, 21), path, num_workers=2, single_file=True)
    assert path.stat().st_size > 1 << 31
    for index in (0, 10, 20):  # the last lies behind 2 GiB
        volume, number = cached[index]
        assert number == index
        assert torch.equal(volume, scan(index)[0])
    assert verify(path) == []
    with h5py.File(path) as file:
        assert file["columns/0" if one_shape else "columns/0/values"].size > 1 << 31


def test_a_million_rows(path):
    million = Made(lambda index: (index, "x" * (index % 3)), 1_000_000)
    cached = precompute(million, path, num_workers=2)
    assert np.array_equal(cached.column("0"), np.arange(1_000_000))
    rows = [*np.random.default_rng(0).integers(0, 1_000_000, 1000).tolist(), -1]
    assert cached.__getitems__(rows) == [(row % 10**6, "x" * (row % 10**6 % 3)) for row in rows]
    assert verify(path) == []
