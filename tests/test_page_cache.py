"""What the kernel keeps of a file: asked for ahead, looked at, dropped."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.h5.batches import batches_of
from dataloaders.cache import join, precompute
from dataloaders.cache.reader import CachedDataset
from dataloaders.cache.shards import shard_path, shard_text
from dataloaders.machine.page_cache import (
    DiskWatch,
    evict,
    expect_exactly,
    resident_pages,
    tells_truth,
    will_read,
)
from helpers.cached import build

PAGE = mmap.PAGESIZE
PAGES = 64
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux's page cache")


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


def wait_for(reached):
    """Returns once it is so; the test's time limit ends the wait."""
    while not reached():
        time.sleep(0.002)


def test_reading_brings_pages_and_evicting_drops_them(path):
    assert not resident_pages(path).any()
    content = path.read_bytes()
    assert resident_pages(path).all()
    assert len(resident_pages(path)) == PAGES
    evict(path, [(16 * PAGE, 24 * PAGE), (24 * PAGE, 32 * PAGE)])
    found = resident_pages(path)
    assert not found[16:32].any()
    assert found[:16].all()
    assert found[32:].all()
    evict(path, [])
    assert (resident_pages(path) == found).all()
    first, second = mapped(path), mapped(path)[3 * PAGE :]
    assert int(first.sum(dtype=np.int64)) >= int(second.sum(dtype=np.int64))
    evict(path)  # also what is mapped here, which stays valid
    assert not resident_pages(path).any()
    assert first.tobytes() == content
    assert second.tobytes() == content[3 * PAGE :]


def test_what_was_written_to_a_private_map_is_kept(path):
    with open(path, "rb") as file:
        private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    private[:3] = b"abc"
    evict(path)
    assert private[:3] == b"abc"


def test_what_another_process_has_mapped_stays_and_is_seen(path):
    source = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "memory[:]\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", source, str(path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "mapped\n"
    evict(path)
    assert resident_pages(path).any()
    other.communicate("")
    evict(path)
    assert not resident_pages(path).any()


def test_what_will_be_read_comes(path):
    data = mapped(path)
    will_read(data[5:5])
    will_read(data[PAGES * PAGE :])
    assert not resident_pages(path).any(), "nothing is asked for nothing"
    will_read(data[PAGE + 1 : 9 * PAGE - 1])  # whole pages come, also where it begins inside
    wait_for(lambda: bool(resident_pages(path)[1:9].all()))
    will_read(data)
    wait_for(lambda: bool(resident_pages(path).all()))


@pytest.mark.parametrize("missing", [(0, 1), (100, 164), (511, 512), (0, 512)])
def test_a_look_first_does_not_miss_what_is_missing(tmp_path, missing):
    large = tmp_path / "large"
    large.write_bytes(os.urandom(512 * PAGE))
    on_disk(large)
    assert tells_truth(large)
    large.read_bytes()
    data = mapped(large)
    will_read(data, look=True)  # all there
    evict(large, [(missing[0] * PAGE, missing[1] * PAGE)])
    if resident_pages(large)[slice(*missing)].all():
        pytest.skip("the kernel keeps single pages of what it read as one")
    will_read(data, look=True)
    wait_for(lambda: bool(resident_pages(large).all()))


def test_a_missing_page_is_read_alone_if_so_expected(path):
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    expect_exactly(memory, True)
    for page in (7, 30):
        memory[page * PAGE]
    found = np.flatnonzero(resident_pages(path)).tolist()
    assert {7, 30} <= set(found)
    assert len(found) <= 16  # 2, where pages are read in no larger units
    expect_exactly(memory, False)
    evict(path)
    memory[30 * PAGE]
    wait_for(lambda: resident_pages(path).sum() > 1)


def test_whose_pages_are_told(path):
    path.chmod(0o400)
    assert tells_truth(path), "it is one's own"
    other = Path("/proc/version")
    assert tells_truth(other) == (os.geteuid() == 0)


def test_reads_from_disk_are_known_for_a_while(path):
    watch = DiskWatch()
    assert watch.reads(), "nothing is known yet"
    wait_for(lambda: not watch.reads())
    data = mapped(path)
    data[::PAGE].sum()  # from disk
    assert [watch.reads() for _ in range(10)] == [True] * 10
    wait_for(lambda: not watch.reads())
    data[::PAGE].sum()  # from memory
    assert not watch.reads()
    evict(path)
    will_read(data)  # no fault, and yet a disk
    wait_for(lambda: bool(resident_pages(path).all()))
    assert watch.reads()


def test_a_file_that_is_empty_or_not_there(tmp_path):
    (tmp_path / "empty").touch()
    assert resident_pages(tmp_path / "empty").shape == (0,)
    evict(tmp_path / "empty")
    for call in (resident_pages, evict):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "none")


def pages_of(cached, column, first, last):
    """The pages of the file with these rows of a column, by its own index."""
    entry = next(each for each in cached.columns if each.name == column)
    width = np.dtype(entry.dtype).itemsize
    if entry.shape is not None:
        places = [row * int(np.prod(entry.shape)) for row in (first, last)]
    else:
        assert entry.offsets is not None
        count = (last + 1) * 8
        table = np.fromfile(cached.path, "<u8", count // 8, offset=entry.offsets.offset)
        places = [int(table[row]) for row in (first, last)]
    begin, end = (entry.values.offset + place * width for place in places)
    return slice(begin // PAGE, -(-end // PAGE))


def test_rows_of_a_cache_come_and_those_that_are_not_there_are_left_out(tmp_path):
    random = np.random.default_rng(0)
    samples = [
        {
            "fixed": random.integers(0, 256, 2 * PAGE, np.uint8),
            "varied": random.integers(0, 256, (1 + row % 3, PAGE), np.uint8),
            "label": row,
        }
        for row in range(40)
    ]
    build(tmp_path / "a.h5", samples)
    cached = CachedDataset(tmp_path / "a.h5")
    places = [pages_of(cached, column, 3, 11) for column in ("fixed", "varied")]
    assert all(place.stop - place.start >= 8 for place in places)
    on_disk(cached.path)
    for first, last in ((40, 41), (5, 5), (6, 2), (-3, 0)):
        cached.will_read(first, last)
    assert not any(resident_pages(cached.path)[place].all() for place in places)
    cached.will_read(3, 11)
    wait_for(lambda: all(resident_pages(cached.path)[place].all() for place in places))
    assert cached[3]["label"] == 3
    cached.will_read(-3, 99)
    everything = [pages_of(cached, column, 0, 40) for column in ("fixed", "varied")]
    wait_for(lambda: all(resident_pages(cached.path)[place].all() for place in everything))


@pytest.mark.parametrize("batches", [False, True])
def test_rows_are_asked_for_together_while_a_disk_is_read(tmp_path, batches):
    samples = [torch.full((16 * PAGE,), row, dtype=torch.uint8) for row in range(16)]
    build(tmp_path / "a.h5", samples)
    cached = CachedDataset(tmp_path / "a.h5")
    rows = [9, 2, 14]
    places = [pages_of(cached, "sample", row, row + 1) for row in rows]
    made = batches_of(cached)
    assert not isinstance(made, str)

    def read(these):
        if batches:
            batch = made.of(these, np.random.default_rng(0))
            return batch[:, 0].tolist()
        return [int(sample[0]) for sample in cached.__getitems__(these)]

    def asked():
        found = resident_pages(cached.path)
        return all(bool(found[place].all()) for place in places)

    on_disk(cached.path)
    assert read(rows) == rows  # waits, at least at the first page
    evict(cached.path)
    cached.about_to_read(rows)
    wait_for(asked)
    wait_for(lambda: not cached._disk.reads())
    assert read(rows) == rows
    evict(cached.path)
    cached.about_to_read(rows)
    assert not resident_pages(cached.path).any(), "reads from memory ask for nothing"


def test_rows_of_shards_come(tmp_path):
    samples = [np.full(8 * PAGE, row, np.uint8) for row in range(12)]
    for rank in range(3):
        build(
            shard_path(tmp_path / "a.h5", rank, 3),
            samples[4 * rank : 4 * rank + 4],
            fingerprint={"length": 12, "shard": shard_text(rank, 3)},
        )
    join(tmp_path / "a.h5")
    cached = CachedDataset(tmp_path / "a.h5")
    shards = [CachedDataset(path) for path in cached.shards]
    wanted = [(0, 3, 4), (1, 0, 4), (2, 0, 2)]
    for shard in shards:
        on_disk(shard.path)
    cached.will_read(3, 10)
    cached.will_read(-5, 0)
    wait_for(
        lambda: all(
            resident_pages(shards[n].path)[pages_of(shards[n], "sample", low, high)].all()
            for n, low, high in wanted
        )
    )
    assert not resident_pages(shards[0].path)[pages_of(shards[0], "sample", 0, 2)].all()
    assert [int(each[0]) for each in cached.__getitems__([11, 3, 4])] == [11, 3, 4]
    assert 12 * 8 * PAGE < cached.row_bytes * 12 < 12 * 9 * PAGE
    cached.shards[1].rename(tmp_path / "away")
    CachedDataset.will_read(cached, 0, 12)  # what is mapped stays mapped


def test_a_row_takes_what_the_columns_take(tmp_path):
    build(tmp_path / "a.h5", [{"a": np.zeros(10, "<f4"), "b": bytes(row)} for row in range(4)])
    # 40 bytes; 0 + 1 + 2 + 3 bytes, and 5 offsets of 8.
    assert CachedDataset(tmp_path / "a.h5").row_bytes == 40 + (6 + 40) / 4
    build(tmp_path / "none.h5", [])
    empty = CachedDataset(tmp_path / "none.h5")
    assert empty.row_bytes == 0
    empty.will_read(0, 5)


def test_rows_of_a_compressed_cache_come(tmp_path):
    pytest.importorskip("zstandard")
    random = np.random.default_rng(0)
    samples = [random.integers(0, 200, (1 + row % 3, PAGE), np.uint8) for row in range(40)]
    precompute(samples, tmp_path / "a.h5", num_workers=0, compress="zstd")
    cached = CachedDataset(tmp_path / "a.h5")
    assert cached.row_bytes > PAGE / 2
    on_disk(cached.path)
    cached.will_read(0, 40)
    wait_for(lambda: bool(resident_pages(cached.path).mean() > 0.9))
    assert (cached[7] == samples[7]).all()
