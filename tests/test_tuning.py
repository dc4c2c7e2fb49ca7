"""tune() on real loaders: what it may disturb, what may go wrong, what becomes of the choice.

What is chosen for which rates: test_tuning_search.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dataloaders
from dataloaders import DataLoader, wrap
from dataloaders.errors import CapacityWarning, CheckError, OptionError
from dataloaders.machine import resources
from dataloaders.measuring.intervals import Interval
from dataloaders.tuning import Progress, Settings, Trial, Tuning, learned, tune
from dataloaders.tuning.run import tuning_steps
from dataloaders.tuning.trial import Seen, StepCost, driven, observe, observe_step

TorchLoader = torch.utils.data.DataLoader
ONE = 0.2  # seconds of budget: one process is tried, and nothing else
SOME = 8.0  # trials of 0.4 s, and time for those that a test waits for


@pytest.fixture(autouse=True)
def _children() -> None:
    """Remember this process's children, so that `started` leaves them out."""
    CHILDREN[:] = multiprocessing.active_children()


CHILDREN: list[Any] = []


def started() -> list[Any]:
    """Return the children that live and were started by the test."""
    return [child for child in multiprocessing.active_children() if child not in CHILDREN]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


class Waiting(Dataset[torch.Tensor]):
    """20 ms of waiting a sample, as from a far disk."""

    def __init__(self, size: int = 10_000, seconds: float = 0.02) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor([float(index)])


class Shared(IterableDataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, self.size, step):
            time.sleep(0.005)
            yield torch.tensor([float(index)])


def in_worker() -> bool:
    return torch.utils.data.get_worker_info() is not None


def waits(batch: Any) -> None:
    """A step as long as loading four samples that wait: one worker pays."""
    time.sleep(0.08)


def in_memory() -> TensorDataset:
    return TensorDataset(torch.arange(60_000.0), torch.zeros(60_000, 8))


def alone(loader: Any, step: Any = None, **options: Any) -> Tuning:
    """Tuning with one process only."""
    return tune(loader, step, **{"budget_s": ONE, "max_workers": 0, **options})


def tried(tuning: Tuning) -> list[int]:
    return [trial.settings.num_workers for trial in tuning.trials]


@pytest.mark.measures
def test_waiting_is_overlapped_by_more_workers_than_cores() -> None:
    count = len(os.sched_getaffinity(0)) + 2
    tuning = tune(TorchLoader(Waiting(), 2), max_workers=count, budget_s=20)
    assert tuning.choice.num_workers > count - 2
    assert tuning.worth_it
    assert "x one process" in tuning.reason
    assert any("torch may warn" in note for note in tuning.notes)


@pytest.mark.measures
def test_a_step_that_is_slower_than_loading_needs_one_worker() -> None:
    # A batch takes 40 ms: serial 90, with one worker 50.
    step = lambda batch: time.sleep(0.05)  # noqa: E731
    tuning = tune(TorchLoader(Waiting(), 2), step, budget_s=10)
    assert tuning.choice.num_workers == 1
    assert tuning.needed_samples_per_second is not None
    assert tuning.needed_samples_per_second.estimate <= 40.0
    assert "faster than the loader as it is (num_workers=0)" in str(tuning)


@pytest.mark.measures
def test_a_step_that_computes_has_fewer_threads_in_a_trial_and_they_are_put_back() -> None:
    before, seen = torch.get_num_threads(), set()

    def step(batch: torch.Tensor) -> None:
        seen.add(torch.get_num_threads())
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass

    torch.set_num_threads(4)
    try:
        found = tune(TorchLoader(Waiting(), 2), step, max_workers=2, budget_s=30)
        assert 4 in seen
        assert min(seen) < 4, found
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


class TestWithoutTrialsOfWorkers:
    def test_tensors_in_memory_need_none(self) -> None:
        tuning = tune(DataLoader(in_memory(), 256, shuffle=True), budget_s=SOME)
        assert tuning.choice == Settings(0, None, False)
        assert tuning.worth_it is False
        assert "in memory" in tuning.reason
        assert tried(tuning) == [0]

    def test_the_import_is_the_better_advice_for_torchs_own_loader(self) -> None:
        tuning = alone(TorchLoader(in_memory(), 256))
        assert tuning.reason == "max_workers=0: nothing else was tried"
        assert any("indexed gather" in note for note in tuning.notes)

    def test_one_process_suffices_for_the_rate_that_is_needed(self) -> None:
        tuning = tune(TorchLoader(Waiting(), 4), rate_needed=1.0, budget_s=SOME)
        assert tried(tuning) == [0]
        assert tuning.reason.startswith("needed are 1 samples/s and one process gives")

    def test_workers_that_are_in_vain_are_taken_back(self) -> None:
        tuning = tune(DataLoader(in_memory(), 256, num_workers=2), budget_s=ONE)
        assert tuning.choice.num_workers == 0
        assert tuning.given == Settings(2, 2, False)
        assert tuning.worth_it is None  # it was not measured
        assert "the loader as it is (num_workers=2, prefetch_factor=2) was not" in str(tuning)

    def test_a_batch_that_takes_longer_than_the_budget(self) -> None:
        tuning = tune(TorchLoader(Waiting(seconds=0.4), 1), budget_s=0.6)
        assert tried(tuning) == [0]
        assert tuning.trials[0].samples_per_second is not None
        assert any("give budget_s more" in note for note in tuning.notes)


def test_loading_adds_to_what_a_step_takes_of_its_thread() -> None:
    seen = Seen(Interval(0.009, 0.01, 0.011), 4, 0.1, 0.01, 0.0, 1, 16)
    on_cpu = seen.followed_by(StepCost(Interval(0.019, 0.02, 0.021), 2.0))
    assert on_cpu.seconds_per_batch.estimate == pytest.approx(0.03)
    assert on_cpu.cpu_per_batch == pytest.approx(0.05)
    assert on_cpu.samples_per_second.low == pytest.approx(4 / 0.032)
    # A device works on while the next batch is made.
    on_device = seen.followed_by(StepCost(Interval(0.019, 0.02, 0.021), 1.0, on_thread=0.25))
    assert on_device.seconds_per_batch.estimate == pytest.approx(0.02)
    slow = seen.followed_by(StepCost(Interval(0.011, 0.012, 0.013), 1.0, on_thread=0.5))
    assert slow.seconds_per_batch.estimate == pytest.approx(0.016)


class PlayedClock:
    """10 ms a step, which are known only once they were waited for."""

    def __init__(self) -> None:
        self.now, self.known = 0.0, 0.0

    def step(self, batch: torch.Tensor) -> None:
        assert (batch >= 0).all()
        batch.fill_(-1.0)  # as a step may: those after it get copies
        self.now += 0.01

    def mark(self) -> float:
        return self.now

    def wait(self) -> None:
        self.known = self.now

    def seconds(self, first: float, last: float) -> float:
        assert last <= self.known
        return last - first


def test_a_trial_takes_its_seconds_from_the_clock_of_the_step() -> None:
    clock = PlayedClock()
    loader = TorchLoader(Waiting(size=10, seconds=0.001), 4)
    seen = driven(observe(loader, stepping=True, seconds=0.1, clock=clock), clock.step)
    assert seen.seconds_per_batch == Interval(*[pytest.approx(0.01)] * 3)  # type: ignore[arg-type]
    assert seen.samples_per_batch == pytest.approx(10 / 3, rel=0.1)
    assert seen.samples_per_second.estimate == pytest.approx(100 * seen.samples_per_batch)
    assert seen.batches == round(clock.now / 0.01)
    assert seen.epochs > 1
    assert seen.batch_bytes == 16
    clock, held = PlayedClock(), [torch.zeros(4)]
    cost = driven(observe_step(held, 0.02, clock), clock.step)
    assert cost.seconds.estimate == pytest.approx(0.01)
    assert held[0].tolist() == [0.0] * 4


@pytest.mark.gpu
def test_with_cuda_pinning_is_tried_both_ways() -> None:
    def step(batch: list[torch.Tensor]) -> None:
        batch[0].to("cuda", non_blocking=True).sum()

    for one in (step, None):
        loader = TorchLoader(Waiting(), 8, pin_memory=one is None)
        tuning = tune(loader, one, budget_s=SOME, max_workers=2)
        last = tuning.trials[-2:]
        assert {trial.settings.pin_memory for trial in last} == {False, True}
        assert last[0].settings.num_workers == last[1].settings.num_workers
        assert len(list(zip(range(3), tuning.apply(loader), strict=False))) == 3


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def as_pair(samples: list[torch.Tensor]) -> Pair:
    return Pair(torch.stack(samples), "name")


class Numbered(TorchLoader[Any]):
    def __iter__(self) -> Any:
        return enumerate(super().__iter__())


class TestAnyLoader:
    @pytest.mark.parametrize(
        "arguments",
        [
            {"batch_size": None, "sampler": [3, 1, 2] * 50},
            {"batch_sampler": BatchSampler(SequentialSampler(range(100)), 3, True)},
            {"batch_sampler": [[1, 2], [3], [4, 5, 6]] * 20},
            {"sampler": WeightedRandomSampler([0.5] * 100, 40)},
            {"batch_size": 3, "collate_fn": as_pair},
        ],
        ids=["no batches", "BatchSampler", "batches of several sizes", "weighted", "collate_fn"],
    )
    @pytest.mark.thinned(4)
    def test_samplers_and_collation(self, arguments: dict[str, Any]) -> None:
        cls: Any = DataLoader if "batch_size" in arguments else TorchLoader
        loader = cls(Waiting(size=100, seconds=0.001), **arguments)
        tuning = alone(loader)
        assert tuning.trials[0].samples_per_second is not None
        assert len(list(tuning.apply(loader))) == len(loader)

    @pytest.mark.parametrize("kind", [Numbered, lambda *a, **k: wrap(Numbered(*a, **k))])
    @pytest.mark.nightly
    def test_a_loader_with_an_iteration_of_its_own(self, kind: Any) -> None:
        loader = kind(Waiting(), 4, num_workers=1)
        tuning = tune(loader, waits, budget_s=SOME, max_workers=1)
        assert set(tried(tuning)) == {0, 1}
        assert tuning.trials[1].failed is None
        assert not started()
        trial = tuning.trials[1]
        assert trial.samples_per_second is not None
        epoch_s = trial.startup_s + 2499 * 4 / trial.samples_per_second.estimate
        assert trial.epoch_samples_per_second == pytest.approx(10_000 / epoch_s)
        number, batch = next(iter(tuning.apply(loader)))
        assert (number, batch.shape) == (0, (4, 1))

    @pytest.mark.nightly
    def test_workers_that_are_sent_the_dataset(self) -> None:
        options = {"multiprocessing_context": "forkserver", "persistent_workers": True}
        loader = TorchLoader(Waiting(), 4, num_workers=1, **options)
        tuning = tune(loader, waits, budget_s=60, max_workers=1)
        assert set(tried(tuning)) == {0, 1}
        assert tuning.trials[1].failed is None
        assert not started()

    @pytest.mark.nightly
    def test_an_iterable_dataset_gets_no_more_than_it_has(self) -> None:
        loader = TorchLoader(Shared(100_000), 4, num_workers=2)
        tuning = tune(loader, budget_s=SOME)
        assert set(tried(tuning)) == {0, 2}
        assert any("iterable" in note for note in tuning.notes)

    @pytest.mark.nightly
    def test_an_epoch_shorter_than_a_trial(self) -> None:
        assert alone(TorchLoader(Waiting(size=3), 2)).trials[0].samples_per_second is not None
        tuning = tune(TorchLoader(Shared(4), 2, num_workers=2), budget_s=SOME)
        assert tuning.trials[1].samples_per_second is not None

    def test_a_loader_of_another_backend_keeps_it(self) -> None:
        loader = DataLoader(Waiting(), 4, backend="prefetch", seed=3)
        applied = alone(loader).apply(loader)
        assert (applied.backend, applied.seed, applied.num_workers) == ("prefetch", 3, 0)

    @pytest.mark.parametrize("indices", [iter(range(8)), (i for i in range(8))])
    def test_a_one_shot_sampler_is_replaced_not_consumed(self, indices: Any) -> None:
        tuning = alone(TorchLoader(Waiting(size=8, seconds=0.001), 2, sampler=indices))
        assert list(indices) == list(range(8))
        assert any("at random" in note for note in tuning.notes)


class TestNothingIsDisturbed:
    @pytest.mark.nightly
    def test_the_loader_and_the_states_are_as_before(self) -> None:
        generator = torch.Generator().manual_seed(5)
        sampler = RandomSampler(range(100), generator=torch.Generator().manual_seed(1))
        for options in ({"shuffle": True, "generator": generator}, {"sampler": sampler}):
            loader = TorchLoader(Waiting(100), 4, num_workers=1, **options)  # type: ignore[arg-type]
            before, states = dict(vars(loader)), _states(generator, sampler.generator)
            tune(loader, lambda batch: random.random(), budget_s=1.0, max_workers=1)
            assert vars(loader) == before
            assert _states(generator, sampler.generator) == states

    def test_live_workers_of_the_loader_go_on(self) -> None:
        loader = TorchLoader(Waiting(40), 4, num_workers=1, persistent_workers=True)
        batches = iter(loader)
        first = next(batches)
        tune(loader, budget_s=1.0, max_workers=1)
        assert torch.cat([first, *batches]).flatten().tolist() == list(range(40))

    def test_applying_shares_everything_but_the_settings(self) -> None:
        loader = TorchLoader(Waiting(20), 4, num_workers=2, timeout=30, persistent_workers=True)
        applied = alone(loader).apply(loader)
        assert type(applied) is TorchLoader
        assert (applied.num_workers, applied.timeout, applied.persistent_workers) == (0, 0, False)
        assert applied.dataset is loader.dataset
        assert loader.num_workers == 2
        assert len(list(applied)) == 5


def _states(*generators: torch.Generator) -> list[Any]:
    return [
        *(generator.get_state().tolist() for generator in generators),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[index,union-attr]
        random.getstate(),
    ]


@pytest.mark.nightly
def test_a_loop_that_ends_first_closes_it() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Waiting(), 4, shuffle=True, num_workers=1, generator=generator)
    states = _states(generator)
    steps = tuning_steps(loader, budget_s=SOME)
    while not started():
        next(steps)
    random.random()
    steps.close()
    assert not started()
    assert _states(generator) == states


class Dies(Waiting):
    """A dataset whose workers are killed, as by a full /dev/shm or by lack of memory."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if in_worker():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Bad(Waiting):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise LookupError("sample 7 is broken")
        return super().__getitem__(index)


class BadInWorker(Waiting):
    def __getitem__(self, index: int) -> torch.Tensor:
        if in_worker():
            raise LookupError("broken in a worker")
        return super().__getitem__(index)


# torch waits five seconds for each worker that a killed one left waiting for a lock.
@pytest.mark.usefixtures("workers_end_fast")
class TestWhatGoesWrong:
    @pytest.mark.nightly
    def test_workers_that_die_are_a_failed_trial(self) -> None:
        tuning = tune(TorchLoader(Dies(), 4, num_workers=2), budget_s=SOME, max_workers=8)
        assert tuning.choice.num_workers == 0
        assert tried(tuning) == [0, 2]
        assert any(word in str(tuning.trials[1].failed) for word in ("exited", "killed"))
        assert "failed" in " ".join(tuning.notes)
        assert not started()

    def test_a_dataset_that_cannot_be_sent_to_a_worker_is_tuned_without_them(self) -> None:
        class Local(Waiting):
            pass

        loader = TorchLoader(Local(), 4, num_workers=1, multiprocessing_context="forkserver")
        tuning = tune(loader, budget_s=SOME)
        assert tuning.choice.num_workers == 0
        assert tried(tuning) == [0]
        assert "workers were not tried" in str(tuning)
        assert "must be picklable" in str(tuning)

    @pytest.mark.parametrize(
        ("dataset", "rule"), [(Bad(), "sample 7 is broken"), (BadInWorker(), "broken in a worker")]
    )
    def test_an_error_of_the_dataset_is_the_users_to_see(self, dataset: Any, rule: str) -> None:
        with pytest.raises(LookupError, match=rule):
            tune(TorchLoader(dataset, 4), budget_s=SOME)
        assert not started()

    @pytest.mark.nightly
    def test_an_error_of_the_step_too(self) -> None:
        """It has the type and the text of what would speak against workers."""

        def step(batch: torch.Tensor) -> None:
            if started():
                raise RuntimeError("cannot be used in a forked process")

        with pytest.raises(RuntimeError, match="forked process"):
            tune(TorchLoader(Waiting(), 4), step, budget_s=SOME, max_workers=2)
        assert not started()

    def test_a_loader_without_a_batch(self) -> None:
        for loader in (TorchLoader(Waiting(3), 4, drop_last=True), TorchLoader(Shared(0), 4)):
            with pytest.raises(CheckError, match="yields no batch"):
                tune(loader, budget_s=ONE)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"budget_s": 0}, "budget_s=0: must be a positive"),
            ({"budget_s": float("nan")}, "budget_s=nan: must be"),
            ({"max_workers": -1}, "max_workers=-1: must be 0 or more"),
            ({"rate_needed": 0.0}, r"rate_needed=0\.0: must be"),
            ({"step": print, "rate_needed": 1.0}, "both given"),
            ({"step": 3}, "step=3: must be a function"),
        ],
    )
    @pytest.mark.thinned(3)
    def test_bad_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(OptionError, match=message):
            tune(TorchLoader(in_memory()), **options)

    def test_not_a_loader(self) -> None:
        with pytest.raises(TypeError, match="and got list"):
            tune([1, 2])  # type: ignore[arg-type]

    def test_ctrl_c_passes_and_what_is_known_was_given_to_progress(self) -> None:
        seen: list[Progress] = []

        def interrupt(progress: Progress) -> None:
            seen.append(progress)
            if len(seen) == 2:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            tune(TorchLoader(Waiting(), 4), budget_s=SOME, progress=interrupt)
        assert [len(one.so_far.trials) for one in seen] == [0, 1]
        assert seen[0].doing == "num_workers=0 (one process: what a batch costs)"
        assert seen[1].doing.startswith("num_workers=2, prefetch_factor=2 (")
        assert "num_workers=0" in str(seen[-1].so_far)
        assert not started()

    @pytest.mark.parametrize(
        ("batches", "counts", "rule"),
        [
            (2, {0}, "1 workers with"),
            (3, {0}, "3 workers with"),
            (5, {0, 2, 3}, "7 workers with prefetch_factor=1"),
        ],
    )
    @pytest.mark.nightly
    def test_room_for_fewer_workers_than_might_help_is_told(
        self, batches: int, counts: set[int], rule: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(resources, "shm_room", lambda path=None: batches * 4)
        loader = TorchLoader(Waiting(), None)  # a sample of 4 bytes
        with pytest.warns(CapacityWarning, match=rule) as caught:
            tuning = tune(loader, budget_s=SOME, max_workers=9)
        assert [warning.filename for warning in caught] == [__file__]  # the line that asked
        assert "--shm-size" in str(caught[0].message)
        assert set(tried(tuning)) == counts
        assert {trial.settings.prefetch_factor for trial in tuning.trials} <= {None, 1}

    def test_the_loaders_own_settings_that_cannot_fit_are_told(self) -> None:
        class Huge(Dataset[torch.Tensor]):
            def __len__(self) -> int:
                return 100

            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.zeros(1).expand(10**10)  # 40 GB by its shape, 4 bytes in truth

        loader = TorchLoader(Huge(), None, num_workers=2, prefetch_factor=100)
        rule = "the loader as it is will fail: 2 workers"
        with pytest.warns(CapacityWarning, match=rule) as caught:
            tuning = alone(loader)
        assert [warning.filename for warning in caught] == [__file__]
        assert tuning.choice.num_workers == 0

    @pytest.mark.nightly
    def test_workers_that_memory_does_not_bear_are_ruled_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A worker takes more than the rule for two of them leaves to each."""
        by_rule = 128 * 2**20 + resources.python_heap_bytes()

        class Hoards(Waiting):
            hoard: np.ndarray[Any, Any] | None = None

            def __getitem__(self, index: int) -> torch.Tensor:
                if self.hoard is None and in_worker():
                    self.hoard = np.ones(by_rule, np.uint8)
                return super().__getitem__(index)

        monkeypatch.setattr(resources, "available_memory", lambda: int(2 * 2.1 * by_rule))
        dataset = Hoards(seconds=0.005)
        tuning = tune(TorchLoader(dataset, 4, num_workers=2), budget_s=SOME)
        assert tried(tuning) == [0, 2]
        assert tuning.choice.num_workers == 0
        assert "do not fit in available memory" in str(tuning.trials[1].failed)
        assert tuning.trials[1].samples_per_second is not None
        assert any("available memory bears 1 of them" in note for note in tuning.notes)
        assert tuning.worth_it is None
        assert DataLoader(dataset, 4, num_workers="auto").num_workers == 0


class TestResult:
    def tuning(self) -> Tuning:
        rate = Interval(95.0, 100.0, 105.0)
        slow, fast = Settings(0, None, False), Settings(2, 2, True, step_threads=1)
        trials = (
            Trial(slow, "one process", rate, 100.0, cpu_share=0.5),
            Trial(fast, "fewer threads", rate, 90.0, 0.1, 0.5, 0.9, 2**20),
            Trial(Settings(4, 2, True), "twice as many", None, None, failed="they died"),
        )
        return Tuning(fast, "it is faster", slow, True, trials, None, 2.0, 64, ("by the way",))

    def test_it_prints_its_trials(self) -> None:
        lines = str(self.tuning()).splitlines()
        assert {"workers", "prefetch", "pinned", "threads", "samples/s"} <= set(lines[0].split())
        assert lines[2].split() == [
            "2", "2", "yes", "1", "100", "±", "5", "%", "0.10", "s", "90", "%", "1", "<-", "fewer",
            "threads",
        ]  # fmt: skip
        assert lines[3].endswith("they died")
        assert lines[5:] == [
            "use num_workers=2, prefetch_factor=2, pin_memory=True, torch.set_num_threads(1): "
            "it is faster",
            "that is at least 3 % faster than the loader as it is (num_workers=0)",
            "note: by the way",
        ]

    def test_it_goes_to_json(self, tmp_path: Path) -> None:
        entry = json.loads(self.tuning().to_json(tmp_path / "tuning.json"))
        assert entry == json.loads((tmp_path / "tuning.json").read_text())
        assert entry["given"] == {"num_workers": 0, "prefetch_factor": None, "pin_memory": False}
        assert entry["choice"]["step_threads"] == 1
        assert entry["trials"][1]["memory_per_worker"] == 2**20

    def test_what_one_process_learned_is_not_for_each_of_several_ranks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = Waiting()
        tuning = tune(DataLoader(dataset, 4, shuffle=True), budget_s=ONE, rate_needed=1.0)
        assert tuning.choice.num_workers == 0
        assert tuning.remembered is not None
        assert DataLoader(dataset, 4, num_workers="auto").num_workers == 0
        assert DataLoader(dataset, 5, num_workers="auto").num_workers > 0
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(max(2, resources.usable_cores())))
        assert DataLoader(dataset, 4, num_workers="auto").num_workers == 1  # by the rule
        tune(DataLoader(dataset, 4), budget_s=ONE, rate_needed=1.0)
        assert DataLoader(dataset, 4, num_workers="auto").num_workers == 0

    def test_it_is_not_remembered_if_not_wanted_or_if_it_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tuning = alone(TorchLoader(Waiting(), 4), remember=False)
        assert tuning.remembered is None
        assert not learned.cache_folder().exists()
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "file"))
        tuning = alone(TorchLoader(Waiting(), 4))
        assert tuning.remembered is None
        assert any("set DATALOADERS_CACHE to a folder" in note for note in tuning.notes)

    def test_the_name_in_the_package(self) -> None:
        assert dataloaders.tune is tune
        with pytest.raises(AttributeError, match="no attribute 'tuna'"):
            dataloaders.tuna  # noqa: B018
