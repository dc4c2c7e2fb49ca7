"""The contract that every backend keeps; each backend's test module inherits this class.

    class TestStock(BackendContract):
        @pytest.fixture
        def backend(self) -> Backend:
            return Stock()

What a backend says of itself (``same_samples``, ``delivers``) chooses between equality with
torch's loader to the bit and equality of structure. A loader that a backend cannot serve is
skipped with its own reason, unless the class says that it ``serves_everything``.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.data
from torch.utils.data import SequentialSampler, get_worker_info

from dataloaders import Backend, DataLoader, wrap
from dataloaders.batches.tree import leaves, to_device
from helpers.compare import (
    Epochs,
    assert_same,
    assert_same_epochs,
    run_epochs,
    seed_everything,
    structure,
)
from helpers.datasets import (
    CASES,
    SIZE,
    Case,
    CountingStream,
    MapDataset,
    SizedStream,
    dict_sample,
    integer_sample,
    tensor_sample,
)

WORKER_CASES = tuple(case for case in CASES if case.workers)


class BackendContract:
    """Inherit it, give the fixture ``backend``, and state what is less than everything.

    Attributes:
        serves_everything: whether a loader that the backend refuses fails its test.
        same_random_streams: whether global generators are left exactly as torch's loader leaves
            them after an epoch (backends that draw a seed of their own say False).
    """

    serves_everything: ClassVar[bool] = False
    same_random_streams: ClassVar[bool] = True

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError("a subclass gives the backend under test")

    def loader(self, backend: Backend, **arguments: Any) -> DataLoader[Any]:
        """A loader on the backend under test; skips the test where it cannot serve one."""
        loader: DataLoader[Any] = DataLoader(backend=backend, **arguments)
        obstacle = loader.explain().obstacle
        if obstacle is not None:
            assert not self.serves_everything, obstacle
            pytest.skip(obstacle)
        return loader

    # The same as torch's loader

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_equals_torch_in_this_process(self, backend: Backend, case: Case) -> None:
        self.check_equal(backend, case)

    @pytest.mark.parametrize("case", WORKER_CASES, ids=str)
    def test_equals_torch_with_workers(self, backend: Backend, case: Case) -> None:
        self.check_equal(backend, case, num_workers=2)

    def test_equals_torch_with_persistent_workers(self, backend: Backend) -> None:
        case = Case("shuffled", lambda: {"dataset": MapDataset(dict_sample), "shuffle": True})
        self.check_equal(backend, case, num_workers=2, persistent_workers=True)

    @pytest.mark.parametrize("start", ["spawn", "forkserver"])
    def test_the_start_method_of_workers_changes_nothing(
        self, backend: Backend, start: str
    ) -> None:
        arguments = {"dataset": MapDataset(tensor_sample), "batch_size": 4}
        loader = self.loader(backend, num_workers=1, multiprocessing_context=start, **arguments)
        # Torch's in one process: its batches are the same, and it starts no worker for seconds.
        theirs = torch.utils.data.DataLoader(**arguments)
        expected, got = run_epochs(theirs, epochs=1), run_epochs(loader, epochs=1)
        self.check_batches(backend, got.batches, expected.batches)
        assert len(got.batches[0]) == len(expected.batches[0])
        if backend.same_samples and self.same_random_streams:
            assert_same(got.states, expected.states)

    def test_without_order_the_batches_are_the_same_ones(self, backend: Backend) -> None:
        arguments = {"dataset": MapDataset(integer_sample), "batch_size": 2, "num_workers": 2}
        loader = self.loader(backend, in_order=False, **arguments)
        theirs = list(torch.utils.data.DataLoader(**arguments))
        for _ in range(2):
            ours = list(loader)
            assert len(ours) == len(theirs)
            if backend.same_samples:
                assert sorted(b.tolist() for b in ours) == sorted(b.tolist() for b in theirs)

    def test_worker_init_fn_runs_in_each_worker(self, backend: Backend) -> None:
        arguments = {"dataset": Shifted(integer_sample), "batch_size": 2, "num_workers": 2}
        loader = self.loader(backend, worker_init_fn=shift_by_worker, **arguments)
        theirs = torch.utils.data.DataLoader(worker_init_fn=shift_by_worker, **arguments)
        expected = list(theirs)
        self.check_batches(backend, list(loader), expected)
        assert {int(batch[0]) // 1000 for batch in expected} == {1, 2}

    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize(
        "options",
        [{"batch_size": None}, {}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}],
        ids=str,
    )
    def test_length_of_a_sized_iterable_is_torchs(
        self, backend: Backend, options: dict[str, Any], num_workers: int
    ) -> None:
        arguments = {"dataset": SizedStream(), "num_workers": num_workers, **options}
        loader = self.loader(backend, **arguments)
        theirs = torch.utils.data.DataLoader(**arguments)
        assert len(loader) == len(theirs) > 0

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_sized_iterable_is_as_long_as_it_says(
        self, backend: Backend, num_workers: int
    ) -> None:
        loader = self.loader(backend, dataset=SizedStream(), num_workers=num_workers)
        assert len(loader) == len(list(loader)) == SIZE

    # Epochs, breaks and several iterators

    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_break_leaves_a_fresh_next_epoch(self, backend: Backend, num_workers: int) -> None:
        arguments = {"dataset": MapDataset(tensor_sample), "batch_size": 2, "shuffle": True}
        loader = self.loader(backend, num_workers=num_workers, **arguments)
        theirs = torch.utils.data.DataLoader(num_workers=num_workers, **arguments)
        results = []
        for each in (loader, theirs):
            seed_everything()
            first = list(itertools.islice(each, 2))
            results.append((first, list(each)))
        self.check_batches(backend, results[0][0], results[1][0])
        self.check_batches(backend, results[0][1], results[1][1])

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_two_iterators_are_independent(self, backend: Backend, num_workers: int) -> None:
        arguments = {"dataset": MapDataset(dict_sample), "batch_size": 3, "shuffle": True}
        loader = self.loader(backend, num_workers=num_workers, **arguments)
        theirs = torch.utils.data.DataLoader(num_workers=num_workers, **arguments)
        results = []
        for each in (loader, theirs):
            seed_everything()
            one, two = iter(each), iter(each)
            taken = [(next(one), next(two)) for _ in range(2)]
            results.append([*taken, list(two), list(one)])
        self.check_batches(backend, results[0], results[1])

    def test_an_exhausted_iterator_stays_exhausted(self, backend: Backend) -> None:
        iterator = iter(self.loader(backend, dataset=MapDataset(tensor_sample), batch_size=8))
        assert len(list(iterator)) == 2
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)

    def test_an_iterator_is_its_own_iterator(self, backend: Backend) -> None:
        iterator = iter(self.loader(backend, dataset=MapDataset(tensor_sample)))
        assert iter(iterator) is iterator

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_an_iterator_outlives_its_loader(self, backend: Backend, num_workers: int) -> None:
        loader = self.loader(backend, dataset=MapDataset(tensor_sample), num_workers=num_workers)
        iterator = iter(loader)
        next(iterator)
        del loader
        gc.collect()
        assert len(list(iterator)) == SIZE - 1

    def test_batches_can_be_kept(self, backend: Backend) -> None:
        loader = self.loader(backend, dataset=MapDataset(tensor_sample), batch_size=2)
        kept = list(loader)
        before = [batch.clone() for batch in kept]
        list(loader)
        assert_same(kept, before)

    # Copies of a loader

    @pytest.mark.parametrize("num_workers", [0, 1])
    @pytest.mark.parametrize(
        "copied",
        [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))],
        ids=["copy", "deepcopy", "pickle"],
    )
    def test_a_copy_taken_in_mid_epoch_is_a_loader_of_its_own(
        self, backend: Backend, num_workers: int, copied: Any
    ) -> None:
        loader = self.loader(
            backend,
            dataset=MapDataset(tensor_sample),
            batch_size=2,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        iterator = iter(loader)
        first = next(iterator)
        other = copied(loader)
        assert type(other) is DataLoader
        assert set(vars(other)) - {"_session"} <= set(vars(loader))
        whole = list(other)
        assert len(whole) == len(loader)
        self.check_batches(backend, [first, *iterator], whole)

    def test_wrap_equals_the_loader_it_wraps(self, backend: Backend) -> None:
        self.loader(backend, dataset=MapDataset(dict_sample), batch_size=3, shuffle=True)
        theirs = torch.utils.data.DataLoader(MapDataset(dict_sample), batch_size=3, shuffle=True)
        ours = wrap(theirs, backend=backend)
        assert ours.backend is backend
        expected, got = run_epochs(theirs), run_epochs(ours)
        if backend.same_samples:
            assert_same_epochs(got, expected, states=self.same_random_streams)
        assert got.length == expected.length

    # Endings

    @pytest.mark.parametrize("num_workers", [0, 1])
    @pytest.mark.parametrize("place", ["dataset", "collate", "stream"])
    @pytest.mark.usefixtures("workers_end_fast")
    def test_an_error_is_torchs(self, backend: Backend, num_workers: int, place: str) -> None:
        if not backend.same_samples:
            pytest.skip(f"{backend.name} does not load the samples again")
        arguments: dict[str, Any] = {"dataset": MapDataset(fails_at_five), "batch_size": 2}
        if place == "collate":
            arguments = {"dataset": MapDataset(integer_sample), "collate_fn": cannot_collate}
        elif place == "stream":
            arguments = {"dataset": FailingStream(), "batch_size": 2}
        loader = self.loader(backend, num_workers=num_workers, **arguments)
        theirs = torch.utils.data.DataLoader(num_workers=num_workers, **arguments)
        ours, wanted = batches_before_error(loader), batches_before_error(theirs)
        assert ours == wanted
        assert ours[0] == (0 if place == "collate" else 2)

    @pytest.mark.usefixtures("workers_end_fast")
    def test_a_sample_that_hangs_is_torchs_time_out(self, backend: Backend) -> None:
        if not backend.same_samples:
            pytest.skip(f"{backend.name} does not load the samples again")
        arguments = {"dataset": MapDataset(hangs), "num_workers": 1, "timeout": 0.3}
        loader = self.loader(backend, **arguments)
        errors = []
        for each in (loader, torch.utils.data.DataLoader(**arguments)):
            with pytest.raises(RuntimeError, match="timed out") as caught:
                next(iter(each))
            errors.append((caught.type, str(caught.value)))
        assert errors[0] == errors[1]

    def test_the_epoch_after_an_error_is_whole(self, backend: Backend) -> None:
        if not backend.same_samples:
            pytest.skip(f"{backend.name} does not load the samples again")
        loader = self.loader(backend, dataset=MapDataset(fails_at_five), batch_size=2)
        for _ in range(2):
            iterator = iter(loader)
            assert len([next(iterator), next(iterator)]) == 2
            with pytest.raises(Unloadable):
                next(iterator)

    # What the plan and the device say

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_explain_never_raises(self, backend: Backend, case: Case) -> None:
        for loader in (
            DataLoader(backend=backend, **case.make()),
            wrap(torch.utils.data.DataLoader(**case.make(), num_workers=1), backend=backend),
        ):
            plan = loader.explain()
            assert plan.backend == backend.name
            assert plan.runs == (plan.obstacle is None)
            assert backend.name in str(plan)

    def test_batches_are_where_device_says(self, backend: Backend) -> None:
        loader = self.loader(backend, dataset=MapDataset(dict_sample), batch_size=4, device="cpu")
        for batch in loader:
            assert {leaf.device.type for leaf in leaves(batch)} == {"cpu"}

    @pytest.mark.gpu
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_batches_are_on_the_gpu_that_device_says(
        self, backend: Backend, num_workers: int
    ) -> None:
        arguments = {"dataset": MapDataset(dict_sample), "batch_size": 4, "shuffle": True}
        loader = self.loader(backend, device="cuda", num_workers=num_workers, **arguments)
        theirs = torch.utils.data.DataLoader(num_workers=num_workers, **arguments)
        seed_everything()
        ours = list(loader)
        seed_everything()
        cuda = torch.device("cuda", torch.cuda.current_device())
        self.check_batches(backend, ours, [to_device(batch, cuda) for batch in theirs])

    @pytest.mark.gpu
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_pinned_batches_are_pinned(self, backend: Backend, num_workers: int) -> None:
        if backend.delivers == "device":
            pytest.skip(f"{backend.name} delivers on the device, where nothing is pinned")
        arguments = {
            "dataset": MapDataset(dict_sample),
            "batch_size": 4,
            "num_workers": num_workers,
        }
        loader = self.loader(backend, pin_memory=True, **arguments)
        theirs = torch.utils.data.DataLoader(pin_memory=True, **arguments)
        ours = list(loader)
        self.check_batches(backend, ours, list(theirs))
        assert [leaf.is_pinned() for batch in ours for leaf in leaves(batch)] == [True] * 6

    def test_set_epoch_reaches_the_sampler(self, backend: Backend) -> None:
        sampler = EpochSampler(MapDataset(tensor_sample))
        loader = self.loader(backend, dataset=MapDataset(tensor_sample), sampler=sampler)
        loader.set_epoch(4)
        assert sampler.epoch == 4
        if backend.same_samples:
            assert float(next(iter(loader))[0, 0, 0]) == 4

    # What subclasses may use

    def check_equal(self, backend: Backend, case: Case, epochs: int = 2, **options: Any) -> None:
        ours = self.loader(backend, **case.make(), **options)
        expected = torchs(case, epochs, **options)
        got = run_epochs(ours, epochs)
        if backend.same_samples:
            assert_same_epochs(got, expected, states=self.same_random_streams)
            return
        assert got.length == expected.length
        if isinstance(got.length, int):
            assert [len(epoch) for epoch in got.batches] == [got.length] * epochs
        for epoch, wanted in zip(got.batches, expected.batches, strict=True):
            if wanted:
                assert {str(structure(batch)) for batch in epoch} == {str(structure(wanted[0]))}

    def check_batches(self, backend: Backend, ours: list[Any], theirs: list[Any]) -> None:
        if backend.same_samples:
            assert_same(ours, theirs)
        else:
            assert len(ours) == len(theirs)


@functools.cache
def torchs(case: Case, epochs: int, **options: Any) -> Epochs:
    """What torch's loader gives, the same for each backend; none of it in workers' memory."""
    return copy.deepcopy(run_epochs(torch.utils.data.DataLoader(**case.make(), **options), epochs))


class Unloadable(Exception):
    """An error of the user's own, with a message that torch can put its trace before."""


class EpochSampler(SequentialSampler):
    """Starts at the sample whose index is the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([(index + self.epoch) % SIZE for index in range(SIZE)])


class Shifted(MapDataset):
    """Samples moved by ``shift``, which a worker's set-up may change."""

    shift = 0

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.shift


class FailingStream(CountingStream):
    def __iter__(self) -> Any:
        yield from range(5)
        raise Unloadable("sample 5")


def shift_by_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.shift = 1000 * (worker + 1)


def hangs(index: int) -> int:
    threading.Event().wait()
    return index


def fails_at_five(index: int) -> int:
    if index == 5:
        raise Unloadable("sample 5")
    return index


def batches_before_error(loader: Any) -> tuple[int, str]:
    """How many batches came before the error, and the last line of its message."""
    batches = iter(loader)
    for seen in itertools.count():
        try:
            next(batches)
        except Unloadable as error:
            return seen, str(error).splitlines()[-1]
    raise AssertionError("the count never ends")


def cannot_collate(samples: list[int]) -> None:
    raise Unloadable("cannot collate")
