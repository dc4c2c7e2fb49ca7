"""Index tables of the gather, on given lists: what becomes a tensor, when, and for how long."""

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from backends.stock import order


class Owner:
    """In place of a sampler or a Subset, to which what a Table made belongs."""


class Own(SequentialSampler):
    """A sampler of the user's, which may do anything."""


def test_only_torchs_own_samplers_are_known():
    for sampler, known in ((SequentialSampler, True), (SubsetRandomSampler, True), (Own, False)):
        assert order.is_known(BatchSampler(sampler(range(4)), 2, False)) is known
    assert not order.is_known([[0, 1], [2, 3]])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("rows", [22, 24, 3])
def test_a_ranks_share_of_an_epoch_is_torchs(rows, rank, drop_last):
    sampler = DistributedSampler(range(rows), 4, rank, shuffle=True, seed=3, drop_last=drop_last)
    orders = []
    for epoch in (0, 2):
        sampler.set_epoch(epoch)
        batches = BatchSampler(sampler, 4, False)
        indices = list(order.index_batches(batches))
        assert all(type(index) is torch.Tensor for index in indices)
        orders.append([list(index) for index in indices])
        assert orders[-1] == list(batches)
    assert orders[0] != orders[1] or rows == 3


@pytest.mark.parametrize(("drop_last", "now"), [(True, 12), (False, 30)])
def test_a_dataset_whose_length_changed_is_torchs_error(drop_last, now):
    rows = list(range(22))
    sampler = DistributedSampler(rows, 4, 0, drop_last=drop_last)
    rows[:] = range(now)
    for each in (iter, order.index_batches):
        with pytest.raises(AssertionError, match="does not match total_size"):
            list(each(BatchSampler(sampler, 4, False)))


@pytest.mark.parametrize("sizes", [[3, 0], [3, 5, 2], [3, 3, 0], [2, 2, 4, 4, 1]])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_size_counts_from_the_next_batch_on(sizes, drop_last):
    found = []
    for each in (iter, order.index_batches):
        batches = BatchSampler(SequentialSampler(range(17)), sizes[0], drop_last)
        found.append([])
        for number, batch in enumerate(each(batches)):
            found[-1].append(list(batch))
            batches.batch_size = sizes[min(number + 1, len(sizes) - 1)]
    assert found[1] == found[0]


def test_integers_are_an_index_and_anything_else_is_none():
    mixed = [np.int64(3), 1, np.int32(2)]
    for values in ([3, 1, 2], (3, 1, 2), mixed, np.array([3, 1, 2]), torch.tensor([3, 1, 2])):
        index = order.as_index(values)
        assert (index.dtype, index.tolist()) == (torch.int64, [3, 1, 2])
    read_only = np.arange(3)
    read_only.flags.writeable = False
    for values in (
        *([], (), [True], [1.0], [1, "a"], None, range(3)),
        *(np.arange(3, dtype=np.int32), np.zeros((2, 2), np.int64), np.arange(0), read_only),
        *(torch.tensor([1], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)),
        *(torch.tensor(1), torch.zeros(0, dtype=torch.int64)),
        torch.zeros(2, dtype=torch.int64, device="meta"),
    ):
        assert order.as_index(values) is None, values


def test_a_list_becomes_a_tensor_once_a_thirty_second_of_it_was_asked_for():
    owner, values = Owner(), list(range(640))
    table = order.Table(owner)
    assert table.lookup(values, list(range(19))) == list(range(19))
    now = table.lookup(values, [7])
    assert isinstance(now, torch.Tensor)
    assert now.tolist() == [7]
    # The next epoch begins with it, until the list is another one or has another value.
    assert isinstance(order.Table(owner).lookup(values, torch.tensor([3])), torch.Tensor)
    assert order.Table(Owner()).lookup(values, torch.tensor([3])) == [3]
    values[5] = -1
    assert order.Table(owner).lookup(values, [5]) == [-1]
    values.append(640)
    assert table.lookup(values, [640]) == [640]
    assert table.lookup([1, 2], [1, 0, 1]).tolist() == [2, 1, 2]


def test_a_tuple_serves_as_a_list_and_an_array_is_used_as_it_is():
    owner = Owner()
    for _ in range(2):
        assert isinstance(order.Table(owner).lookup((4, 5, 6), [2]), torch.Tensor)
    values = np.arange(640)
    assert isinstance(order.Table(owner).lookup(values, [7]), torch.Tensor)
    values[7] = 70
    assert order.Table(owner).lookup(values, [7]).tolist() == [70]


def test_what_is_no_integer_stays_a_list():
    table, names = order.Table(Owner()), ["a", "b", "c"]
    for _ in range(3):
        assert table.lookup(names, torch.tensor([2, 0])) == ["c", "a"]
    assert table.lookup([1, 2, 3], [True, 0]) == [2, 1]  # positions that index_select refuses
    with pytest.raises(IndexError, match="list index out of range"):
        table.lookup(names, [3])
