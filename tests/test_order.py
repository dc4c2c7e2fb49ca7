"""Index tables of the gather, on given lists: what becomes a tensor, when, and for how long."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from backends.stock.order import Table, as_index, index_batches, is_known


class Owner:
    """In place of a sampler or a Subset, to which what a Table made belongs."""


class Own(SequentialSampler):
    """A sampler of the user's, which may do anything."""


def test_only_torchs_own_samplers_are_known():
    rows = range(4)
    assert is_known(BatchSampler(SequentialSampler(rows), 2, False))
    assert is_known(BatchSampler(SubsetRandomSampler(rows), 2, False))
    assert not is_known(BatchSampler(Own(rows), 2, False))
    assert not is_known([[0, 1], [2, 3]])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("rows", [22, 24, 3])
def test_a_ranks_share_of_an_epoch_is_torchs(rows, rank, drop_last):
    sampler = DistributedSampler(range(rows), 4, rank, shuffle=True, seed=3, drop_last=drop_last)
    orders = []
    for epoch in (0, 2):
        sampler.set_epoch(epoch)
        batches = BatchSampler(sampler, 4, False)
        indices = list(index_batches(batches))
        assert all(type(index) is torch.Tensor for index in indices)
        orders.append([list(index) for index in indices])
        assert orders[-1] == list(batches)
    assert orders[0] != orders[1] or rows == 3


@pytest.mark.parametrize(("drop_last", "now"), [(True, 12), (False, 30)])
def test_a_dataset_whose_length_changed_is_torchs_error(drop_last, now):
    rows = list(range(22))
    sampler = DistributedSampler(rows, 4, 0, drop_last=drop_last)
    rows[:] = range(now)
    batches = BatchSampler(sampler, 4, False)
    for order in (iter, index_batches):
        with pytest.raises(AssertionError, match="does not match total_size"):
            list(order(batches))


@pytest.mark.parametrize("sizes", [[3, 0], [3, 5, 2], [3, 3, 0], [2, 2, 4, 4, 1]])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_size_counts_from_the_next_batch_on(sizes, drop_last):
    found = []
    for order in (iter, index_batches):
        batches = BatchSampler(SequentialSampler(range(17)), sizes[0], drop_last)
        found.append([])
        for number, batch in enumerate(order(batches)):
            found[-1].append(list(batch))
            batches.batch_size = sizes[min(number + 1, len(sizes) - 1)]
    assert found[1] == found[0]


@pytest.mark.parametrize(
    "values",
    [
        [3, 1, 2],
        (3, 1, 2),
        [np.int64(3), 1, np.int32(2)],
        np.array([3, 1, 2]),
        torch.tensor([3, 1, 2]),
    ],
)
def test_integers_are_an_index(values):
    index = as_index(values)
    assert index is not None
    assert index.dtype == torch.int64
    assert index.tolist() == [3, 1, 2]


def read_only():
    values = np.arange(3)
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    "values",
    [
        *([], (), [True], [1.0], [1, "a"], None, range(3)),
        *(np.arange(3, dtype=np.int32), np.zeros((2, 2), np.int64), np.arange(0), read_only()),
        *(torch.tensor([1], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)),
        *(torch.tensor(1), torch.zeros(0, dtype=torch.int64)),
        torch.zeros(2, dtype=torch.int64, device="meta"),
    ],
    ids=repr,
)
def test_anything_else_is_none(values):
    assert as_index(values) is None


def test_a_list_becomes_a_tensor_once_a_thirty_second_of_it_was_asked_for():
    owner, values = Owner(), list(range(640))
    table = Table(owner)
    assert table.lookup(values, list(range(19))) == list(range(19))
    now = table.lookup(values, [7])
    assert isinstance(now, torch.Tensor)
    assert now.tolist() == [7]
    # The next epoch begins with it, until the list is another one or has another value.
    assert isinstance(Table(owner).lookup(values, torch.tensor([3])), torch.Tensor)
    assert Table(Owner()).lookup(values, torch.tensor([3])) == [3]
    values[5] = -1
    assert Table(owner).lookup(values, [5]) == [-1]
    values.append(640)
    assert table.lookup(values, [640]) == [640]
    assert table.lookup([1, 2], [1, 0, 1]).tolist() == [2, 1, 2]


def test_a_tuple_serves_as_a_list_and_an_array_is_used_as_it_is():
    owner = Owner()
    assert isinstance(Table(owner).lookup((4, 5, 6), [2]), torch.Tensor)
    assert isinstance(Table(owner).lookup((4, 5, 6), [2]), torch.Tensor)
    values = np.arange(640)
    index = Table(owner).lookup(values, [7])
    assert isinstance(index, torch.Tensor)
    values[7] = 70
    assert Table(owner).lookup(values, [7]).tolist() == [70]


def test_what_is_no_integer_stays_a_list():
    table = Table(Owner())
    names = ["a", "b", "c"]
    for _ in range(3):
        assert table.lookup(names, torch.tensor([2, 0])) == ["c", "a"]
    assert table.lookup([1, 2, 3], [True, 0]) == [2, 1]  # positions that index_select refuses
    with pytest.raises(IndexError, match="list index out of range"):
        table.lookup(names, [3])
