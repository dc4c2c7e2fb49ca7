"""Pages of files in the kernel's cache: requested ahead, counted, dropped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from dataloaders.cache import CachedDataset, precompute
from dataloaders.machine.page_cache import evict, resident_pages, tells_truth
from helpers.datasets import Made
from helpers.processes import becomes_true

PAGE = mmap.PAGESIZE
PAGES = 64


def on_disk(path):
    """The file, all of it on disk; the test is skipped where a file cannot leave memory."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    evict(path)
    if resident_pages(path).any():
        pytest.skip("files stay in memory here (tmpfs), and cannot be evicted")
    return path


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "file"
    found.write_bytes(os.urandom(PAGES * PAGE - 5))
    return on_disk(found)


def mapped(path):
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def test_reading_brings_pages_and_evicting_drops_them(path):
    with open(path, "rb") as file:
        private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    assert not resident_pages(path).any()
    content = path.read_bytes()
    assert resident_pages(path).tolist() == [True] * PAGES
    first, second = mapped(path), mapped(path)[3 * PAGE :]
    assert (first.tobytes(), second.tobytes()) == (content, content[3 * PAGE :])
    private[:3] = b"abc"
    evict(path)  # also what is mapped here, which stays valid
    assert private[:3] == b"abc"
    assert not resident_pages(path).any()
    assert (first.tobytes(), second.tobytes()) == (content, content[3 * PAGE :])


def test_the_kernel_reports_pages_of_own_files(path):
    path.chmod(0o400)
    assert tells_truth(path), "it is one's own"
    assert tells_truth(Path("/proc/version")) == (os.geteuid() == 0)


# Rows of a cache


def share(path):
    return resident_pages(path).mean()


def test_will_read_brings_the_rows_of_parts(tmp_path):
    samples = Made(lambda row: np.full(64 * PAGE, row, np.uint8), 20, failing=range(4, 8))
    options = {"num_workers": 0, "rows": 4, "single_file": False, "on_error": "skip"}
    cached = precompute(samples, tmp_path / "a.h5", **options)
    assert 64 * PAGE < cached.row_bytes < 80 * PAGE
    parts = list(cached.shards)
    assert len(CachedDataset(parts.pop(1))) == 0  # all of its samples failed
    for part in parts:
        on_disk(part)
    CachedDataset(tmp_path / "a.h5").will_read(3, 9)
    assert becomes_true(lambda: all(share(part) > 0.2 for part in parts[:3]))
    assert becomes_true(lambda: share(parts[1]) > 0.9)
    assert max(share(parts[0]), share(parts[2])) < 0.5
    assert share(parts[3]) < 0.2


@pytest.mark.parametrize("single_file", [True, False])
def test_rows_are_requested_ahead_while_a_disk_is_read(tmp_path, single_file):
    samples = Made(lambda row: np.full(16 * PAGE, row, np.uint8), 16)
    options = {"num_workers": 0, "rows": 4, "single_file": single_file}
    cached = precompute(samples, tmp_path / "a.h5", **options)
    files = cached.shards or (cached.path,)
    begin = CachedDataset(files[0]).columns[0].values.offset // PAGE

    def resident():  # how many pages of each row; whoever opens a file may read its first ones
        rows = [resident_pages(file)[begin:][: 256 // len(files)] for file in files]
        counts = np.concatenate(rows).reshape(16, 16).sum(1).tolist()
        return {row: count for row, count in enumerate(counts) if count and row % 4}

    for file in files:
        on_disk(file)
    found = cached.located([9, 2, 14])  # nothing was read through it, so that a disk is expected
    assert becomes_true(lambda: resident() == {2: 16, 9: 16, 14: 16})
    _, (column,), own = found[0]
    assert column.values[own + 1, 0] == 3
    assert resident()[3] == 1, "a page that is missing is read alone"
    watch = cached._files._disk
    assert becomes_true(lambda: not watch.reads())
    for file in files:
        evict(file)
    cached.located([9, 2, 14])
    assert not resident(), "reads from memory ask for nothing"
