"""seed=: the same samples for any workers, batches and restart, and no global state touched."""

import copy
import pathlib
import pickle
import random
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.distributed import DistributedSampler

from dataloaders import DataLoader
from dataloaders.errors import OptionError
from dataloaders.seeding import words
from helpers.compare import assert_same, generator_states
from helpers.datasets import MapDataset


def drawn(number=0):
    """The number, and one draw from each of the three global generators."""
    draws = torch.rand((), dtype=torch.float64).item(), np.random.rand(), random.random()
    return torch.tensor([number, *draws], dtype=torch.float64)


class Augmented(MapDataset):
    """Each sample: its key's number, and what is drawn for it."""

    size = 12

    def __getitem__(self, key):
        return drawn(key if isinstance(key, int) else 0)


class Bulk(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Failing(Augmented):
    def __getitem__(self, key):
        if key == 5:
            random.random()
            raise KeyError("five")
        return super().__getitem__(key)


class Stream(IterableDataset):
    """What is drawn by iter(), and by each sample."""

    def __iter__(self):
        return self.rows(drawn())

    def rows(self, begun):
        for _ in range(8):
            yield torch.cat([begun, drawn()])


def mixing(samples):
    return torch.stack(samples), drawn()


def rows(loader):
    """All samples of an epoch in their order, batches joined."""
    return torch.cat([batch.reshape(-1, batch.shape[-1]) for batch in loader])


def by_index(loader):
    return sorted(rows(loader).tolist())


REFERENCE = {"batch_size": 4, "shuffle": True, "seed": 7}
KEPT = {"persistent_workers": True}

# What a seed means: a run that is gone on with after an update has the same order and samples. The
# numbers are the words for (seed, epoch, key, occurrence, draw).
ORDER, WORKERS = 0x3DA375AA, 0x19E42FFA  # of seed 7, epoch 2
SAMPLE_5 = (0xFB4D8487, 0x02289B4B, 0xF62A9C32, 0xDCD1D8B5)
SAMPLE_5_AGAIN = (0x07B4D961, 0x93AFB398, 0x29E28865, 0x3F65621E)
COLLATION_5 = (0xA79EF94B, 0x1DCB311D, 0x259BA111, 0x9C8B0922)
ITER, ROW_0 = (  # of an iterable dataset's first worker: before its first sample, and at it
    (0xE8CECA1D, 0x918E2781, 0x765B8360, 0x188DDE8E),
    (0x36939763, 0x47795102, 0xA3CC09BC, 0x6544C5EB),
)
ROW_0_OF_RANK_1 = (0x19A0C363, 0xB77B1122, 0xF359F176, 0x39C6C5FE)
ROW_0_OF_LARGE = (0x7B35FB32, 0xA0002405, 0x728B6BFD, 0x3FB8F03D)  # of seed 2**64 - 7


def drawn_after(words, number=0):
    torch.manual_seed(words[0])
    np.random.seed(words[1])
    random.seed(words[2] | words[3] << 32)
    return drawn(number)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_words_of_a_sample_its_repeat_its_collation_and_a_stream(workers):
    options = {"num_workers": workers, "collate_fn": mixing, "seed": 7}
    loader = DataLoader(Augmented(), 2, sampler=[5, 5], **options)
    loader.set_epoch(2)
    ((samples, of_batch),) = loader
    assert torch.equal(samples[0], drawn_after(SAMPLE_5, 5))
    assert torch.equal(samples[1], drawn_after(SAMPLE_5_AGAIN, 5))
    assert torch.equal(of_batch, drawn_after(COLLATION_5))
    for seed, start, row in ((7, ITER, ROW_0), (2**64 - 7, None, ROW_0_OF_LARGE)):
        loader = DataLoader(Stream(), None, num_workers=workers, seed=seed)
        loader.set_epoch(2)
        first, *_ = loader
        assert start is None or torch.equal(first[:4], drawn_after(start))
        assert torch.equal(first[4:], drawn_after(row))


def test_the_order_and_the_workers_base_seed():
    order, workers = (torch.Generator().manual_seed(seed) for seed in (ORDER, WORKERS))
    seen = torch.zeros((), dtype=torch.int64).share_memory_()
    options = {"num_workers": 1, "worker_init_fn": lambda _: seen.fill_(get_worker_info().seed)}
    loader = DataLoader(Augmented(size=20), 20, shuffle=True, seed=7, **options)
    loader.set_epoch(2)
    assert rows(loader)[:, 0].tolist() == list(RandomSampler(range(20), generator=order))
    assert seen == torch.empty((), dtype=torch.int64).random_(generator=workers)


# Samples


@pytest.mark.parametrize("change", [{"num_workers": 2, **KEPT}, {"batch_size": None}], ids=str)
def test_samples_depend_on_seed_epoch_and_index_alone(change):
    """Neither on workers nor on batches, nor where training resumed."""
    reference = DataLoader(Augmented(), **REFERENCE)
    expected = [rows(reference) for _ in range(3)]
    values = torch.cat([epoch[:, 1:].flatten() for epoch in expected])
    assert values.unique().numel() == values.numel() == 3 * 12 * 3
    loader, again = (DataLoader(Augmented(), **{**REFERENCE, **change}) for _ in range(2))
    assert_same([rows(loader) for _ in range(3)], expected)
    for epoch in (2, 1):
        again.set_epoch(epoch)
        assert torch.equal(rows(again), expected[epoch])


@settings(max_examples=30)
@given(
    keys=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    size=st.integers(1, 5),
    seed=st.integers(-(2**63), 2**64 - 1),
    epoch=st.integers(0, 2**40),
)
def test_any_order_of_keys_gives_the_same_samples(keys, size, seed, epoch):
    def epoch_of(kind, order):
        loader = DataLoader(kind(), size, sampler=order, seed=seed)
        loader.set_epoch(epoch)
        return by_index(loader)

    found = epoch_of(Augmented, keys)
    assert len({first for _, first, *_ in found}) == len(keys)  # repeats differ too
    assert found == epoch_of(Bulk, sorted(keys))


def test_a_random_sampler_that_goes_round_counts_its_rounds():
    for size, replacement in ((1, False), (12, False), (12, True)):
        sampler = RandomSampler(Augmented(size=size), replacement, num_samples=30)
        found = rows(DataLoader(Augmented(size=size), None, sampler=sampler, seed=2))
        keys = [int(key) for key in found[:, 0]]
        assert torch.equal(found, rows(DataLoader(Augmented(size=size), 7, sampler=keys, seed=2)))
        assert found[:, 1].unique().numel() == 30


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 5), st.booleans(), st.booleans())
def test_ranks_together_give_what_one_gives(size, ranks, shuffle, drop):
    parts = []
    for rank in range(ranks):
        sampler = DistributedSampler(Augmented(size=size), ranks, rank, shuffle, drop_last=drop)
        if len(sampler):
            parts.append(rows(DataLoader(Augmented(size=size), 2, sampler=sampler, seed=8)))
    if not parts:
        return
    joined = torch.stack(parts, dim=1).flatten(0, 1)
    # The same order from one process, whose own counting gives the occurrences.
    order = [int(index) for index in joined[:, 0]]
    assert torch.equal(joined, rows(DataLoader(Augmented(size=size), 3, sampler=order, seed=8)))


def test_keys_that_are_not_integers():
    for keys in (["a", "b", "a"], [("a", 1), ("b", None)], [[0, 1], [2, 3]]):
        options = {"batch_size": None, "seed": 1}
        loader = DataLoader(Augmented(), sampler=keys, num_workers=1, **options)
        other = DataLoader(Augmented(), sampler=keys[::-1], **options)
        assert by_index(loader) == by_index(other)
        assert rows(other)[:, 1].unique().numel() == len(keys)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_seeded_is_refused(workers):
    for key in (object(), (1, object()), lambda: None):
        with pytest.raises(TypeError, match=r"shows only its address.*give its class a __repr__"):
            next(iter(DataLoader(Augmented(), sampler=[key], seed=1)))
    collating = Augmented(size=4, __getitems__=lambda indices: {"batch": indices})
    iterator = iter(DataLoader(collating, 4, collate_fn=dict, seed=1, num_workers=workers))
    with pytest.raises(OptionError, match=r"__getitems__\(\[0\]\) must return a list of one"):
        next(iterator)
    assert list(iterator) == []  # torch ends its workers at once only at the end of an epoch


def test_random_collation_is_seeded_by_the_first_sample():
    options = {"collate_fn": mixing, "seed": 3}
    expected = [mixed for _, mixed in DataLoader(Augmented(), 4, **options)]
    assert torch.stack(expected)[:, 1].unique().numel() == 3
    ((_, moved),) = DataLoader(Augmented(), 4, sampler=[4, 0, 1], **options)
    assert torch.equal(moved, expected[1])
    loader = DataLoader(Augmented(), batch_sampler=[[1, 2], [], [0]], collate_fn=list, seed=1)
    assert [len(batch) for batch in loader] == [2, 0, 1]


def test_iterable_datasets_are_seeded_by_position(monkeypatch):
    loader = DataLoader(Stream(), 3, seed=6)
    first, second = rows(loader), rows(loader)
    assert first[:, 5].unique().numel() == 8
    assert not torch.equal(first, second)
    one = DataLoader(Stream(), 3, seed=6, num_workers=1, **KEPT)
    assert_same([rows(one), rows(one)], [first, second])
    one.set_epoch(0)
    assert torch.equal(rows(one), first)
    two = rows(DataLoader(Stream(), 8, seed=6, num_workers=2))
    assert torch.equal(two[:8], first)
    assert two[:, 5].unique().numel() == 16
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for name, value in (("rank", 1), ("world_size", 2)):
        monkeypatch.setattr(torch.distributed, f"get_{name}", lambda value=value: value)
    other = DataLoader(Stream(), None, seed=7)
    other.set_epoch(2)
    assert torch.equal(next(iter(other))[4:], drawn_after(ROW_0_OF_RANK_1))


# States of generators


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [
        *((Augmented(), 0), (Augmented(), 1), (Bulk(), 0), (Stream(), 0)),
        *((Failing(), 0), (TensorDataset(torch.rand(12, 2)), 0)),
    ],
)
def test_the_consumers_generators_are_untouched(dataset, workers):
    np.random.randn()  # half of a pair of normals waits in NumPy's state
    before = generator_states(), np.random.get_state()[1:]
    fails = isinstance(dataset, Failing)
    shuffle = None if fails or isinstance(dataset, IterableDataset) else True
    collate = None if isinstance(dataset, TensorDataset) else mixing
    loader = DataLoader(dataset, 2, shuffle, num_workers=workers, seed=4, collate_fn=collate)
    for _ in range(2):
        with pytest.raises(KeyError, match="five") if fails else nullcontext():
            for _ in loader:
                assert_same((generator_states(), np.random.get_state()[1:]), before)
    assert_same((generator_states(), np.random.get_state()[1:]), before)


# Orders


@pytest.mark.parametrize(
    "arguments",
    [
        lambda generator: {"shuffle": True, "generator": generator},
        lambda generator: {"sampler": RandomSampler(range(12), generator=generator)},
        lambda generator: {"sampler": SubsetRandomSampler(range(12), generator)},
        lambda generator: {"sampler": WeightedRandomSampler([1.0] * 12, 20, True, generator)},
        lambda generator: {
            "batch_sampler": BatchSampler(SubsetRandomSampler(range(12), generator), 5, False)
        },
    ],
)
def test_torchs_samplers_follow_the_seed_unless_they_have_a_generator(arguments):
    def order(generator=None, kind=DataLoader, **options):
        loader = kind(Augmented(), **arguments(generator), **options)
        return [rows(loader)[:, 0].tolist() for _ in range(2)]

    before = generator_states()
    first, second = order(seed=5)
    assert order(seed=5) == [first, second] != order(seed=6)
    assert first != second
    mine, another = (torch.Generator().manual_seed(9) for _ in range(2))
    given = order(mine, seed=5)
    assert_same(generator_states(), before)
    assert given == order(another, torch.utils.data.DataLoader)
    assert torch.equal(mine.get_state(), another.get_state())


def test_a_samplers_epoch_counts_once_it_moved():
    def loader():
        sampler = DistributedSampler(Augmented(), 1, 0, shuffle=False)
        return DataLoader(Augmented(), sampler=sampler, seed=3)

    counted, moved = loader(), loader()
    epochs = [rows(counted) for _ in range(3)]
    for epoch in (2, 1, 0):
        moved.sampler.set_epoch(epoch)
        assert torch.equal(rows(moved), epochs[epoch])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_pipes_shuffle_follows_the_seed(workers):
    def epochs(seed):
        pipe = IterableWrapper(list(range(20))).shuffle()
        loader = DataLoader(pipe, 5, shuffle=True, num_workers=workers, seed=seed)
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    before = torch.get_rng_state()
    first, second = epochs(1)
    assert epochs(1) == [first, second] != epochs(2)
    assert first != second
    assert torch.equal(torch.get_rng_state(), before)


class Inspected(Stream):
    def __iter__(self):
        yield torch.tensor([get_worker_info().dataset is self, self.marked])


def test_workers_see_the_users_own_dataset():
    """As torch's documentation shards streams; of others: the contract."""
    mark = {"worker_init_fn": lambda worker: setattr(get_worker_info().dataset, "marked", True)}
    assert rows(DataLoader(Inspected(), seed=1, num_workers=1, **mark)).tolist() == [[True, True]]


def test_copies_and_pickles_continue_alike_and_two_iterators_do_not_disturb_each_other():
    loader, other = DataLoader(Augmented(), **REFERENCE), DataLoader(Augmented(), **REFERENCE)
    epochs = [list(other) for _ in range(3)]
    pairs = list(zip(iter(loader), iter(loader), strict=True))
    assert_same([list(batches) for batches in zip(*pairs, strict=True)], epochs[:2])
    for made in (copy.copy(loader), pickle.loads(pickle.dumps(loader)), loader):
        assert_same(list(made), epochs[2])
        assert len(iter(made)) == 3


def test_settings_of_the_samplers_that_change_between_epochs_are_followed():
    sampler = WeightedRandomSampler([1.0] * 12, 6)
    loader = DataLoader(Augmented(), sampler=sampler, seed=1, num_workers=1, **KEPT)
    assert rows(loader)[:, 0].unique().numel() > 1
    sampler.weights = torch.eye(12, dtype=torch.float64)[3]
    loader.batch_sampler.batch_size = 6
    assert [batch[:, 0].tolist() for batch in loader] == [[3] * 6]


@pytest.mark.gpu
def test_cuda_generators_are_left_alone():
    before = torch.cuda.get_rng_state()
    for _ in DataLoader(Augmented(), **REFERENCE):
        pass
    assert torch.equal(torch.cuda.get_rng_state(), before)


# Which keys of samplers are the same


def test_integers_are_their_own_key_and_a_tensor_counts_by_its_content():
    for value in (0, -1, 5, 2**63 - 1, -(2**63)):
        assert words.stable_key(value) == value
    assert [words.stable_key(key) for key in (np.int32(-4), torch.tensor(7), True)] == [-4, 7, 1]
    assert -(2**63) <= words.stable_key(2**63) < 2**63
    keys = [[1, 2], [1, 3], [[1], [2]]]
    assert len({words.stable_key(torch.tensor(key)) for key in keys + keys}) == 3


def test_keys_are_the_same_in_another_process():
    """One that hashes otherwise; words.py is loaded alone, since torch takes seconds."""
    source = f"""
import numpy, pathlib, runpy
keys = ["look at 0x12.jpg", ("a", 1, None, 2.5, b"x"), frozenset({{"a", "b", "c"}}),
        {{"b": 1, "a": 2}}, pathlib.PurePosixPath("a/b"), numpy.arange(3)]
print(list(map(runpy.run_path({words.__file__!r})["stable_key"], keys)))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    keys = ["look at 0x12.jpg", ["a", 1, None, 2.5, b"x"], {"c", "b", "a"}, {"a": 2, "b": 1}]
    keys += [pathlib.PurePosixPath("a/b"), np.arange(3)]
    assert done.stdout.strip() == str([words.stable_key(key) for key in keys]), done.stderr
