"""Tuning as batches for a loop that is there already: on its thread, and with an end for both."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import dataloaders
from dataloaders.measuring.intervals import Interval
from dataloaders.tuning import Progress, Settings, Trial, Tuning, tune
from dataloaders.tuning.attempts import Attempts
from dataloaders.tuning.model import Model
from dataloaders.tuning.run import tuning_steps
from dataloaders.tuning.search import Search
from dataloaders.tuning.trial import Observation, Steps, driven, observe_step

pytestmark = pytest.mark.measures


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Looks(Dataset[torch.Tensor]):
    """Waits a little, and notes what it sees of the thread that it is asked on."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        self.seen.append((threading.get_ident(), torch.is_inference_mode_enabled()))
        return torch.tensor([float(index)])


class TestOnTheLoopsThread:
    def test_samples_are_never_made_in_this_process_and_in_the_modes_of_the_loop(self) -> None:
        class Tells(Looks):
            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.tensor([os.getpid(), torch.is_inference_mode_enabled()])

        dataset = Tells()
        with torch.inference_mode():
            seen = torch.cat(list(tuning_steps(DataLoader(dataset, 4), budget_s=3, max_workers=1)))
        assert (seen[:, 0] != os.getpid()).all()
        alone = seen[:, 0] == seen[0, 0]
        assert seen[alone, 1].all()

    def test_what_is_bound_to_its_thread_can_be_used(self) -> None:
        connection = sqlite3.connect(":memory:")

        class Rows(Looks):
            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.tensor(connection.execute("select ?", (index,)).fetchone())

        seen = [batch.shape for batch in tuning_steps(DataLoader(Rows(), 4), max_workers=0)]
        assert set(seen) == {(4, 1)}
        connection.close()

    def test_a_loop_that_begins_again_goes_on_with_the_trial(self) -> None:
        told: list[Progress] = []
        steps = tuning_steps(
            DataLoader(Looks(), 4), budget_s=0.5, max_workers=0, progress=told.append
        )
        taken = 0
        for batches in iter(lambda: list(itertools.islice(steps, 3)), []):
            taken += len(batches)
        assert taken > 3
        assert told[0].doing == "num_workers=0 (one process: what a batch costs)"
        assert len(told) == 2  # and the step

    def test_an_error_of_the_dataset_reaches_the_loop(self) -> None:
        class Bad(Looks):
            def __getitem__(self, index: int) -> torch.Tensor:
                raise LookupError("no such sample")

        with pytest.raises(LookupError, match="no such sample"):
            next(tuning_steps(DataLoader(Bad(), 4)))

    def test_a_loop_that_ends_first_closes_it(self) -> None:
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(Looks(), 4, shuffle=True, num_workers=1, generator=generator)
        states = (generator.get_state(), torch.get_rng_state(), random.getstate())
        steps = tuning_steps(loader, budget_s=60)
        while not multiprocessing.active_children():
            next(steps)
        random.random()
        steps.close()
        assert not multiprocessing.active_children()
        assert torch.equal(generator.get_state(), states[0])
        assert torch.equal(torch.get_rng_state(), states[1])
        assert random.getstate() == states[2]

    def test_an_error_of_the_step_is_the_steps_with_workers_too(self) -> None:
        """It has the type and the text of what would speak against workers."""

        def step(batch: torch.Tensor) -> None:
            if multiprocessing.active_children():
                raise RuntimeError("cannot be used in a forked process")

        with pytest.raises(RuntimeError, match="forked process"):
            tune(DataLoader(Looks(), 4, num_workers=1), step, budget_s=60, max_workers=2)
        assert not multiprocessing.active_children()


Key = tuple[int, int | None]  # workers, threads of the step


class Rated(Attempts):
    """Trials whose rates are known: no batch is loaded. Those without other threads were made."""

    def __init__(self, search: Search, rates: dict[Key, float]) -> None:
        known = search._attempts
        super().__init__(known._loader, True, 60.0, known.alone, lambda doing: None)
        self._known = rates
        for workers, threads in rates:
            if threads is None:
                driven(self.make(Settings(workers, 2 if workers else None, False), ""), print)

    def make(self, settings: Settings, why: str, **others: Any) -> Steps[Observation | None]:
        yield from ()
        rate = self._known.get((settings.num_workers, settings.step_threads))
        if rate is None:
            return None
        each = Interval(*(4 / rate,) * 3)
        seen = Observation(each, 4, 0.0, 0.0, 0.0, 0.0, 0.0, False, 16)
        self.seen[settings], self.rates[settings] = seen, rate
        self.trials.append(Trial(settings, why, seen.samples_per_second, rate, 0.0, 0.0))
        return seen


# A batch is 20 ms of computing, a step 5 ms on all of the cores.
def model_of(cores: int) -> Model:
    return Model(0.02, 0.02, 0.005, 0.005 * cores, 0.025, 0.005, cores)


def searched(
    rates: dict[Key, float], *, cores: int = 2, step_cores: float = 2.0, needed: float = 1e9
) -> Tuning:
    search = Search(DataLoader(Looks(), 4), True, 60.0, None, None, needed)
    search._attempts = Rated(search, rates)
    search._cores, search._step_cores = cores, step_cores
    driven(search._search_step_threads(model_of(cores), 4), print)
    return search.result(remember=True)


class TestThreadsOfTheStep:
    rates: ClassVar[dict[Key, float]] = {(0, None): 150, (1, None): 130, (2, None): 125}

    def test_fewer_of_them_are_chosen_with_the_workers_that_they_leave_cores_to(self) -> None:
        tuning = searched({**self.rates, (1, 1): 155, (2, 1): 200, (3, 1): 198})
        assert tuning.choice == Settings(2, 2, False, step_threads=1)
        assert [one.settings.num_workers for one in tuning.trials[3:]] == [2, 3, 1, 2, 0]
        assert tuning.worth_it

    def test_workers_that_are_chosen_already_are_where_it_begins(self) -> None:
        tuning = searched({(0, None): 100, (2, None): 120, (3, None): 150, (3, 1): 149})
        assert [one.settings.num_workers for one in tuning.trials] == [0, 2, 3, 3]
        assert tuning.choice == Settings(3, 2, False)

    def test_more_workers_beside_them_where_those_pay(self) -> None:
        tuning = searched({**self.rates, (1, 1): 155, (2, 1): 200, (3, 1): 250, (4, 1): 249})
        assert tuning.choice == Settings(3, 2, False, step_threads=1)

    def test_less_than_3_percent_does_not_pay_for_another_line(self) -> None:
        tuning = searched({**self.rates, (1, 1): 154, (2, 1): 154})
        assert tuning.choice == Settings(0, None, False)

    def test_a_lucky_trial_does_not_decide(self) -> None:
        rates = {**self.rates, (2, 1): 190.0}

        class Once(dict[Key, float]):
            def get(self, key: Key, default: Any = None) -> Any:
                return super().pop(key, 110.0) if key == (2, 1) else super().get(key, default)

        tuning = searched(Once(rates))
        assert [one.why for one in tuning.trials[-2:]] == ["again: to be sure"] * 2
        assert tuning.choice == Settings(0, None, False)

    def test_many_cores_are_shared(self) -> None:
        # Two workers suffice by the model, and leave two of four cores.
        tuning = searched({**self.rates, (2, 2): 300, (3, 2): 250}, cores=4, step_cores=4.0)
        assert tuning.choice == Settings(2, 2, False, step_threads=2)

    @pytest.mark.parametrize("reason", ["met", "sleeps", "one thread"])
    def test_they_are_left_alone_without_need(self, reason: str) -> None:
        rates = {**self.rates, (1, 1): 900.0, (2, 1): 900.0}
        options: dict[str, Any] = {"needed": 100} if reason == "met" else {}
        if reason == "sleeps":
            options = {"step_cores": 0.1}
        if reason == "one thread":
            torch.set_num_threads(1)
        tuning = searched(rates, **options)
        assert {one.settings.step_threads for one in tuning.trials} == {None}

    def test_they_are_told_and_not_kept(self) -> None:
        tuning = searched({**self.rates, (1, 1): 155, (2, 1): 200, (3, 1): 198})
        text = str(tuning)
        arguments = "num_workers=2, prefetch_factor=2"
        assert f"use {arguments}, torch.set_num_threads(1): 200 samples/s" in text
        assert "step's threads" in text.splitlines()[0]
        assert '"auto" keeps to num_workers=0, the best with 4 threads (150 samples/s; with' in text
        entry = json.loads(tuning.to_json())
        assert entry["choice"]["step_threads"] == 1
        assert "step_threads" not in entry["given"]
        loader = DataLoader(Looks(), 4)
        applied = tuning.apply(loader)
        assert (applied.num_workers, torch.get_num_threads()) == (2, 4)
        assert dataloaders.DataLoader(loader.dataset, 4, num_workers="auto").num_workers == 0

    def test_a_step_that_computes_is_told_from_one_that_waits(self) -> None:
        def computes(batch: torch.Tensor) -> None:
            end = time.thread_time() + 0.01
            while time.thread_time() < end:
                pass

        held: list[Any] = [torch.zeros(4)]
        waits = driven(observe_step(held, 0.2), lambda batch: time.sleep(0.01))
        assert waits.cores < 0.5 < driven(observe_step(held, 0.2), computes).cores

    def test_a_trial_has_them_and_puts_them_back(self) -> None:
        alone = Settings(0, None, False)
        attempts = Attempts(DataLoader(Looks(), 4), True, 60.0, alone, lambda doing: None)
        seen: list[int] = []
        fewer = Settings(1, 2, False, step_threads=2)
        driven(attempts.make(fewer, ""), lambda batch: seen.append(torch.get_num_threads()))
        assert (set(seen), torch.get_num_threads()) == ({2}, 4)

        def fails(batch: Any) -> None:
            raise ValueError(torch.get_num_threads())

        with pytest.raises(ValueError, match="2"):
            driven(attempts.make(fewer, ""), fails)
        assert torch.get_num_threads() == 4
