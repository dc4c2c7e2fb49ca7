"""Stock: torch's own iterators, its persistent workers, plans; the gather, equal to the bit."""

import gc
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import StackDataset, Subset, TensorDataset
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter
from torchvision import transforms as v1

from dataloaders import DataLoader, wrap
from helpers.compare import assert_same, run_epochs
from helpers.datasets import CountingStream, MapDataset
from helpers.pictures import folder
from helpers.processes import wait_until_gone

TorchLoader = torch.utils.data.DataLoader
KEPT = {"num_workers": 1, "persistent_workers": True}


def ordinary():
    """A dataset that nothing says to be in memory."""
    return MapDataset(lambda index: index * index, 20)


IN_MEMORY = TensorDataset(torch.arange(20))
both = pytest.mark.parametrize("data", [ordinary(), IN_MEMORY], ids=["ordinary", "in memory"])


@both
def test_the_iterators_are_of_torchs_own_classes(data):
    for options in ({}, {"seed": 3}):
        assert type(iter(DataLoader(data, **options))) is _SingleProcessDataLoaderIter
    loader = DataLoader(data, num_workers=1, seed=3)
    for _ in range(2):
        batches = iter(loader)
        assert type(batches) is _MultiProcessingDataLoaderIter
        assert len(batches) == len(list(batches)) == 20


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


class Unasked:  # as MONAI's Compose, whose length draws random numbers
    __call__ = id

    def __len__(self):
        raise AssertionError("the length of a transform was asked for")


def test_explain_describes_each_stage():
    for loader, words in (
        (
            DataLoader(folder(v1.Compose([v1.Pad(2)])), 4, num_workers=2, drop_last=True),
            "2 worker processes|BatchSampler of SequentialSampler, 4 a batch, last short batch "
            "dropped|decode|default_loader|Pad|ImageFolder is not an in-memory dataset",
        ),
        (DataLoader(IN_MEMORY, 4, shuffle=True), "one indexed gather a batch from TensorD"),
        (DataLoader(CountingStream()), "next(iter(CountingStream))"),
        (DataLoader(MapDataset(int, transform=Unasked())), "Unasked"),
    ):
        plan = loader.explain()
        assert plan.runs
        for part in words.split("|"):
            assert part in str(plan)


# The gather


def tensors(length=37):
    return torch.arange(length * 3, dtype=torch.float32).reshape(length, 3), torch.arange(length)


def dataset(length=37):
    return TensorDataset(*tensors(length))


def is_gathered(loader):
    return "one indexed gather a batch" in str(loader.explain())


DATASETS = {
    "TensorDataset": dataset,
    "Subset of negative indices": lambda: Subset(dataset(), [3, -1, 1, -37, 0, 20]),
    "Subset by tensor": lambda: Subset(dataset(), torch.tensor([5, 4, 9])),
    "Subset by int32 array": lambda: Subset(dataset(), np.array([5, 4, 9], dtype=np.int32)),
    "Subset by range": lambda: Subset(dataset(), range(30, 4, -3)),
    "Subset of Subset": lambda: Subset(Subset(dataset(), list(range(20, 37))), [0, 16, 5]),
    "StackDataset tuple": lambda: StackDataset(*tensors()),
    "StackDataset dict": lambda: StackDataset(y=tensors()[1], x=tensors()[0]),
    "StackDataset of others": lambda: StackDataset(
        a=dataset(5), b=Subset(dataset(), [4, 3, 2, 1, 0])
    ),
    "tensor": lambda: tensors()[0],
}


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS.keys())
def test_batches_and_default_generator_are_torchs(make):
    for shuffle in (False, True):
        options = {"batch_size": 4, "shuffle": shuffle}
        theirs, ours = TorchLoader(make(), **options), DataLoader(make(), **options)
        assert is_gathered(ours)
        assert_same(run_epochs(ours), run_epochs(theirs), storage=True)


def assert_as_torch(trace):
    """Assert that ``trace`` returns the same for our class of loaders and for torch's."""
    found = []
    for kind in (DataLoader, TorchLoader):
        torch.manual_seed(3)
        found.append(trace(kind))
    assert_same(*found, storage=True)


@settings(max_examples=80)
@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    dtype=st.sampled_from(
        [
            torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.uint8, torch.bool,
            torch.int64, torch.uint16, torch.float8_e4m3fn,
        ]
    ),
    layout=st.sampled_from(["plain", "channels_last", "transposed", "expanded"]),
    rows=st.lists(st.integers(-6, 5), min_size=1, max_size=5),
)  # fmt: skip
def test_tensors_of_any_dtype_and_layout(shape, dtype, layout, rows):
    tensor = torch.randint(0, 2, (6, *shape)).to(dtype)
    if layout == "channels_last" and tensor.dim() == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed" and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "expanded":
        tensor = tensor[:1].expand(6, *shape)
    data = TensorDataset(tensor)
    assert_as_torch(lambda kind: list(kind(data, batch_size=3, sampler=rows)))


ODD_KEYS = [
    *([0, 37], [0, -38], [0, True], [True, True], [0, 10**30], [0, "a"], [0, None], [1.0, 2.0]),
    *([[0, 1], [2, 3]], [slice(2)]),
]


def test_errors_and_odd_keys_are_torchs():
    def outcome(keys, kind):
        try:
            return list(kind(dataset(), batch_size=2, sampler=keys))
        except Exception as error:
            return [type(error), str(error)]

    for keys in ODD_KEYS:
        assert_as_torch(partial(outcome, keys))


def test_batch_samplers_of_any_kind():
    batches = [[1, 2], torch.tensor([3, 4]), np.array([5, 6]), (7, 8), range(9, 11), [True, True]]
    assert is_gathered(DataLoader(dataset(), batch_sampler=batches))
    assert_as_torch(lambda kind: list(kind(dataset(), batch_sampler=batches)))
    with pytest.raises(IndexError, match="list index out of range"):
        next(iter(DataLoader(dataset(), batch_sampler=[[]])))


CHANGES = {
    "replaced": lambda data: setattr(data.dataset, "tensors", tensors(40)),
    "written": lambda data: data.dataset.tensors[0].mul_(2),
    "grad": lambda data: data.dataset.tensors[0].requires_grad_(True),
    "transposed": lambda data: data.dataset.tensors[0].set_(torch.ones(3, 37).cumsum(1).t()),
    "indices": lambda data: data.indices.reverse(),
}


def test_a_dataset_that_changes_in_mid_epoch():
    def epoch(change, kind):
        data, trace = Subset(dataset(), list(range(37))), []
        for number, batch in enumerate(kind(data, batch_size=10)):
            trace.append(batch)
            if number == 1:
                change(data)
        return trace

    for change in CHANGES.values():
        assert_as_torch(partial(epoch, change))


def test_workers_gather_into_shared_memory_and_persist():
    make, options = DATASETS["StackDataset dict"], {"batch_size": 4, "shuffle": True, **KEPT}
    ours, theirs = (kind(make(), **options) for kind in (DataLoader, TorchLoader))
    assert is_gathered(ours)
    assert_same(run_epochs(ours), run_epochs(theirs), storage=True)


class _Strange(TensorDataset):
    pass


def test_explain_says_why_a_dataset_is_not_gathered():
    for data, reason in (
        (_Strange(*tensors()), "_Strange is not an in-memory dataset"),
        (torch.ones(4, 2, requires_grad=True), "requires grad"),
        (TensorDataset(torch.nn.Parameter(torch.ones(4))), "Parameter"),
        (torch.ones(4, 2).t(), "not contiguous"),
        (torch.eye(4).to_sparse(), "sparse"),
    ):
        assert reason in str(DataLoader(data).explain())
    assert "collate_fn is not" in str(DataLoader(dataset(), collate_fn=list).explain())


def test_a_changed_collation_table_turns_the_gather_off(monkeypatch):
    def reversed_stack(batch, *, collate_fn_map=None):
        return torch.stack(batch[::-1])

    loader, table = DataLoader(dataset(), batch_size=4), torch_collate.default_collate_fn_map
    dalis = type("SampleRef", (), {"__module__": "nvidia.dali.plugin.pytorch"})
    for kind, gathers in ((dalis, True), (_Strange, False)):
        with monkeypatch.context() as patch:
            patch.setitem(table, kind, reversed_stack)
            assert is_gathered(loader) == gathers, kind
    batches = iter(loader)
    next(batches)
    monkeypatch.setitem(table, torch.Tensor, reversed_stack)
    assert "default_collate_fn_map" in str(loader.explain())
    assert next(batches)[1].tolist() == [7, 6, 5, 4]  # in mid-epoch too
    assert next(iter(loader))[1].tolist() == [3, 2, 1, 0]
