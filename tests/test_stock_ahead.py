"""stock, taken by a thread: torch's order to the bit, and no gap between epochs."""

from __future__ import annotations

import gc
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from backends.stock import Stock
from backends.stock.ahead import AheadWorkers
from backends.stock.ahead_indices import Dry, Indices
from backends.stock.ahead_next import indices_of, no_foresight
from dataloaders import DataLoader
from dataloaders.backend import Ahead, Cancelled, Session
from helpers.compare import (
    Epochs,
    assert_same,
    assert_same_epochs,
    generator_states,
    run_epochs,
    seed_everything,
)
from helpers.contract import Unloadable, batches_before_error, fails_at_five, hangs
from helpers.datasets import (
    CASES,
    SIZE,
    Case,
    CountingStream,
    MapDataset,
    dict_sample,
    integer_sample,
)
from helpers.processes import children, open_files, run_script, wait_until_gone

WORKER_CASES = tuple(case for case in CASES if case.workers)
DEPTH = 2


@pytest.fixture(autouse=True, scope="module")  # a collection takes as long as a test
def _nothing_left_behind() -> Any:
    gc.collect()
    before = children()
    yield
    gc.collect()
    assert wait_until_gone(list(children() - before)) == []


class Driven:
    """A loader whose every epoch is taken by a thread of its own, as far ahead as `DEPTH`.

    Iterating it gives the batches on the caller's thread, which alone supplies indices.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.session: Session = Stock().open(loader)
        self.generator = loader.generator

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        ahead = self.begin()
        return taken_ahead(ahead)

    def begin(self) -> Ahead:
        ahead = self.session.epoch_ahead()
        assert ahead is not None
        self.loader._iterations += 1  # as the loader's own __iter__ counts
        return ahead


def taken_ahead(ahead: Ahead) -> Iterator[Any]:
    ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    permits = threading.Semaphore(DEPTH)

    def take() -> None:
        while True:
            permits.acquire()
            try:
                ready.put(("batch", next(ahead)))
            except StopIteration:
                return ready.put(("end", None))
            except Cancelled:
                return None
            except BaseException as error:
                ready.put(("error", error))

    ahead.supply(max(0, DEPTH - ahead.in_flight))
    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        while True:
            failure = None
            try:
                ahead.supply(1)
            except Exception as error:
                failure = error
            ahead.awaited()
            kind, value = ready.get(timeout=30)
            if kind == "end":
                return
            permits.release()
            if failure is not None:
                raise failure
            if kind == "error":
                raise value
            yield value
            del value
    finally:
        value = failure = None  # a traceback holds this frame, which must not hold its error
        ahead.cancel()
        permits.release()
        thread.join(10)
        assert not thread.is_alive()


def driven(**arguments: Any) -> Driven:
    return Driven(DataLoader(**arguments))


def iterator_of(ours: Driven) -> AheadWorkers:
    assert isinstance(ours.loader._iterator, AheadWorkers)
    return ours.loader._iterator


class Resumes:
    """Counts the round trips in which torch's iterator restarts its workers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        whole = AheadWorkers._reset_as_torch

        def counted(workers: Any, loader: Any, first_iter: bool, early: Any) -> None:
            self.count += not first_iter
            whole(workers, loader, first_iter, early)

        monkeypatch.setattr(AheadWorkers, "_reset_as_torch", counted)


@pytest.fixture
def resumes(monkeypatch: pytest.MonkeyPatch) -> Resumes:
    return Resumes(monkeypatch)


class Augmented(MapDataset):
    """Samples with draws from every process-wide generator of the worker, and its epoch."""

    epoch = 0

    def __init__(self, size: int = 24) -> None:
        super().__init__(integer_sample, size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return (
            super().__getitem__(index),
            torch.rand(2),
            float(np.random.rand()),
            self.epoch,
            -1 if info is None else info.id,
        )


class PlainAugmented(Augmented):
    set_epoch = None  # type: ignore[assignment]


def persistent(dataset: Any = None, **options: Any) -> dict[str, Any]:
    return {
        "dataset": PlainAugmented() if dataset is None else dataset,
        "batch_size": 2,
        "num_workers": 2,
        "persistent_workers": True,
        **options,
    }


def several_epochs(make: Callable[[], Any], between: Callable[[Any, int], None], count: int) -> Any:
    """Batches and generator states of ``count`` epochs, with ``between`` called before each."""
    seed_everything()
    loader = make()
    result = []
    for epoch in range(count):
        between(getattr(loader, "loader", loader), epoch)
        result.append(([*loader], generator_states(loader)))
    return result


def nothing(loader: Any, epoch: int) -> None:
    pass


# The same as torch's loader


@pytest.mark.parametrize("case", WORKER_CASES, ids=str)
def test_persistent_workers_on_a_thread_equal_torch(case: Case) -> None:
    # One worker: two of them take turns in the tests of foreseen epochs below.
    options = {"num_workers": 1, "persistent_workers": True}
    expected = run_epochs(torch.utils.data.DataLoader(**case.make(), **options), epochs=3)
    assert_same_epochs(run_epochs(driven(**case.make(), **options), epochs=3), expected)


@pytest.mark.parametrize("case", WORKER_CASES[::6], ids=str)
def test_new_workers_on_a_thread_equal_torch(case: Case) -> None:
    expected = run_epochs(torch.utils.data.DataLoader(**case.make(), num_workers=2))
    assert_same_epochs(run_epochs(driven(**case.make(), num_workers=2)), expected)


def test_gathers_on_a_thread_equal_torch() -> None:
    taken = 0
    for case in CASES:
        loader: DataLoader[Any] = DataLoader(**case.make())
        if not Stock().takes_ahead(loader):  # the user's own code would run
            assert Stock().open(loader).epoch_ahead() is None
            continue
        taken += 1
        expected = run_epochs(torch.utils.data.DataLoader(**case.make()))
        assert_same_epochs(run_epochs(Driven(loader)), expected)
    assert taken > 10


def test_which_loaders_are_taken_ahead() -> None:
    tensors = TensorDataset(torch.arange(8.0))
    taken = Stock().takes_ahead
    assert taken(DataLoader(tensors))
    assert taken(DataLoader(MapDataset(integer_sample), num_workers=1))
    assert not taken(DataLoader(MapDataset(integer_sample)))
    assert not Stock(gather=False).takes_ahead(DataLoader(tensors))

    class OwnIterator(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return super()._get_iterator()

    assert not taken(OwnIterator(tensors, num_workers=1))
    assert len(list(OwnIterator(tensors, num_workers=1, persistent_workers=True))) == 8


def test_the_iterator_of_persistent_workers_has_torchs_name_in_profiles() -> None:
    loader: DataLoader[Any] = DataLoader(**persistent(), backend="prefetch")
    iterator = iter(loader)
    assert "#_MultiProcessingDataLoaderIter.__next__" in iterator._profile_name
    assert len(iterator) == len(loader) == len(list(iterator))


def test_without_order_the_batches_are_the_same_ones() -> None:
    ours = driven(dataset=MapDataset(integer_sample), batch_size=2, num_workers=2, in_order=False)
    for _ in range(2):
        got = sorted(value for batch in ours for value in batch.tolist())
        assert got == [3 * index for index in range(SIZE)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 7])
def test_seeded_loaders_give_what_they_give_undriven(num_workers: int, seed: int | None) -> None:
    tensors = TensorDataset(torch.arange(30.0))
    arguments = {"dataset": tensors, "batch_size": 4, "shuffle": True, "num_workers": num_workers}
    expected = run_epochs(DataLoader(**arguments, seed=seed), epochs=3)
    got = run_epochs(driven(**arguments, seed=seed), epochs=3)
    assert_same_epochs(got, expected)


# Samplers stay on the consumer's thread


class Whereabouts(Sampler[int]):
    """Notes the threads that it runs on."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.threads: set[int] = set()
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[int]:
        for index in torch.randperm(30).tolist() if self.fails_at is None else range(30):
            self.threads.add(threading.get_ident())
            if index == self.fails_at:
                raise Unloadable("the sampler")
            yield index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_sampler_runs_on_the_consumers_thread(num_workers: int) -> None:
    sampler = Whereabouts()
    tensors = TensorDataset(torch.arange(30.0))
    ours = driven(dataset=tensors, sampler=sampler, batch_size=2, num_workers=num_workers)
    theirs = torch.utils.data.DataLoader(tensors, sampler=Whereabouts(), batch_size=2)
    assert_same(run_epochs(ours).batches, run_epochs(theirs).batches)
    assert sampler.threads == {threading.get_ident()}


@pytest.mark.parametrize("fails_at", [1, 9, 29])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_raises_does_so_where_it_does_under_torch(
    num_workers: int, fails_at: int
) -> None:
    results = []
    for kind in (driven, torch.utils.data.DataLoader):
        loader = kind(
            dataset=TensorDataset(torch.arange(30.0)),
            sampler=Whereabouts(fails_at),
            batch_size=2,
            num_workers=num_workers,
        )
        results.append(batches_before_error_anywhere(loader))
    assert results[0] == results[1]


def batches_before_error_anywhere(loader: Any) -> int:
    seen: list[Any] = []
    with pytest.raises(Unloadable, match="the sampler"):
        seen.extend(loader)
    return len(seen)


def test_tasks_whose_indices_come_late_are_not_lost() -> None:
    ours = driven(dataset=MapDataset(integer_sample, 40), batch_size=2, num_workers=2)
    ahead = ours.begin()
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def take() -> None:
        for batch in ahead:
            got.put(batch.tolist())
        got.put(None)

    thread = threading.Thread(target=take)
    thread.start()
    batches = []
    # Nothing is supplied until the thread has used up all that was sent at iter().
    for _ in range(4):
        batches.append(got.get(timeout=20))
    with pytest.raises(queue.Empty):
        got.get(timeout=0.3)
    while True:
        ahead.supply(1)
        try:
            batch = got.get(timeout=0.02)
        except queue.Empty:
            continue
        if batch is None:
            break
        batches.append(batch)
    thread.join()
    assert [value for batch in batches for value in batch] == [3 * index for index in range(40)]


def test_indices_are_drawn_as_far_as_asked_and_an_error_waits_in_its_place() -> None:
    def source() -> Iterator[int]:
        drawn.append(0)
        yield 0
        drawn.append(1)
        yield 1
        raise Unloadable("third")

    drawn: list[int] = []
    indices = Indices(source())
    with pytest.raises(Dry):
        indices.take()
    indices.supply(1)
    indices.supply(1)
    assert drawn == [0]
    indices.supply(5)
    assert [indices.take(), indices.take()] == [0, 1]
    assert not indices.exhausted
    with pytest.raises(Unloadable, match="third"):
        indices.take()
    with pytest.raises(Dry):
        indices.take()
    with pytest.raises(StopIteration):
        indices.draw()


# Endings


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.usefixtures("workers_end_fast")
def test_an_error_in_a_worker_is_torchs(num_workers: int) -> None:
    arguments = {
        "dataset": MapDataset(fails_at_five),
        "batch_size": 2,
        "num_workers": num_workers,
    }
    wanted = batches_before_error(torch.utils.data.DataLoader(**arguments))
    assert batches_before_error(driven(**arguments)) == wanted


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 2}, "one of 2 samples: 4, 5"),
        ({"batch_size": None}, "sample 5"),
        ({"batch_size": 100, "sampler": [5, *[0] * 99]}, f"one of 100 samples: 5, {'0, ' * 63}..."),
    ],
    ids=["batches", "samples", "long batches"],
)
@pytest.mark.usefixtures("workers_end_fast")
def test_a_thread_that_takes_batches_names_the_samples_that_failed(
    options: dict[str, Any], named: str
) -> None:
    loader = DataLoader(MapDataset(fails_at_five), num_workers=2, backend="prefetch", **options)
    with pytest.raises(Unloadable) as caught:
        list(loader)
    number = {2: 3, None: 6, 100: 1}[options["batch_size"]]
    assert caught.value.__notes__ == [
        f"dataloaders: raised in a worker by {named}",
        f"dataloaders: while batch {number} of this epoch was taken ahead",
    ]


@pytest.mark.usefixtures("workers_end_fast")
def test_plain_stock_adds_nothing_to_an_error() -> None:
    loader = DataLoader(MapDataset(fails_at_five), batch_size=2, num_workers=1)
    with pytest.raises(Unloadable) as caught:
        list(loader)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.usefixtures("workers_end_fast")
def test_a_sample_that_hangs_is_torchs_time_out() -> None:
    ours = driven(dataset=MapDataset(hangs), num_workers=1, timeout=0.3)
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 0\.3 seconds$"):
        next(iter(ours))


@pytest.mark.usefixtures("workers_end_fast")
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_hanging_next_can_be_cancelled(persistent_workers: bool) -> None:
    ours = driven(dataset=MapDataset(hangs), num_workers=1, persistent_workers=persistent_workers)
    ahead = ours.begin()
    ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    started = threading.Event()

    def take() -> None:
        started.set()
        try:
            next(ahead)
        except BaseException as error:
            ended.put(error)

    thread = threading.Thread(target=take)
    thread.start()
    assert started.wait(10)
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.3)
    ahead.cancel()
    assert type(ended.get(timeout=5)) is Cancelled
    thread.join()
    for _ in range(2):
        with pytest.raises(Cancelled):
            next(ahead)


def test_an_epoch_ends_for_good_when_the_next_one_begins() -> None:
    ours = driven(**persistent())
    old = ours.begin()
    old.supply(5)
    next(old)
    new = ours.begin()
    with pytest.raises(Cancelled):
        next(old)
    old.supply(100)
    assert len(list(taken_ahead(new))) == 12


def test_a_thread_in_next_does_not_hold_up_the_next_epoch(tmp_path: Path) -> None:
    flag = tmp_path / "go"
    ours = driven(**persistent(WaitsFor(flag), batch_size=1))
    old = ours.begin()
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def take() -> None:
        try:
            next(old)
        except Cancelled:
            ended.put("cancelled")
        flag.touch()  # only now can the workers go on

    thread = threading.Thread(target=take)
    thread.start()
    assert len(list(ours)) == 4
    assert ended.get(timeout=5) == "cancelled"
    thread.join()


class WaitsFor(MapDataset):
    def __init__(self, flag: Path) -> None:
        super().__init__(integer_sample, 4)
        self.flag = flag

    def __getitem__(self, index: int) -> int:
        while not self.flag.exists():
            threading.Event().wait(0.01)
        return index


def test_shutting_down_the_workers_as_lightning_does_ends_a_thread_in_next() -> None:
    before = children()
    ours = driven(**persistent(MapDataset(hangs)))
    ahead = ours.begin()
    started = children() - before
    ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def take() -> None:
        try:
            next(ahead)
        except BaseException as error:
            ended.put(error)

    thread = threading.Thread(target=take)
    thread.start()
    for pid in started:  # they hang: torch would wait for five seconds before it ends them
        os.kill(pid, signal.SIGCONT)
    torch_interval = torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    try:
        ours.loader._iterator._shutdown_workers()
    finally:
        torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = torch_interval
    ours.loader._iterator = None
    assert type(ended.get(timeout=5)) is Cancelled
    thread.join()
    with pytest.raises(Cancelled):
        next(ahead)
    assert wait_until_gone(list(started)) == []


def test_workers_shut_down_between_epochs_are_started_again() -> None:
    ours = driven(**persistent())
    first = list(ours)
    ours.loader._iterator._shutdown_workers()
    ours.loader._iterator = None
    assert len(list(ours)) == len(first) == 12


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_dropped_loader_ends_its_workers_without_the_collector(persistent_workers: bool) -> None:
    before = children()
    gc.disable()
    try:
        ours = driven(**persistent(persistent_workers=persistent_workers))
        ahead = ours.begin()
        ahead.supply(20)
        for _ in range(10):  # the next epoch's first tasks are on their way
            next(ahead)
        started = children() - before
        assert len(started) == 2
        del ahead, ours
        assert wait_until_gone(list(started)) == []
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": MapDataset(fails_at_five)},
        {"dataset": MapDataset(integer_sample, 30), "sampler": Whereabouts(fails_at=9)},
    ],
    ids=["worker", "sampler"],
)
def test_an_error_ties_no_knot_that_keeps_the_workers(options: dict[str, Any]) -> None:
    before = children()
    gc.disable()
    try:
        ours = driven(**persistent(**options))
        batches = iter(ours)
        started = children() - before
        with pytest.raises(Unloadable) as caught:
            list(batches)
        assert caught.traceback[-1].name in ("reraise", "__iter__")
        del ours, batches, caught
        assert len(started) == 2
        assert wait_until_gone(list(started), timeout=4) == []
    finally:
        gc.enable()


def test_a_killed_worker_is_an_error_of_torchs(tmp_path: Path) -> None:
    # In an interpreter of its own: torch raises out of its SIGCHLD handler, wherever that runs.
    done = run_script(
        tmp_path,
        f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from dataloaders import DataLoader
        from test_stock_ahead import driven

        class Deadly:
            def __len__(self):
                return 10

            def __getitem__(self, index):
                if index == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                return index

        if __name__ == "__main__":
            list(driven(dataset=Deadly(), num_workers=1, collate_fn=list))
        """,
    )
    assert done.returncode == 1
    assert "RuntimeError: DataLoader worker (pid" in done.stderr
    assert "killed by signal" in done.stderr or "exited unexpectedly" in done.stderr


def test_200_short_epochs_leave_threads_files_and_children_flat() -> None:
    dataset = MapDataset(integer_sample)
    ours = driven(**persistent(dataset, shuffle=True, generator=torch.Generator()))

    def epochs(count: int) -> tuple[int, int, set[int]]:
        for _ in range(count):
            assert len(list(ours)) == 6
        for _ in range(count // 10):
            next(iter(ours))
        files = open_files()
        return threading.active_count(), files, children()

    threads, files, processes = epochs(20)
    threads_after, files_after, processes_after = epochs(200)
    # The tensors of early batches that were received are a few files; 200 leaks would show.
    assert files_after <= files + 20
    assert threads_after <= threads
    assert processes_after == processes


# Between epochs


def _weighted(dataset: Any) -> Any:
    return WeightedRandomSampler([1.0] * len(dataset), len(dataset), generator=torch.Generator())


FORESEEN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in order": lambda dataset: {},
    "shuffled": lambda dataset: {"shuffle": True},
    "own generator": lambda dataset: {"shuffle": True, "generator": torch.Generator()},
    "replacement": lambda dataset: {
        "sampler": RandomSampler(dataset, replacement=True, generator=torch.Generator())
    },
    "weighted": lambda dataset: {"sampler": _weighted(dataset)},
    "subset": lambda dataset: {
        "batch_sampler": BatchSampler(SubsetRandomSampler(range(3, 20)), 3, drop_last=True)
    },
    "distributed": lambda dataset: {"sampler": DistributedSampler(dataset, num_replicas=2, rank=1)},
    "no batches": lambda dataset: {"batch_size": None, "shuffle": True},
    "shorter than what is in flight": lambda dataset: {"batch_size": 11, "shuffle": True},
    "as long as what is in flight": lambda dataset: {"batch_size": 6, "shuffle": True},
    "one sample": lambda dataset: {"sampler": SequentialSampler([0]), "batch_size": 1},
}


def _foreseen(name: str, dataset: Any = None) -> dict[str, Any]:
    arguments = persistent(dataset)
    options = FORESEEN[name](arguments["dataset"])
    if "batch_sampler" in options:
        del arguments["batch_size"]
    return {**arguments, **options}


@pytest.mark.parametrize("name", FORESEEN)
def test_the_next_epoch_is_foreseen_and_is_torchs_to_the_bit(name: str, resumes: Resumes) -> None:
    """Order, the workers' own random streams, and generator states after each epoch."""

    def between(loader: Any, epoch: int) -> None:
        if name == "distributed":
            loader.sampler.set_epoch(epoch)

    expected = several_epochs(
        lambda: torch.utils.data.DataLoader(**_foreseen(name)), between, count=3
    )
    got = several_epochs(lambda: driven(**_foreseen(name)), between, count=3)
    assert_same(got, expected)
    assert resumes.count == 0


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("seed", [0, 7])
def test_a_seeded_epoch_is_foreseen(seed: int, gathers: bool, resumes: Resumes) -> None:
    dataset = TensorDataset(torch.arange(24)) if gathers else PlainAugmented()
    arguments = persistent(dataset, shuffle=True, seed=seed)
    expected = several_epochs(lambda: DataLoader(**arguments), nothing, count=4)
    got = several_epochs(lambda: driven(**arguments), nothing, count=4)
    assert_same(got, expected)
    assert resumes.count == 0


@pytest.mark.parametrize("name", [name for name in FORESEEN if name != "no batches"])
def test_quickly_drawn_indices_are_plain_ints_and_torchs(name: str) -> None:
    results = []
    for draw in (indices_of, iter):
        seed_everything()
        sampler = DataLoader(**_foreseen(name))._index_sampler
        drawn = list(draw(sampler))
        results.append((drawn, torch.get_rng_state()))
    assert_same(*results)


def test_early_tasks_run_while_the_last_batches_are_still_to_be_taken() -> None:
    ours = driven(**persistent(shuffle=True))
    ahead = ours.begin()
    ahead.supply(20)
    taken = [next(ahead) for _ in range(11)]
    workers = iterator_of(ours)
    assert workers._send_idx == 12 + 3  # all of this epoch's, three of the next one's
    taken += list(ahead)
    assert len(taken) == 12
    assert workers._send_idx == 12 + 4
    assert workers._early is not None
    assert workers._early.sent == 4


def _draw(loader: Any, epoch: int) -> None:
    if epoch == 2:
        torch.rand(3)


def _shorten(loader: Any, epoch: int) -> None:
    loader.dataset.size = 24 - 2 * epoch


def _other_seed(loader: Any, epoch: int) -> None:
    if epoch == 2:
        loader.generator.manual_seed(9)


def _other_batches(loader: Any, epoch: int) -> None:
    loader.batch_sampler.batch_size = 2 + epoch


def _jump(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch((0, 5, 1, 1, 2)[epoch])


MISSES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any, int], None]]] = {
    "a draw in between": (lambda: persistent(shuffle=True), _draw),
    "another length": (lambda: persistent(shuffle=True), _shorten),
    "another seed": (
        lambda: persistent(shuffle=True, generator=torch.Generator()),
        _other_seed,
    ),
    "other batches": (lambda: persistent(shuffle=True), _other_batches),
    "another epoch": (
        lambda: persistent(
            sampler=DistributedSampler(MapDataset(integer_sample, 24), num_replicas=2, rank=0)
        ),
        _jump,
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_a_wrong_guess_leaves_no_trace(name: str, resumes: Resumes) -> None:
    make, between = MISSES[name]
    expected = several_epochs(lambda: torch.utils.data.DataLoader(**make()), between, count=5)
    got = several_epochs(lambda: driven(**make()), between, count=5)
    assert_same(got, expected)
    assert resumes.count > 0


def test_after_a_guess_that_nothing_explains_there_is_no_further_one() -> None:
    ours = driven(**persistent(shuffle=True))
    for epoch in range(3):
        torch.rand(2 * epoch + 1)  # no number of seeds draws that
        list(ours)
        assert (iterator_of(ours)._early is not None) == (epoch == 0)


def test_a_validation_loop_between_epochs_is_learned(resumes: Resumes) -> None:
    def between(loader: Any, epoch: int) -> None:
        if epoch:
            for _ in torch.utils.data.DataLoader(MapDataset(integer_sample), shuffle=True):
                pass

    make = persistent
    theirs = several_epochs(
        lambda: torch.utils.data.DataLoader(**make(shuffle=True)), between, count=5
    )
    ours = several_epochs(lambda: driven(**make(shuffle=True)), between, count=5)
    assert_same(ours, theirs)
    assert resumes.count == 1  # the first gap taught that two seeds are drawn


def test_a_sampler_whose_epoch_never_moves_is_learned(resumes: Resumes) -> None:
    sampler = DistributedSampler(MapDataset(integer_sample, 24), num_replicas=2, rank=0)
    ours = driven(**persistent(sampler=sampler))
    epochs = [[batch[0].tolist() for batch in ours] for _ in range(4)]
    assert epochs[1:] == epochs[:1] * 3
    assert resumes.count == 1


@pytest.mark.parametrize("taken", [1, 9, 11])
def test_a_break_is_torchs_break(taken: int) -> None:
    """The order after it; the streams of workers that ran further ahead are another matter."""

    def orders(loader: Any) -> list[Any]:
        seed_everything()
        found = []
        for most in (12, taken, 12):
            epoch = [batch[0].tolist() for batch, _ in zip(loader, range(most), strict=False)]
            found.append(epoch)
        return found

    # In order the samples are known; a shuffled one would have drawn further ahead.
    theirs = orders(torch.utils.data.DataLoader(**persistent()))
    assert orders(driven(**persistent())) == theirs


@pytest.mark.parametrize("size", [8, 24])
def test_a_loop_that_stops_at_the_last_batch_has_ended_its_epoch(
    size: int, resumes: Resumes
) -> None:
    ours = driven(**persistent(PlainAugmented(size)))
    orders = []
    for _ in range(3):
        ahead = ours.begin()
        batches = []
        for taken in range(size // 2):  # as a framework that counts by len()
            if taken >= 4:
                ahead.supply(1)
            batches.append(next(ahead)[0].tolist())
        ahead.supply(1)  # with 8 samples, only this comes upon the sampler's end
        orders.append(batches)
    assert orders == [orders[0]] * 3
    assert resumes.count == 0


def test_an_epoch_that_no_thread_takes_has_torchs_own_workers() -> None:
    ours = driven(**persistent(shuffle=True, seed=3))
    theirs: DataLoader[Any] = DataLoader(**persistent(shuffle=True, seed=3))
    assert_same(list(ours), list(theirs))
    batches = ours.session.epoch()
    assert type(batches) is torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    assert_same(list(batches), list(theirs))


def test_why_an_epoch_is_not_foreseen() -> None:
    base = {"dataset": MapDataset(integer_sample), "num_workers": 1}
    kept = {**base, "persistent_workers": True}
    stream = {**kept, "dataset": CountingStream()}
    assert no_foresight(DataLoader(**kept)) is None
    for arguments, words in (
        ({}, "num_workers=0"),
        (base, "persistent_workers=True keeps them"),
        (stream, "iterable dataset"),
        ({**kept, "in_order": False}, "in_order=False"),
        ({**kept, "sampler": Whereabouts()}, "Whereabouts, the sampler,"),
        ({**kept, "sampler": [2, 1]}, "list, the sampler,"),
        ({**kept, "batch_sampler": [[1]]}, "list, the batch_sampler,"),
    ):
        loader: DataLoader[Any] = DataLoader(**{"dataset": base["dataset"], **arguments})
        assert words in str(no_foresight(loader))
        assert words in Stock().between_epochs(loader)
    assert "begin the next epoch while" in Stock().between_epochs(DataLoader(**kept))


def test_a_custom_sampler_is_not_guessed_and_equals_torch(resumes: Resumes) -> None:
    make = lambda: persistent(sampler=Whereabouts(), dataset=MapDataset(integer_sample, 30))  # noqa: E731
    expected = several_epochs(lambda: torch.utils.data.DataLoader(**make()), nothing, count=3)
    assert_same(several_epochs(lambda: driven(**make()), nothing, count=3), expected)
    assert resumes.count == 2


# set_epoch


class EpochStream(IterableDataset[Any]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", [Augmented, EpochStream])
def test_set_epoch_reaches_the_datasets_of_persistent_workers(seed: int | None, kind: Any) -> None:
    ours = driven(**persistent(kind(), seed=seed))
    for epoch in (0, 1, 2, 7, 7, 3, 4):
        ours.loader.set_epoch(epoch)
        epochs = {int(e) for batch in ours for e in (batch[3] if kind is Augmented else batch)}
        assert epochs == {epoch}


def test_a_datasets_foreseen_epoch_saves_the_round_trip(resumes: Resumes) -> None:
    ours = driven(**persistent(Augmented()))
    for epoch in range(4):
        ours.loader.set_epoch(epoch)
        assert {int(e) for batch in ours for e in batch[3]} == {epoch}
    assert resumes.count == 0
    ours.loader.set_epoch(9)
    assert {int(e) for batch in ours for e in batch[3]} == {9}
    assert resumes.count == 1


def test_a_dataset_that_no_set_epoch_was_called_for_keeps_its_own() -> None:
    dataset = Augmented()
    dataset.epoch = 5
    ours = driven(**persistent(dataset))
    for _ in range(3):
        assert {int(e) for batch in ours for e in batch[3]} == {5}


def test_workers_that_are_not_forks_are_told_too(resumes: Resumes) -> None:
    ours = driven(**persistent(Augmented(), num_workers=1, multiprocessing_context="forkserver"))
    for epoch in range(2):
        ours.loader.set_epoch(epoch)
        assert {int(e) for batch in ours for e in batch[3]} == {epoch}
    assert resumes.count == 0


@pytest.mark.gpu
def test_pinned_batches_are_pinned_and_torchs() -> None:
    arguments = persistent(MapDataset(dict_sample), shuffle=True, pin_memory=True)
    expected = run_epochs(torch.utils.data.DataLoader(**arguments), epochs=3)
    got: Epochs = run_epochs(driven(**arguments), epochs=3)
    assert_same_epochs(got, expected)
    assert got.batches[0][0]["image"].is_pinned()


@pytest.mark.gpu
def test_a_gather_on_a_thread_pins() -> None:
    tensors = TensorDataset(torch.arange(60.0))
    batches = list(driven(dataset=tensors, batch_size=7, pin_memory=True))
    assert all(batch[0].is_pinned() for batch in batches)
    assert torch.equal(torch.cat([batch[0] for batch in batches]), tensors.tensors[0])


@pytest.mark.usefixtures("workers_end_fast")
def test_a_sample_that_cannot_be_loaded_in_an_early_task_fails_its_own_epoch() -> None:
    # Sample 5 fails in each epoch; the first tasks of a shuffled one may hold it.
    arguments = persistent(MapDataset(fails_at_five, 6), batch_size=1, shuffle=True)
    results = []
    for kind in (driven, torch.utils.data.DataLoader):
        seed_everything()
        loader = kind(**arguments)
        found: list[Any] = []
        for _ in range(6):
            iterator = iter(loader)
            try:
                found.append([batch.tolist() for batch in iterator])
            except Unloadable as error:
                found.append(str(error).splitlines()[-1])
        results.append(found)
    assert results[0] == results[1]
    assert all("sample 5" in found for found in results[0])


@pytest.mark.usefixtures("workers_end_fast")
def test_workers_whose_set_up_failed_go_on_as_torchs_do() -> None:
    # torch reports the failure with a worker's first task, and resumes the worker at iter().
    arguments = persistent(MapDataset(integer_sample, 2), num_workers=1, worker_init_fn=unset)
    results = []
    for kind in (driven, torch.utils.data.DataLoader):
        loader = kind(**arguments)
        iterator = iter(loader)
        with pytest.raises(Unloadable, match="worker 0"):
            next(iterator)
        rest = [batch.tolist() for batch in loader]
        results.append([rest, [batch.tolist() for batch in loader]])
    assert results[0] == results[1] == [[[0, 3]]] * 2


def unset(worker: int) -> None:
    raise Unloadable(f"worker {worker}")
