"""Stock: torch's own iterators, persistent workers where torch keeps them, plans."""

import gc
import os
import warnings

import pytest
import torch
import torch.utils.data
from torch.utils.data import Subset, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter
from torchvision import transforms as v1

from dataloaders import DataLoader, wrap
from helpers.datasets import CountingStream, MapDataset
from helpers.photos import folder
from helpers.processes import wait_until_gone

SQUARES = [index * index for index in range(20)]
KEPT = {"num_workers": 1, "persistent_workers": True}


def ordinary():
    """A dataset that nothing says to be in memory."""
    return MapDataset(lambda index: index * index, 20)


class Unreadable:
    def __len__(self):
        return 3

    @property
    def __dict__(self):
        raise RuntimeError("not today")


def in_memory():
    return TensorDataset(torch.arange(20))


both = pytest.mark.parametrize("data", [ordinary(), in_memory()], ids=["ordinary", "in memory"])


@both
def test_the_iterators_are_of_torchs_own_classes(data):
    for options in ({}, {"seed": 3}):
        assert type(iter(DataLoader(data, **options))) is _SingleProcessDataLoaderIter
    loader = DataLoader(data, num_workers=1, seed=3)
    for _ in range(2):
        batches = iter(loader)
        assert type(batches) is _MultiProcessingDataLoaderIter
        assert len(batches) == len(list(batches)) == 20


def test_a_loader_that_leaves_prefetch_for_stock_gets_torchs_own_iterator():
    loader = DataLoader(ordinary(), backend="prefetch", device="cpu", **KEPT)
    assert len(list(loader)) == 20
    ahead = [worker.pid for worker in loader._iterator._workers]
    for backend in ("stock", "prefetch", "stock"):
        loader.backend = backend
        assert [int(batch) for batch in loader] == SQUARES
        is_torchs = type(loader._iterator) is _MultiProcessingDataLoaderIter
        assert is_torchs == (backend == "stock")
    assert wait_until_gone(ahead) == []


def test_wrap_leaves_the_workers_of_the_original_loader_alone():
    theirs = torch.utils.data.DataLoader(ordinary(), **KEPT)
    iterator = iter(theirs)
    next(iterator)
    ours = wrap(theirs)
    assert len(list(ours)) == 20
    del ours
    gc.collect()
    assert len(list(iterator)) == 19


@both
def test_persistent_workers_live_where_torch_keeps_them(data):
    loader = DataLoader(data, batch_size=5, **KEPT)
    first = iter(loader)
    assert loader._iterator is first
    processes = [worker.pid for worker in first._workers]
    for _ in range(2):
        assert len(list(first)) == 4
        assert iter(loader) is first
    assert [worker.pid for worker in first._workers] == processes
    del first
    loader._session.close()
    assert loader._iterator is None
    assert wait_until_gone(processes) == []


def test_a_program_may_delete_the_iterator_to_end_its_workers():
    for options in ({}, KEPT):
        loader = DataLoader(ordinary(), **options)
        batches = iter(loader)
        processes = [worker.pid for worker in getattr(batches, "_workers", [])]
        del batches, loader._iterator
        assert wait_until_gone(processes) == []
        assert [int(batch) for batch in loader] == SQUARES


class Unasked:  # as MONAI's Compose, whose length draws random numbers
    def __call__(self, sample):
        return sample

    def __len__(self):
        raise AssertionError("the length of a transform was asked for")


def test_explain_does_not_ask_a_transform_for_its_truth_value():
    dataset = ordinary()
    dataset.transform = Unasked()
    assert "Unasked" in str(DataLoader(dataset).explain())


def test_explain_describes_each_stage():
    for loader, words in (
        (
            DataLoader(folder(v1.Compose([v1.Pad(2)])), 4, num_workers=2, drop_last=True),
            "2 worker processes|BatchSampler of SequentialSampler, 4 a batch, last short batch "
            "dropped|decode|default_loader|Pad|ImageFolder is not an in-memory dataset",
        ),
        (DataLoader(in_memory(), 4, shuffle=True), "one indexed gather a batch from TensorD"),
        (DataLoader(Subset(in_memory(), [1]), 4, num_workers=1), "num_workers=0 gathers"),
        (DataLoader(CountingStream()), "next(iter(CountingStream))"),
        (DataLoader(ordinary(), batch_size=None), "samples become tensors one by one"),
        (DataLoader(Unreadable()), "could not be read (RuntimeError: not today)"),
    ):
        plan = loader.explain()
        assert plan.runs
        for part in words.split("|"):
            assert part in str(plan)


def test_prefetch_warns_once_of_more_workers_than_cores():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = len(os.sched_getaffinity(0)) + 1
        loader = DataLoader(ordinary(), 4, num_workers=count, backend="prefetch")
        for _ in range(2):
            assert len(list(loader)) == 5
    texts = [str(one.message) for one in caught]
    assert sum("This DataLoader will create" in text for text in texts) == 1, texts


def test_a_large_batch_can_be_resized():
    large = torch.zeros(2, 1 << 19)  # 4 MiB
    for dataset in (large, list(large)):
        (batch,) = DataLoader(dataset, 2)
        assert batch.resize_(4, 1 << 19).shape == (4, 1 << 19)
