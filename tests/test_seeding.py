"""seed=: the same samples for any workers, batches and restart, and no global state touched."""

from __future__ import annotations

import copy
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.distributed import DistributedSampler

from dataloaders import DataLoader
from dataloaders.errors import OptionError
from dataloaders.seeding.seeded import Seeding
from helpers.compare import assert_same, generator_states, seed_everything


class Augmented(Dataset):
    """Each sample: its key's number and one draw from each of the three global generators."""

    def __init__(self, size=12):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        number = key if isinstance(key, int) else 0
        drawn = (torch.rand((), dtype=torch.float64).item(), np.random.rand(), random.random())
        return torch.tensor([number, *drawn], dtype=torch.float64)


class Bulk(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Collating(Augmented):
    def __getitems__(self, indices):
        return {"batch": indices}


class Failing(Augmented):
    def __getitem__(self, key):
        if key == 5:
            random.random()
            raise KeyError("five")
        return super().__getitem__(key)


class Stream(IterableDataset):
    def __iter__(self):
        first = random.random()
        for _ in range(8):
            yield torch.tensor([first, torch.rand(()).item(), np.random.rand()])


def mixing(samples):
    return torch.stack(samples), torch.rand(2)


@pytest.fixture
def untouched():
    """The test moves none of the process-wide generators."""
    np.random.randn()  # half of a pair of normals waits in NumPy's state
    before = generator_states(), np.random.get_state()[1:]
    yield
    assert_same((generator_states(), np.random.get_state()[1:]), before)


def rows(loader):
    """All samples of an epoch in their order, batches joined."""
    return torch.cat([batch.reshape(-1, batch.shape[-1]) for batch in loader])


def by_index(loader):
    return sorted(rows(loader).tolist())


REFERENCE = {"batch_size": 4, "shuffle": True, "seed": 7}
KEPT = {"persistent_workers": True}


@pytest.mark.parametrize(
    "change",
    [
        {"num_workers": 1, "batch_size": 5},
        {"num_workers": 2, **KEPT},
        {"num_workers": 1, "multiprocessing_context": "forkserver", **KEPT},
        {"batch_size": None},
    ],
    ids=str,
)
@pytest.mark.nightly
def test_samples_depend_on_seed_epoch_and_index_alone(change):
    """Neither on workers nor on batches, nor where training resumed."""
    options = {**REFERENCE, **change}
    reference = DataLoader(Augmented(), **REFERENCE)
    expected = [rows(reference) for _ in range(3)]
    drawn = torch.cat([epoch[:, 1:].flatten() for epoch in expected])
    assert drawn.unique().numel() == drawn.numel() == 3 * 12 * 3
    loader, again = DataLoader(Augmented(), **options), DataLoader(Augmented(), **options)
    assert_same([rows(loader) for _ in range(3)], expected)
    for epoch in (2, 1):
        again.set_epoch(epoch)
        assert torch.equal(rows(again), expected[epoch])


def test_nor_do_they_depend_on_the_order():
    expected = by_index(DataLoader(Augmented(), seed=7))
    backwards = DataLoader(Augmented(), seed=7, sampler=range(11, -1, -1), batch_size=5)
    for loader in (backwards, DataLoader(Bulk(), seed=7, shuffle=True, batch_size=5)):
        assert by_index(loader) == expected
    other = by_index(DataLoader(Augmented(), seed=8))
    assert not {draw for _, *row in other for draw in row} & {
        draw for _, *row in expected for draw in row
    }


@settings(max_examples=40, deadline=None)
@given(
    keys=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    size=st.integers(1, 5),
    seed=st.integers(-(2**63), 2**64 - 1),
    epoch=st.integers(0, 2**40),
)
def test_any_order_of_keys_gives_the_same_samples(keys, size, seed, epoch):
    def epoch_of(order):
        loader = DataLoader(Augmented(), size, sampler=order, seed=seed)
        loader.set_epoch(epoch)
        return by_index(loader)

    assert epoch_of(keys) == epoch_of(sorted(keys))


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "dataset", [Augmented(), Bulk(), Stream(), TensorDataset(torch.rand(12, 2))]
)
def test_the_consumers_generators_are_untouched(dataset, workers):
    shuffle = None if isinstance(dataset, IterableDataset) else True
    loader = DataLoader(dataset, 5, shuffle=shuffle, num_workers=workers, seed=4)
    before = generator_states()
    for _ in range(2):
        for _ in loader:
            assert_same(generator_states(), before)


@pytest.mark.usefixtures("untouched")
def test_they_are_untouched_when_a_sample_fails_or_the_loop_breaks():
    iterator = iter(DataLoader(Failing(), seed=4))
    for _ in range(5):
        next(iterator)
    with pytest.raises(KeyError, match="five"):
        next(iterator)
    for _ in DataLoader(Augmented(), seed=4, shuffle=True, collate_fn=mixing):
        break


def test_without_a_seed_torchs_streams_are_torchs():
    def epoch(kind):
        seed_everything()
        return rows(kind(Augmented(), batch_size=5, shuffle=True)), generator_states()

    assert_same(epoch(DataLoader), epoch(torch.utils.data.DataLoader))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda generator: RandomSampler(range(12), generator=generator),
        lambda generator: RandomSampler(range(12), True, 20, generator),
        lambda generator: SubsetRandomSampler(range(12), generator),
        lambda generator: WeightedRandomSampler([1.0] * 12, 20, True, generator),
        None,
    ],
    ids=["random", "replacement", "subset", "weighted", "shuffle="],
)
def test_torchs_samplers_follow_the_seed_unless_they_have_a_generator(sampler, wrapped):
    def order(generator=None, kind=DataLoader, **options):
        if sampler is None:
            loader = kind(Augmented(), 5, shuffle=True, generator=generator, **options)
        elif wrapped:
            batches = BatchSampler(sampler(generator), 5, False)
            loader = kind(Augmented(), batch_sampler=batches, **options)
        else:
            loader = kind(Augmented(), 5, sampler=sampler(generator), **options)
        return [rows(loader)[:, 0].tolist() for _ in range(2)]

    before = generator_states()
    first, second = order(seed=5)
    assert order(seed=5) == [first, second]
    assert first != second
    assert order(seed=6) != [first, second]
    mine, theirs = (torch.Generator().manual_seed(9) for _ in range(2))
    ours = order(mine, seed=5)
    assert_same(generator_states(), before)
    assert ours == order(theirs, torch.utils.data.DataLoader)
    assert torch.equal(mine.get_state(), theirs.get_state())


def test_a_gathered_dataset_is_shuffled_like_any_other():
    loader = DataLoader(TensorDataset(torch.arange(12.0)), 5, shuffle=True, seed=7)
    expected = DataLoader(Augmented(), 5, shuffle=True, seed=7)
    for _ in range(2):
        assert torch.equal(torch.cat([batch[0] for batch in loader]), rows(expected)[:, 0].float())


@pytest.mark.parametrize("workers", [0, 2])
def test_repeats_of_an_index_are_augmented_differently_and_reproducibly(workers):
    order = [3, 5, 3, 3, 5]
    found = rows(DataLoader(Augmented(), 4, sampler=order, seed=2, num_workers=workers))
    assert found[:, 1].unique().numel() == 5
    assert torch.equal(found, rows(DataLoader(Augmented(), 4, sampler=order, seed=2)))
    assert torch.equal(found[0], rows(DataLoader(Augmented(), seed=2))[3])


def test_a_random_sampler_that_goes_round_counts_its_rounds():
    sampler = RandomSampler(Augmented(), num_samples=30)
    found = rows(DataLoader(Augmented(), 7, sampler=sampler, seed=2))
    counted = rows(DataLoader(Augmented(), 7, sampler=[int(key) for key in found[:, 0]], seed=2))
    assert torch.equal(found, counted)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 9), ranks=st.integers(1, 5), shuffle=st.booleans(), drop=st.booleans())
def test_ranks_together_give_what_one_gives(size, ranks, shuffle, drop):
    parts = []
    for rank in range(ranks):
        sampler = DistributedSampler(Augmented(size), ranks, rank, shuffle, drop_last=drop)
        if len(sampler):
            parts.append(rows(DataLoader(Augmented(size), 2, sampler=sampler, seed=8)))
    if not parts:
        return
    joined = torch.stack(parts, dim=1).flatten(0, 1)
    # The same order from one process, whose own counting gives the occurrences.
    order = [int(index) for index in joined[:, 0]]
    assert torch.equal(joined, rows(DataLoader(Augmented(size), 3, sampler=order, seed=8)))


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
@pytest.mark.parametrize("keys", [["a", "b", "a"], [("a", 1), ("b", None)], [[0, 1], [2, 3]]])
def test_keys_that_are_not_integers(keys, workers):
    loader = DataLoader(Augmented(), batch_size=None, sampler=keys, seed=1, num_workers=workers)
    other = DataLoader(Augmented(), batch_size=None, sampler=keys[::-1], seed=1)
    assert by_index(loader) == by_index(other)
    assert rows(loader)[:, 1].unique().numel() == len(keys)


def test_a_key_without_content_is_refused():
    with pytest.raises(TypeError, match="shows only its address"):
        next(iter(DataLoader(Augmented(), sampler=[object()], seed=1)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bulk_dataset_that_collates_itself_is_refused(workers):
    iterator = iter(DataLoader(Collating(4), 4, collate_fn=dict, seed=1, num_workers=workers))
    with pytest.raises(OptionError, match=r"__getitems__\(\[0\]\) must return a list of one"):
        next(iterator)
    assert list(iterator) == []  # torch ends its workers at once only at the end of an epoch


def test_a_custom_batch_sampler_and_an_empty_batch():
    loader = DataLoader(Augmented(), batch_sampler=[[1, 2], [], [0]], collate_fn=list, seed=1)
    assert [len(batch) for batch in loader] == [2, 0, 1]
    assert len(loader) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_random_collation_is_seeded_by_the_first_sample(workers):
    options = {"collate_fn": mixing, "seed": 3}
    expected = [mixed for _, mixed in DataLoader(Augmented(), 4, **options)]
    found = [mixed for _, mixed in DataLoader(Augmented(), 4, num_workers=workers, **options)]
    assert_same(found, expected)
    assert torch.cat(found).unique().numel() == 6
    moved = DataLoader(Augmented(), 4, sampler=[4, 0, 1], **options)
    assert torch.equal(next(iter(moved))[1], expected[1])


def test_iterable_datasets_are_seeded_by_position():
    loader = DataLoader(Stream(), 3, seed=6)
    first, second = rows(loader), rows(loader)
    assert first[:, 1].unique().numel() == 8
    assert not torch.equal(first, second)
    one = DataLoader(
        Stream(), 3, seed=6, num_workers=1, multiprocessing_context="forkserver", **KEPT
    )
    assert_same([rows(one), rows(one)], [first, second])
    one.set_epoch(0)
    assert torch.equal(rows(one), first)
    assert torch.equal(rows(DataLoader(Stream(), None, seed=6)), first)
    two = rows(DataLoader(Stream(), 8, seed=6, num_workers=2))
    assert torch.equal(two[:8], first)
    assert two[:, 1].unique().numel() == 16


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_pipes_shuffle_follows_the_seed(workers):
    def epochs(seed):
        pipe = IterableWrapper(list(range(20))).shuffle()
        loader = DataLoader(pipe, 5, shuffle=True, num_workers=workers, seed=seed)
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    before = torch.get_rng_state()
    first = epochs(1)
    assert first == epochs(1)
    assert first[0] != first[1]
    assert first != epochs(2)
    assert torch.equal(torch.get_rng_state(), before)


class Inspected(Augmented):
    pickled = 0

    def __getitem__(self, key):
        return torch.tensor([get_worker_info().dataset is self, self.marked])

    def __getstate__(self):
        Inspected.pickled += 1
        return vars(self)


class InspectedStream(Inspected, IterableDataset):
    def __iter__(self):
        yield self[0]


def mark(worker_id):
    get_worker_info().dataset.marked = True


@pytest.mark.parametrize("context", ["fork", "forkserver"])
@pytest.mark.parametrize("kind", [Inspected, InspectedStream])
def test_workers_see_the_users_own_dataset_which_is_pickled_once(kind, context):
    options = {"num_workers": 1, "worker_init_fn": mark, "multiprocessing_context": context}
    before = Inspected.pickled
    assert rows(DataLoader(kind(1), seed=1, **options)).tolist() == [[True, True]]
    assert Inspected.pickled - before == (context == "forkserver")


def test_copies_and_pickles_continue_alike_and_two_iterators_do_not_disturb_each_other():
    loader, other = DataLoader(Augmented(), **REFERENCE), DataLoader(Augmented(), **REFERENCE)
    epochs = [list(other) for _ in range(3)]
    pairs = list(zip(iter(loader), iter(loader), strict=True))
    assert_same([list(batches) for batches in zip(*pairs, strict=True)], epochs[:2])
    for made in (copy.copy(loader), pickle.loads(pickle.dumps(loader)), loader):
        assert_same(list(made), epochs[2])


@pytest.mark.parametrize("persistent", [False, True])
def test_settings_of_the_sampler_that_change_between_epochs_are_followed(persistent):
    sampler = WeightedRandomSampler([1.0] * 12, 6)
    workers = {"num_workers": 1, **KEPT} if persistent else {}
    loader = DataLoader(Augmented(), sampler=sampler, seed=1, **workers)
    assert rows(loader)[:, 0].unique().numel() > 1
    sampler.weights = torch.eye(12, dtype=torch.float64)[3]
    assert rows(loader)[:, 0].unique().tolist() == [3]


def test_the_samplers_alone_can_be_seeded():
    loader = DataLoader(Augmented(), **REFERENCE)
    view = Seeding().view(loader, samples=False)
    assert view.dataset is loader.dataset
    assert view.collate_fn is default_collate
    # Exactly torch's: a subclass would not be gathered as index tensors.
    assert (type(view.batch_sampler), type(view.sampler)) == (BatchSampler, RandomSampler)
    order = [index for batch in view.batch_sampler for index in batch]
    assert order == rows(loader)[:, 0].tolist()


@pytest.mark.gpu
def test_cuda_generators_are_left_alone():
    before = torch.cuda.get_rng_state()
    for _ in DataLoader(Augmented(), **REFERENCE):
        pass
    assert torch.equal(torch.cuda.get_rng_state(), before)
