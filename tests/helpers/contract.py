"""The contract that every backend keeps: tests/test_contract.py has a class for each.

    class TestMine(BackendContract):
        tested = Mine()
        served = frozenset({"tensors", "dicts"})      which of `helpers.datasets.CASES` it serves
        refuses = "is not known to Mine"              what it says of the others

`EpochContract` is for a backend whose samples are not the dataset's own.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.data
from torch.utils._pytree import tree_map_only
from torch.utils.data import DistributedSampler, SequentialSampler, Subset, get_worker_info

from dataloaders import Backend, DataLoader, wrap
from dataloaders.errors import BackendUnavailable, CacheError
from helpers import ends
from helpers.compare import (
    assert_same,
    bits,
    run_epochs,
    same,
    seed_everything,
    structure,
    tensors_in,
)
from helpers.datasets import CASES, EVERYTHING, FEW, SIZE, CountingStream, MapDataset
from helpers.processes import Held, children, is_true_in_a_fork, wait_until_gone

WORKERS: dict[str, dict[str, Any]] = {
    "this process": {},
    "workers": {"num_workers": 1},
    "persistent workers": {"num_workers": 1, "persistent_workers": True},
}
in_every_process = pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
in_both_processes = pytest.mark.parametrize("workers", [{}, {"num_workers": 1}], ids=str)


class EpochContract:
    """Epochs, endings and plans: what holds whatever the samples are.

    Attributes:
        tested: the backend.
        served: names of the datasets that it serves.
        refuses: a pattern for what it says of every other one.
        everyday: the datasets of the default tests; nightly tests use all that are served.
        usual: the dataset of tests that need just one.
        options: what every loader of these tests is given.
        starts_workers: whether ``num_workers`` processes make the batches of the usual one.
        ends: how a script with live iterators ends by day; nightly tests try every way.
        fails_in: where a loader may fail in an epoch: `BackendContract.fails` gives one.
    """

    tested: ClassVar[Backend]
    served: ClassVar[frozenset[str]] = EVERYTHING
    refuses: ClassVar[str] = "nothing is refused"
    everyday: ClassVar[Iterable[str]] = FEW
    usual: ClassVar[str] = "dicts"
    options: ClassVar[dict[str, Any]] = {}
    starts_workers: ClassVar[bool] = True
    ends: ClassVar[tuple[str, ...]] = ("module level",)
    fails_in: ClassVar[tuple[str, ...]] = ("dataset", "collate", "sampler", "stream")

    @pytest.fixture
    def backend(self) -> Backend:
        return self.tested

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test for each value, nightly if it is not an everyday one."""
        served = [name for name in CASES if name in self.served]
        for argument, values, everyday in (
            ("place", self.fails_in, self.fails_in),
            ("way", ends.SOURCES, self.ends),
            ("case", served, self.everyday),
            ("case_with_workers", served, FEW),
        ):
            if argument in metafunc.fixturenames:
                marks = {each: () if each in everyday else pytest.mark.nightly for each in values}
                params = [pytest.param(each, marks=mark) for each, mark in marks.items()]
                metafunc.parametrize(argument, params)

    def arguments(self) -> dict[str, Any]:
        """Return the usual dataset, in order, and the other arguments of a loader."""
        return {**CASES[self.usual](), "shuffle": False}

    def loader(self, backend: Backend, **arguments: Any) -> DataLoader[Any]:
        """Return a loader on the backend under test, which serves it."""
        loader: DataLoader[Any] = DataLoader(backend=backend, **{**self.options, **arguments})
        assert loader.explain().obstacle is None
        return loader

    def check_batches(self, backend: Backend, ours: list[Any], theirs: list[Any]) -> None:
        """Check that the batches are torch's, where the backend gives torch's samples."""
        assert len(ours) == len(theirs)
        if backend.name != "synthetic":
            assert_same(ours, theirs)
        else:
            assert set(map(structure, ours)) == set(map(structure, theirs))

    # Structure

    @pytest.mark.thinned(2)
    def test_batches_are_like_torchs(self, backend, case):
        got = run_epochs(self.loader(backend, **CASES[case]()))
        expected = torchs(case)
        assert got.length == expected.length
        for ours, theirs in zip(got.batches, expected.batches, strict=True):
            self.check_batches(backend, ours, theirs)

    # Epochs, breaks and several iterators

    @in_both_processes
    def test_a_break_leaves_a_fresh_next_epoch_and_two_iterators_are_independent(
        self, backend, workers
    ):
        arguments = {**self.arguments(), "batch_size": 3, "shuffle": True, **workers}
        loader = self.loader(backend, **arguments)
        theirs = torch.utils.data.DataLoader(**arguments)
        results = []
        for each in (loader, theirs):
            seed_everything()
            broken_off = list(itertools.islice(each, 2))
            one, two = iter(each), iter(each)
            taken = [batch for _ in range(2) for batch in (next(one), next(two))]
            results.append([*broken_off, *taken, *two, *one])
        self.check_batches(backend, *results)

    @in_both_processes
    def test_an_iterator_ends_for_good_and_its_batches_can_be_kept(self, backend, workers):
        loader = self.loader(backend, **self.arguments(), **workers)
        iterator = iter(loader)
        assert iter(iterator) is iterator
        assert len(iterator) == len(loader)
        kept = list(iterator)
        before = copy.deepcopy(kept)
        assert [next(iterator, None) for _ in range(2)] == [None, None]
        assert len(list(loader)) == len(kept) == 3
        assert_same(kept, before)

    @in_both_processes
    def test_a_copy_taken_in_mid_epoch_is_a_loader_of_its_own(self, backend, workers):
        loader = self.loader(backend, **self.arguments(), **workers)
        iterator = iter(loader)
        first = next(iterator)
        copies = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
        wholes = [list(each) for each in copies[: 3 if not workers else 1]]
        for each in copies:
            assert type(each) is DataLoader
            assert set(vars(each)) - {"_session"} <= set(vars(loader))
        ours = [first, *iterator]
        for whole in wholes:
            self.check_batches(backend, ours, whole)

    @in_both_processes
    def test_an_empty_dataset_ends_at_once(self, backend, workers):
        nothing = Subset(self.arguments()["dataset"], [])
        empty = self.loader(backend, dataset=nothing, sampler=SequentialSampler(nothing), **workers)
        assert [list(empty), list(empty), len(empty)] == [[], [], 0]

    # Endings

    @pytest.mark.thinned(3)
    @in_every_process
    def test_nothing_outlives_a_loader(self, backend, workers):
        """However its epochs ended, and without the garbage collector."""
        count = workers.get("num_workers", 0) * self.starts_workers
        list(self.loader(backend, **self.arguments(), **workers))  # what is built once, is
        before = Held.now()
        gc.disable()
        try:
            loader = self.loader(backend, **self.arguments(), **workers)
            iterator = iter(loader)
            next(iterator)
            started = children() - before.processes
            assert len(started) == count
            del iterator
            whole = list(loader)
            with pytest.raises(StepFailed):
                train(loader)
            list(loader)
            if "persistent_workers" in workers:
                assert children() - before.processes == started
            iterator = iter(loader)
            next(iterator)
            del loader
            assert len(list(iterator)) == len(whole) - 1
            del iterator, whole
            assert before.left_behind() == []
            after = Held.now()
            assert (after.files <= before.files, after.shared) == (True, before.shared)
        finally:
            gc.enable()

    @pytest.mark.thinned(3)
    @in_every_process
    def test_a_forked_child_has_batches_of_its_own(self, backend, workers):
        loader = self.loader(backend, **self.arguments(), **workers)
        whole = list(loader)
        # While it lives in a variable, nothing can free the iterator that the child inherits.
        iterator = None if "persistent_workers" in workers else iter(loader)
        before = children()

        def child() -> bool:
            ours = list(loader)
            gc.collect()
            return same(ours, whole) or backend.name == "synthetic"

        assert is_true_in_a_fork(child)
        assert children() == before
        if iterator is not None:
            self.check_batches(backend, list(iterator), whole)
        self.check_batches(backend, list(loader), whole)

    @pytest.mark.parametrize("workers", [{}, WORKERS["persistent workers"]], ids=str)
    def test_another_backend_ends_what_this_one_held(self, backend, workers):
        list(self.loader(backend, **self.arguments(), **workers))  # what is built once, is
        before = Held.now()
        loader = self.loader(backend, **self.arguments(), **workers)
        iterator = iter(loader)
        next(iterator)
        loader.backend = "stock" if backend.name == "synthetic" else "synthetic"
        other = iter(loader)
        next(other)
        try:
            assert len(list(iterator)) == len(loader) - 1
        except RuntimeError:
            pass  # a session that was closed may raise, and must not hang
        del iterator, other
        loader.backend = "synthetic"
        next(iter(loader))
        assert before.left_behind() == []

    def test_frameworks_shut_workers_down_where_torch_keeps_them(self, backend):
        arguments = {**self.arguments(), **WORKERS["persistent workers"]}
        list(self.loader(backend, **arguments))  # what is built once, is
        loader, before = self.loader(backend, **arguments), children()
        whole = list(loader)
        started = list(children() - before)
        assert bool(started) == self.starts_workers
        if started:
            loader._iterator._shutdown_workers()  # as Lightning does at the end of a run
            loader._iterator = None
        assert wait_until_gone(started) == []
        self.check_batches(backend, list(loader), whole)

    def test_a_script_ends_cleanly_while_its_iterators_live(self, backend, way, tmp_path):
        case = "large tensors"
        next(iter(self.loader(backend, **CASES[case]())))  # what is built once, is
        alive = []
        for workers in WORKERS.values():
            started = workers.get("num_workers", 0) * self.starts_workers
            alive.append(ends.Alive(backend, case, {**self.options, **workers}, started))
        ends.assert_ends_cleanly(tmp_path, alive, way)

    # What the plan and the device say

    def test_every_dataset_is_explained_and_the_others_are_refused(self, backend):
        for case, make in CASES.items():
            if case in self.served and case not in FEW:
                continue  # `loader` looks at those whose batches are compared
            loader: DataLoader[Any] = DataLoader(backend=backend, **{**self.options, **make()})
            plan = loader.explain()
            assert plan.backend == backend.name
            assert plan.runs == (plan.obstacle is None)
            assert backend.name in str(plan)
            if case in self.served:
                assert plan.runs, plan.obstacle
            else:
                with pytest.raises((BackendUnavailable, CacheError), match=self.refuses):
                    next(iter(loader))

    def test_batches_are_where_device_says(self, backend):
        loader = self.loader(backend, **{**self.arguments(), "device": "cpu"})
        for batch in loader:
            assert {leaf.device.type for leaf in tensors_in(batch)} == {"cpu"}

    @pytest.mark.gpu
    @in_both_processes
    def test_batches_are_on_the_gpu_that_device_says(self, backend, workers):
        arguments = {**self.arguments(), "shuffle": True, **workers}
        loader = self.loader(backend, **{**arguments, "device": "cuda"})
        theirs = torch.utils.data.DataLoader(**arguments)
        seed_everything()
        ours = list(loader)
        seed_everything()
        expected = tree_map_only(torch.Tensor, lambda leaf: leaf.to("cuda"), list(theirs))
        self.check_batches(backend, ours, expected)


class BackendContract(EpochContract):
    """For a backend that gives the dataset's own samples: torch's batches, to the bit."""

    def fails(self, place: str) -> dict[str, Any]:
        """Return the arguments of a loader that fails in ``place``."""
        return {
            "dataset": {"dataset": MapDataset(fails_at_five), "batch_size": 2},
            "collate": {**self.arguments(), "collate_fn": cannot_collate},
            "sampler": {**self.arguments(), "batch_size": 2, "sampler": FailingStream()},
            "stream": {"dataset": FailingStream(), "batch_size": 2},
        }[place]

    def check_equal(self, backend: Backend, case: str, **options: Any) -> None:
        """Check that epochs over ``case`` are torch's, and leave generators as torch does."""
        got = run_epochs(self.loader(backend, **CASES[case](), **options))
        assert_same(got, torchs(case, **options))

    # The same as torch's loader

    def test_batches_are_like_torchs(self, backend, case):
        self.check_equal(backend, case)

    @pytest.mark.thinned(3)
    def test_batches_of_workers_are_torchs(self, backend, case_with_workers):
        self.check_equal(backend, case_with_workers, num_workers=2)

    def test_batches_of_persistent_workers_are_torchs(self, backend):
        self.check_equal(backend, self.usual, num_workers=2, persistent_workers=True)

    @pytest.mark.nightly
    @pytest.mark.parametrize("start", ["forkserver", "spawn"])
    def test_the_start_method_of_workers_changes_nothing(self, backend, start):
        for name in {self.usual, "tensors", "one tensor", "folder of photos"} & self.served:
            arguments = {**CASES[name](), "shuffle": False}
            started = {"num_workers": 1, "multiprocessing_context": start}
            # Torch's in one process: its batches are the same, and it starts no worker for seconds.
            theirs = torch.utils.data.DataLoader(**arguments)
            assert_same(list(self.loader(backend, **arguments, **started)), list(theirs))

    def test_without_order_the_batches_are_the_same_ones(self, backend):
        arguments = {**self.arguments(), "batch_size": 2, "num_workers": 2}
        loader = self.loader(backend, in_order=False, **arguments)
        theirs = sorted(str(bits(batch)) for batch in torch.utils.data.DataLoader(**arguments))
        for _ in range(2):
            assert sorted(str(bits(batch)) for batch in loader) == theirs

    def test_worker_init_fn_runs_in_each_worker(self, backend):
        for arguments in ({**self.arguments(), "seed": 3}, CASES["tensors"]()):
            noted = Noted(arguments["dataset"] if "dataset" in self.fails_in else None)
            list(self.loader(backend, **arguments, num_workers=2, worker_init_fn=noted))
            assert (noted.calls >= 1).all()

    def test_wrap_equals_the_loader_it_wraps(self, backend):
        arguments = {**self.arguments(), "shuffle": True}
        theirs = torch.utils.data.DataLoader(**arguments)
        ours = wrap(theirs, backend=backend, **self.options)
        assert ours.backend is backend
        assert_same(run_epochs(ours), run_epochs(theirs))

    def test_set_epoch_reaches_the_sampler(self, backend):
        arguments, sampler = self.arguments(), DistributedSampler(range(SIZE), 1, 0)
        loader = self.loader(backend, **{**arguments, "sampler": sampler})
        loader.set_epoch(4)
        assert sampler.epoch == 4
        theirs = torch.utils.data.DataLoader(**{**arguments, "sampler": sampler})
        assert_same(list(loader), list(theirs))
        assert_same(next(iter(loader)), next(iter(theirs)))

    # Errors

    @pytest.mark.thinned(3)
    @in_both_processes
    @pytest.mark.usefixtures("workers_end_fast")
    def test_an_error_is_torchs_and_the_next_epoch_begins_anew(self, backend, workers, place):
        arguments = {**self.fails(place), **workers}
        before = Held.now()
        loader = self.loader(backend, **arguments)
        ours = [batches_before_error(loader) for _ in range(2)]
        assert ours == [batches_before_error(torch.utils.data.DataLoader(**arguments))] * 2
        del loader
        gc.collect()
        assert before.left_behind() == []

    @pytest.mark.usefixtures("workers_end_fast")
    def test_a_sample_that_hangs_is_torchs_time_out(self, backend):
        if "dataset" not in self.fails_in:
            pytest.skip(f"{backend.name} does not load this dataset's samples in workers")
        loader = self.loader(backend, dataset=MapDataset(hangs), num_workers=1, timeout=0.3)
        with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0\.3 seconds$"):
            next(iter(loader))

    @pytest.mark.gpu
    @in_both_processes
    def test_pinned_batches_are_pinned(self, backend, workers):
        if backend.delivers == "device":
            pytest.skip(f"{backend.name} delivers on the device, where nothing is pinned")
        arguments = {**self.arguments(), **workers}
        ours = list(self.loader(backend, pin_memory=True, **arguments))
        assert_same(ours, list(torch.utils.data.DataLoader(pin_memory=True, **arguments)))
        assert all(leaf.is_pinned() for leaf in tensors_in(ours))


@functools.cache
def torchs(case: str, **options: Any) -> Any:
    """Return what torch's loader gives, for all backends; none of it in workers' memory."""
    return copy.deepcopy(run_epochs(torch.utils.data.DataLoader(**CASES[case](), **options)))


class Unloadable(Exception):
    """A user's own error, to whose message torch can add its trace."""


class StepFailed(Exception):
    """An error of the training step."""


def train(loader: Iterable[Any]) -> None:
    for _ in loader:
        raise StepFailed


class FailingStream(CountingStream):
    def __iter__(self) -> Any:
        yield from range(5)
        raise Unloadable("sample 5")


class Noted:
    """A worker_init_fn that counts its calls, by worker, which sees this dataset."""

    def __init__(self, dataset: Any) -> None:
        self.calls, self.dataset = torch.zeros(2).share_memory_(), dataset

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        assert info.id == worker
        assert self.dataset is None or info.dataset is self.dataset  # forked, not pickled
        self.calls[worker] += 1


def hangs(index: int) -> None:
    threading.Event().wait()


def fails_at_five(index: int) -> int:
    if index == 5:
        raise Unloadable("sample 5")
    return index


def batches_before_error(loader: Any) -> tuple[int, str]:
    """Return how many batches came before the error, and the last line of its message."""
    batches: list[Any] = []
    with pytest.raises(Unloadable) as caught:
        batches.extend(loader)
    return len(batches), str(caught.value).splitlines()[-1].rpartition(": ")[2]


def cannot_collate(samples: list[int]) -> None:
    raise Unloadable("cannot collate")
