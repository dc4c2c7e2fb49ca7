"""BlockShuffle: all rows once, within its window, the same everywhere; and how random that is."""

import copy
import hashlib
import pickle
import time
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, RandomSampler, Subset

from dataloaders import DataLoader
from dataloaders.cache import precompute
from dataloaders.errors import OptionError
from dataloaders.samplers import BlockShuffle
from helpers.datasets import MapDataset
from helpers.processes import run_script


class Rows:
    """A file that writes down what it is asked for ahead."""

    def __init__(self, rows, row_bytes=1.0):
        self.rows = rows
        self.row_bytes = row_bytes
        self.asked = []

    def __len__(self):
        return self.rows

    def will_read(self, first, last):
        assert 0 <= first < last <= self.rows
        self.asked.extend(range(first, last))


def order(rows, **options):
    return list(BlockShuffle(range(rows), **options))


# All rows, once


@given(
    st.integers(0, 400),
    st.integers(1, 90),
    st.integers(1, 500),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**40),
    st.integers(1, 60),
    st.booleans(),
)
def test_every_row_comes_once_and_ranks_share_as_torchs_do(
    rows, block, window, seed, epoch, of, drop_last
):
    shares, asked = [], []
    for rank in range(of):
        file = Rows(rows)
        options = {"rank": rank, "num_replicas": of, "drop_last": drop_last, "seed": seed}
        sampler = BlockShuffle(file, block=block, window=window, **options)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        asked.append(file.asked)
        on_torch = DistributedSampler(range(rows), **{**options, "rank": 0})
        assert len(shares[-1]) == len(sampler) == len(on_torch)
        assert (sampler.total_size, sampler.shuffle) == (on_torch.total_size, on_torch.shuffle)
        assert isinstance(sampler, DistributedSampler)  # so that frameworks leave it as it is
    assert all(type(row) is int for share in shares for row in share)
    times = Counter(row for share in shares for row in share)
    if rows >= of and (drop_last or rows % of == 0):
        assert set(times.values()) <= {1}
    if not drop_last:
        assert set(times) == set(range(rows))
        assert not rows or max(times.values()) - min(times.values()) <= 1
    # Each rank asks for its own rows only.
    assert [Counter(each) for each in asked] == [Counter(share) for share in shares]


@given(st.integers(1, 600), st.integers(1, 40), st.integers(1, 300), st.integers(0, 99))
def test_opened_blocks_wait_within_the_window(rows, block, window, seed):
    """Rows still to come, of blocks of which one came, are at most a window and a block."""
    left = Counter(row // block for row in range(rows))
    opened = {}
    for row in order(rows, block=block, window=window, seed=seed):
        number = row // block
        opened[number] = opened.get(number, left[number]) - 1
        assert sum(opened.values()) <= window + block


@pytest.fixture
def clock(monkeypatch):
    """The time that the consumer takes, in seconds; the sampler's own work takes none."""
    now = [1e6]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_rows_are_asked_for_once_and_ahead_and_no_further(clock):
    @settings(max_examples=25)
    @given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 200), st.integers(0, 99))
    def check(rows, block, window, seed):
        file = Rows(rows, row_bytes=1 << 20)
        sampler = BlockShuffle(file, block=block, window=window, seed=seed)
        for given_out, row in enumerate(sampler):
            assert row in file.asked
            # Half a window, 64 MiB, the block that this ends in, and what comes between two looks.
            half = rows if window >= rows else window / 2
            assert len(file.asked) - given_out <= half + 64 + block + 64 + 1
            clock[0] += 0.0001  # longer than memory takes for it: somebody reads these rows
        assert sorted(file.asked) == list(range(rows))

    check()


def test_rows_that_are_asked_for_before_the_first_one_is_given_out():
    for mib, block, window, rows in (
        # Half a window, 64 MiB that keep a disk busy, what is given out until the next look.
        (1, 1, 129, 65 + 64 + 64),
        (1 / 2, 1, 128, 64 + 128 + 64),
        (1, 30, 128, 210),  # blocks of 30 rows that begin within 192
        (16, 1024, 2, 1024),  # then the block that is next in the file, too
        (1, 1, 5000, 4096),  # a window beyond the end: all rows
    ):
        file = Rows(4096, mib * 2**20)
        next(iter(BlockShuffle(file, block=block, window=window, seed=0)))
        assert len(file.asked) == len(set(file.asked)) == rows


def test_a_list_of_the_epoch_reads_nothing(clock):
    """Wrappers that take all indices at once would otherwise have the whole file read."""
    file = Rows(20_000, row_bytes=1 << 20)
    rows = iter(BlockShuffle(file, seed=0))
    taken = [next(rows) for _ in range(10_000)]
    assert len(file.asked) == 256 + 64 + 2 * 64  # at its first row and 64 MiB later
    clock[0] += 2  # 32 GiB later it is no list
    assert len(taken + list(rows)) == len(file.asked) == len(file)


# The same everywhere

KNOWN = [
    [5, 6, 4, 9, 7, 8, 11, 10, 16, 19, 17, 0, 3, 18, 1, 15, 2, 13, 12, 14],
    [0, 7, 4, 11, 8, 9, 14, 12, 15, 16, 19, 3, 17, 13, 18, 2, 10, 6, 5, 1],
    [18, 17, 0, 16, 19, 2, 1, 3, 5, 4],
]


def test_the_order_is_the_same_on_every_machine():
    """Written down once: these must never change."""
    assert order(20, block=4, window=8, seed=0) == KNOWN[0]
    assert order(20, block=4, window=99, seed=2**40) == KNOWN[1]
    sampler = BlockShuffle(range(20), block=3, window=6, seed=-5, num_replicas=2, rank=1)
    sampler.set_epoch(7)
    assert list(sampler) == KNOWN[2]
    many = str(order(2000, block=7, window=300, seed=1)).encode()
    assert hashlib.sha256(many).hexdigest()[:16] == "1a32fac7ed69c1e9"


def test_seed_and_epoch_make_the_order_of_each_iterator():
    options = {"block": 7, "window": 60, "seed": 3}
    sampler = BlockShuffle(range(300), **options)
    first, second = zip(*zip(iter(sampler), iter(sampler), strict=True), strict=True)
    third = list(sampler)
    assert len({first, second, tuple(third)}) == 3
    again = BlockShuffle(range(300), **options)
    for epoch, expected in ((1, second), (1, second), (0, first)):
        again.set_epoch(epoch)
        assert list(again) == list(again) == list(expected), "an epoch that was given stays"
    assert order(300, **{**options, "seed": 4}) != list(first)
    list(sampler)
    for made in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        assert (made.block, made.window, made.epoch) == (7, 60, 4)
        assert list(made) == list(copy.copy(sampler))


def test_no_seed_draws_what_torchs_sampler_draws_and_a_seed_nothing():
    def epochs(sampler):
        torch.manual_seed(5)
        return [list(sampler), list(sampler)], torch.get_rng_state()

    orders, state = epochs(BlockShuffle(range(100), block=5, window=30))
    assert epochs(BlockShuffle(range(100), block=5, window=30))[0] == orders
    assert orders[0] != orders[1]
    assert torch.equal(state, epochs(RandomSampler(range(100)))[1])
    order(50, block=5, seed=1)
    ranks = {"block": 5, "num_replicas": 2, "rank": 0}  # which have to agree: seed 0
    assert order(50, **ranks) == order(50, seed=0, **ranks)
    assert torch.equal(torch.get_rng_state(), state)


# How random


def test_a_window_of_all_rows_is_a_full_shuffle():
    """Each of the 24 orders of 4 rows comes as often as any other, and so with single blocks."""
    for options in ({"block": 3, "window": 4}, {"block": 1, "window": 1}):
        sampler = BlockShuffle(range(4), seed=1, **options)
        times = Counter(tuple(sampler) for _ in range(2400))
        assert set(times) == set(permutations(range(4)))
        surprise = sum((count - 100) ** 2 / 100 for count in times.values())
        assert surprise < 49.7  # chi square, 23 degrees of freedom: 1 in 1,000


def test_sizes():
    sizes = ((256 * 256 * 3, 10, 2730), (512 << 20, 1, 1), (2 << 30, 1, 1))
    for row_bytes, block, window in (*sizes, (8, 4096, 262_144), (0, 4096, 262_144)):
        sampler = BlockShuffle(Rows(9, row_bytes))
        assert (sampler.block, sampler.window) == (block, window)
    sampler = BlockShuffle(Rows(9, 1000.0), block=3, window=5)
    assert (sampler.block, sampler.window) == (3, 5)
    assert BlockShuffle(Rows(9, 1000.0), window=200).block == 3
    assert BlockShuffle(range(9), block=3).window == 192
    assert BlockShuffle(range(9), block=200_000).window == 400_000


def test_options_that_cannot_be():
    for options, message in (
        ({}, "block=None.* needs a cache, and range is not one; give the number of rows"),
        ({"block": True}, r"BlockShuffle\(block=True\): must be an integer"),
        ({"block": 2, "window": 0}, r"BlockShuffle\(window=0\): must be an integer from 1"),
        ({"block": 2, "seed": 2**63}, "must be an integer from -9223372036854775808 to"),
        ({"block": 2, "num_replicas": 2, "rank": 2}, "ranks are counted from 0, so the last .* 1"),
    ):
        with pytest.raises(OptionError, match=message):
            BlockShuffle(range(9), **options)
    sampler = BlockShuffle(range(9), block=2, rank=1)
    with pytest.raises(OptionError, match=r"rank=1, num_replicas=1\): ranks are counted from 0"):
        iter(sampler)
    with pytest.raises(OptionError, match=r"BlockShuffle\(epoch=-1\)"):
        sampler.set_epoch(-1)


# In loaders


def test_caches_and_subsets_of_them_are_read_in_its_order_epoch_by_epoch(tmp_path):
    numbers = MapDataset(lambda row: {"image": np.full((4, 4), row, np.uint8), "label": row}, 90)
    cached, order = precompute(numbers, tmp_path / "numbers.h5"), {"block": 4, "window": 20}
    subset = Subset(cached, range(40, 90))
    with pytest.raises(OptionError, match="needs a cache, and Subset is not one"):
        BlockShuffle(subset)
    for dataset, first, workers in ((cached, 0, 1), (subset, 40, 0)):
        sampler = BlockShuffle(dataset, seed=1, **order)
        loader = DataLoader(dataset, 8, sampler=sampler, num_workers=workers)
        expected = BlockShuffle(range(90 - first), seed=1, **order)
        for _ in range(2):
            found = torch.cat([batch["label"] for batch in loader])
            assert (found - first).tolist() == list(expected)


def test_the_ranks_of_a_process_group(tmp_path):
    source = """
        import os, torch.distributed as dist
        from dataloaders.samplers import BlockShuffle

        rank = 0 if os.fork() else 1
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        sampler = BlockShuffle(range(31), block=3, window=9)
        assert (len(sampler), sampler.rank, sampler.num_replicas) == (31, 0, 1)
        store = dist.FileStore("store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        assert (len(sampler), sampler.rank, sampler.num_replicas) == (16, rank, 2)
        shares = [None, None]
        dist.all_gather_object(shares, list(sampler))
        assert [len(share) for share in shares] == [16, 16]
        assert {*shares[0], *shares[1]} == set(range(31))
        alone = BlockShuffle(range(31), block=3, seed=4, num_replicas=1)
        assert (len(list(alone)), alone.rank) == (31, 0)
        dist.destroy_process_group()
        if rank == 0:
            assert os.wait()[1] == 0
            print("shared")
        """
    assert run_script(tmp_path, source).stdout == "shared\n"
