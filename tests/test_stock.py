"""Stock: torch's own iterators, persistent workers where torch keeps them, honest plans."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info
from torch.utils.data.dataloader import (
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)

from backends.stock import Stock
from dataloaders import DataLoader, wrap
from helpers.compare import assert_same
from helpers.contract import Unloadable, fails_at_five
from helpers.datasets import MapDataset

TorchLoader = torch.utils.data.DataLoader


class Squares(Dataset[int]):
    """An ordinary dataset, which is not in memory as far as anybody knows."""

    transform = None

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index * index


class Decoded(Squares):
    """A dataset with the attributes of torchvision's folders."""

    def __init__(self) -> None:
        self.loader = open_image
        self.transform = Chain([torch.nn.Identity(), open_image])


class Chain:
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        return image


def open_image(path: Any) -> Any:
    return path


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Doubled(TorchLoader[Any]):
    """A loader of somebody else's with an iteration of its own."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * 2


class OursDoubled(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch * 2


def in_memory() -> TensorDataset:
    return TensorDataset(torch.arange(20))


@pytest.mark.parametrize("options", [{}, {"backend": "stock"}, {"seed": 3}], ids=str)
@pytest.mark.parametrize("data", [Squares(), in_memory()], ids=["ordinary", "in memory"])
@pytest.mark.thinned(3)
def test_the_iterators_are_of_torchs_own_classes(data: Any, options: dict[str, Any]) -> None:
    assert type(iter(DataLoader(data, **options))) is _SingleProcessDataLoaderIter
    for persistent_workers in (False, True):
        loader = DataLoader(data, num_workers=1, persistent_workers=persistent_workers, **options)
        for _ in range(2):
            batches = iter(loader)
            assert type(batches) is _MultiProcessingDataLoaderIter
            assert len(batches) == len(list(batches)) == 20


def test_a_loader_that_leaves_prefetch_for_stock_gets_torchs_own_iterator() -> None:
    loader = DataLoader(
        Squares(), num_workers=1, persistent_workers=True, backend="prefetch", device="cpu"
    )
    assert len(list(loader)) == 20
    assert loader._iterator is not None
    ahead = list(loader._iterator._workers)
    for backend in ("stock", "prefetch", "stock"):
        loader.backend = backend
        assert [int(batch) for batch in loader] == [index * index for index in range(20)]
        is_torchs = type(loader._iterator) is _MultiProcessingDataLoaderIter
        assert is_torchs == (backend == "stock")
    for process in ahead:
        process.join(30)
        assert not process.is_alive()


class Shifted(Squares):
    """Squares moved by ``shift``, which a worker's set-up may change."""

    shift = 0

    def __getitem__(self, index: int) -> int:
        return index * index + self.shift


def shift_by_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.shift = 1000 * (worker + 1)


def test_worker_init_fn_may_change_the_workers_dataset() -> None:
    options: Any = {"batch_size": 2, "num_workers": 2, "worker_init_fn": shift_by_worker}
    batches = list(DataLoader(Shifted(), **options))
    assert_same(batches, list(TorchLoader(Shifted(), **options)))
    assert {int(batch[0]) // 1000 for batch in batches} == {1, 2}


@pytest.mark.usefixtures("workers_end_fast")
def test_an_exception_in_a_worker_says_where_as_torchs_does() -> None:
    ours: DataLoader[Any] = DataLoader(MapDataset(fails_at_five), num_workers=2)
    where = r"Caught Unloadable in DataLoader worker process \d(.|\n)*fails_at_five"
    with pytest.raises(Unloadable, match=where) as caught:
        list(ours)
    assert not hasattr(caught.value, "__notes__")


def test_a_wrapped_loader_leaves_the_workers_of_the_other_one_alone() -> None:
    theirs = TorchLoader(Squares(), num_workers=1, persistent_workers=True)
    iterator = iter(theirs)
    next(iterator)
    ours = wrap(theirs)
    assert len(list(ours)) == 20
    del ours
    gc.collect()
    assert len(list(iterator)) == 19


class Epochs(Squares):
    """A dataset whose samples are the epoch that it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch


def test_set_epoch_reaches_the_copies_in_persistent_workers_as_under_torch() -> None:
    loader = DataLoader(Epochs(), num_workers=1, persistent_workers=True)
    found = []
    for epoch in (4, 5):
        loader.set_epoch(epoch)
        found.append({int(batch) for batch in loader})
    assert found == [{4}, {4}]  # they are copied when the workers start


@pytest.mark.parametrize("data", [Squares(), in_memory()], ids=["ordinary", "in memory"])
def test_persistent_workers_live_where_torch_keeps_them(data: Any) -> None:
    loader = DataLoader(data, batch_size=5, num_workers=1, persistent_workers=True)
    first = iter(loader)
    assert loader._iterator is first
    assert len(list(first)) == 4
    workers = [worker.pid for worker in first._workers]
    second = iter(loader)
    assert second is first
    assert len(list(second)) == 4
    assert [worker.pid for worker in second._workers] == workers
    processes = list(second._workers)
    session = loader._session
    assert session is not None
    del first, second
    session.close()
    session.close()
    assert loader._iterator is None
    for process in processes:
        process.join(30)
        assert not process.is_alive()


def test_a_session_whose_loader_is_gone_says_so() -> None:
    loader = TorchLoader(in_memory())
    session = Stock().open(loader)
    del loader
    session.close()
    with pytest.raises(RuntimeError, match="keep it while iterating"):
        session.epoch()


def test_a_loader_with_its_own_iteration_is_iterated_by_it() -> None:
    expected = [2 * index * index for index in range(20)]
    foreign = Doubled(Squares())
    assert [int(batch) for batch in wrap(foreign)] == expected
    assert [int(batch) for batch in Stock().open(foreign).epoch()] == expected
    assert "Doubled.__iter__" in str(Stock().explain(foreign))
    # Ours calls its session from its own __iter__: no recursion, and doubled once.
    assert [int(batch) for batch in OursDoubled(Squares())] == expected


def test_a_plan_names_every_stage() -> None:
    plan = DataLoader(Decoded(), batch_size=4, num_workers=2, drop_last=True).explain()
    assert plan.runs
    assert [stage.name for stage in plan.stages] == [
        "sampler", "fetch", "decode", "augment", "collate",
    ]  # fmt: skip
    text = str(plan)
    assert "2 worker processes" in text
    assert "BatchSampler of SequentialSampler, 4 a batch, last short batch dropped" in text
    assert "open_image" in text
    assert "Identity, open_image" in text
    assert "Decoded is not an in-memory dataset" in text


def test_a_plan_says_that_batches_are_gathered_and_when_workers_do_not_pay() -> None:
    text = str(DataLoader(in_memory(), 4, shuffle=True).explain())
    assert "RandomSampler, 4 a batch, as index tensors" in text
    assert "one indexed gather a batch from TensorDataset" in text
    text = str(DataLoader(Subset(in_memory(), [1]), 4, num_workers=1).explain())
    assert "1 worker process" in text
    assert "num_workers=1 with a dataset in memory: num_workers=0 gathers" in text


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to pin for")
def test_a_plan_says_that_pinning_does_nothing_here() -> None:
    plan = DataLoader(Squares(), pin_memory=True).explain()
    assert plan.delivers == "cpu"
    assert plan.stages[-1].obstacle is not None
    assert "no accelerator" in plan.stages[-1].obstacle


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_gathered_batches_are_pinned(workers: int) -> None:
    loader = DataLoader(in_memory(), batch_size=5, pin_memory=True, num_workers=workers)
    assert loader.explain().delivers == "cpu (pinned)"
    batches = list(loader)
    assert all(column.is_pinned() for batch in batches for column in batch)
    assert torch.cat([batch[0] for batch in batches]).tolist() == list(range(20))


def test_plans_of_other_loaders() -> None:
    assert "next(iter(Stream))" in str(DataLoader(Stream()).explain())
    assert "samples become tensors one by one" in str(
        DataLoader(Squares(), batch_size=None).explain()
    )


class Unreadable:
    def __len__(self) -> int:
        return 3

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not today")


def test_explain_never_raises() -> None:
    plan = DataLoader(Unreadable()).explain()  # type: ignore[arg-type]
    assert plan.runs
    assert "could not be read (RuntimeError: not today)" in str(plan)


def test_more_workers_than_cores_are_warned_of_once_under_prefetch() -> None:
    count = len(os.sched_getaffinity(0)) + 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(Squares(), 4, num_workers=count, backend="prefetch")
        for _ in range(2):
            assert len(list(loader)) == 5
    texts = [str(one.message) for one in caught]
    assert sum("This DataLoader will create" in text for text in texts) == 1, texts
