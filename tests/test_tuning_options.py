"""Tuning a backend's own options: the search on rates that are given, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.stock import Stock
from dataloaders import DataLoader
from dataloaders.backend import Backend, Session, Specification, Tunable
from dataloaders.measuring.intervals import Interval
from dataloaders.plan import Plan
from dataloaders.tuning import Settings, Trial, Tuning, learned, tune
from dataloaders.tuning.attempts import Attempts
from dataloaders.tuning.climb import climb
from dataloaders.tuning.search import Search
from dataloaders.tuning.trial import Observation, Steps, driven

Rate = Callable[[int, int], float]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))


@dataclass(frozen=True)
class Knobs(Backend):
    """Stock, with two numbers that change nothing."""

    threads: int = 4
    depth: int = 3
    workers: bool = False

    name: ClassVar[str] = "knobs"

    def explain(self, loader: Specification) -> Plan:
        return Plan(self.name)

    def tunable(self, loader: Specification) -> Tunable:
        return Tunable(self, {"threads": (1, 2, 3, 4, 6, 8), "depth": (2, 3, 4, 6)}, self.workers)

    def open(self, loader: Specification) -> Session:
        return Stock().open(loader)


class Recorded(Attempts):
    """Trials whose rates are known: no batch is loaded."""

    def __init__(self, search: Search, rate: Rate, *, most: int = 99, busy: bool = False) -> None:
        known = search._attempts
        super().__init__(known._loader, False, 60.0, known.alone, lambda doing: None)
        self._rate, self._most_trials, self._busy = rate, most, busy

    def make(self, settings: Settings, why: str, **others: Any) -> Steps[Observation | None]:
        yield from ()
        if len(self.trials) >= self._most_trials:
            self.out_of_time = True
            return None
        backend: Any = settings.backend
        rate = self._rate(backend.threads, backend.depth)
        cpu = self._cores / rate if self._busy else 0.0
        seen = Observation(Interval(*(1 / rate,) * 3), 1, 0.0, 0.0, 0.0, cpu, 0.0, False, 8)
        self.seen[settings], self.rates[settings] = seen, rate
        self.trials.append(Trial(settings, why, seen.samples_per_second, rate, 0.0, 0.0))
        return seen


def loader_of(backend: Backend) -> DataLoader[Any]:
    return DataLoader(torch.arange(64.0), 4, backend=backend)  # type: ignore[arg-type]


def searched(rate: Rate, needed: float | None = None, **options: Any) -> Tuning:
    """What comes of a search among such rates, from 4 threads and a depth of 3."""
    search = Search(loader_of(Knobs()), False, 60.0, None, None, needed)
    search._attempts = Recorded(search, rate, **options)
    driven(search.run(), print)
    return search.result(remember=True)


def tried(tuning: Tuning) -> list[tuple[int, int]]:
    return [(t.settings.backend.threads, t.settings.backend.depth) for t in tuning.trials]  # type: ignore[union-attr]


class TestSearch:
    def test_the_present_setting_is_the_first_one(self) -> None:
        tuning = searched(lambda threads, depth: 100.0)
        assert tuning.trials[0].why == "the loader as it is"
        assert tuning.given == tuning.trials[0].settings == Settings(0, None, False, Knobs())

    def test_where_nothing_matters_the_smallest_is_taken(self) -> None:
        tuning = searched(lambda threads, depth: 100.0)
        assert tuning.choice.backend == Knobs(1, 2)
        assert not tuning.worth_it

    def test_more_threads_and_a_longer_queue_where_both_pay(self) -> None:
        tuning = searched(lambda threads, depth: 10.0 * threads * depth)
        assert tuning.choice.backend == Knobs(8, 6)
        assert tuning.worth_it
        assert tuning.reason.startswith("480 samples/s, 4.00 x the loader as it is")

    def test_a_best_setting_in_between_is_found(self) -> None:
        tuning = searched(lambda threads, depth: 100.0 - 5 * abs(threads - 6) - 5 * abs(depth - 4))
        assert tuning.choice.backend == Knobs(6, 4)

    def test_most_are_never_tried_and_only_the_choice_is_tried_again(self) -> None:
        tuning = searched(lambda threads, depth: 100.0 + threads)
        again = [trial.settings for trial in tuning.trials if trial.why == "again: to be sure"]
        assert again == [tuning.choice, tuning.given]
        assert len(set(tried(tuning))) == len(tried(tuning)) - 2 < 12

    def test_a_lucky_trial_does_not_decide(self) -> None:
        lucky = {(8, 3): 900.0, (6, 3): 130.0}

        def rate(threads: int, depth: int) -> float:
            return lucky.pop((threads, depth), 100.0)

        tuning = searched(rate)
        assert (8, 3) in tried(tuning)
        assert tuning.choice.backend == Knobs(8, 3)  # 500, as the mean of both
        lucky = {(8, 3): 106.0}
        assert searched(rate).choice.backend == Knobs()  # within 3 % of 103, the mean of both

    def test_the_fewest_that_meet_the_rate(self) -> None:
        tuning = searched(lambda threads, depth: 100.0 * threads, needed=200.0)
        assert tuning.choice.backend == Knobs(2, 2)
        assert max(tried(tuning)) == (4, 3)  # nothing larger, as the rate was met
        assert tuning.reason.endswith("needed are 200 samples/s")

    def test_a_rate_out_of_reach_is_told(self) -> None:
        tuning = searched(lambda threads, depth: 100.0, needed=900.0)
        assert "needed are 900 samples/s, which was not reached" in tuning.reason

    def test_nothing_larger_where_all_cores_are_busy(self) -> None:
        tuning = searched(lambda threads, depth: 10.0 * threads, busy=True)
        assert max(tried(tuning)) == (4, 3)

    def test_out_of_time(self) -> None:
        tuning = searched(lambda threads, depth: 10.0 * threads, most=2)
        assert len(tuning.trials) == 2
        assert tuning.choice.backend == Knobs(8, 3)
        assert any("give budget_s more" in note for note in tuning.notes)

    @settings(deadline=None)
    @given(st.lists(st.floats(1, 100), min_size=24, max_size=24), st.integers(1, 24))
    def test_any_rates_end_with_one_that_suffices(self, rates: list[float], most: int) -> None:
        threads, depths = (1, 2, 3, 4, 6, 8), (2, 3, 4, 6)
        tuning = searched(lambda t, d: rates[4 * threads.index(t) + depths.index(d)], most=most)
        made = [trial.epoch_samples_per_second or 0 for trial in tuning.trials]
        chosen: Any = tuning.choice.backend
        place = tried(tuning).index((chosen.threads, chosen.depth))
        assert made[place] >= 0.97 * max(made)


@given(
    st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
    st.integers(0, 19),
    st.integers(1, 8),
)
def test_climbing_ends_at_the_top_of_one_hill(
    places: tuple[int, int], top: int, reach: int
) -> None:
    count, start = places
    top = min(top, count - 1)
    asked: list[int] = []

    def better(now: int, then: int) -> Generator[Any, None, bool]:
        asked.append(then)
        yield then
        return abs(then - top) < abs(now - top)

    yielded: list[int] = []
    assert driven(climb(count, start, better, reach=reach), yielded.append) == top
    assert yielded == asked
    assert len(asked) == len(set(asked)) <= count - 1
    assert all(0 <= place < count for place in asked)


class TestResult:
    def test_it_prints_the_options_and_goes_to_json(self) -> None:
        tuning = searched(lambda threads, depth: 100.0 * threads)
        assert "use num_workers=0, backend=Knobs(threads=8, depth=2): 800 samples/s" in str(tuning)
        assert {"threads", "depth"} <= set(str(tuning).splitlines()[0].split())
        entry = json.loads(tuning.to_json())
        knobs = {"name": "knobs", "threads": 8, "depth": 2, "workers": False}
        assert entry["choice"]["backend"] == knobs
        assert entry["trials"][0]["settings"]["backend"] == {**knobs, "threads": 4, "depth": 3}

    def test_options_as_they_are_by_default_are_left_out(self) -> None:
        assert str(Settings(0, None, False, Knobs())) == "num_workers=0, backend=Knobs()"

    def test_it_is_applied(self) -> None:
        loader = loader_of(Knobs())
        applied = searched(lambda threads, depth: 100.0 * threads).apply(loader)
        assert (applied.backend, loader.backend) == (Knobs(8, 2), Knobs())
        assert len(list(applied)) == 16

    def test_it_is_remembered_beside_what_is_known_of_workers(self) -> None:
        loader = loader_of(Knobs())
        workers = learned.Learned(1, 2, False, 5.0)
        learned.remember(learned.key_of(loader.dataset, 4, None, None), workers)
        tuning = searched(lambda threads, depth: 100.0 * threads)
        found = learned.recall(learned.key_of(loader.dataset, 4, None, None, "knobs"))
        assert tuning.remembered is not None
        assert found is not None
        assert found.options == {"threads": 8, "depth": 2}
        assert learned.recall(learned.key_of(loader.dataset, 4, None, None)) == workers
        assert DataLoader(loader.dataset, 4, num_workers="auto").num_workers == 1
        assert DataLoader(loader.dataset, 4, num_workers="auto", backend=Knobs()).num_workers == 0


@pytest.mark.measures
def test_workers_are_chosen_first_where_they_take_part() -> None:
    tuning = tune(loader_of(Knobs(workers=True)), budget_s=1.5, max_workers=1)
    assert tuning.trials[0].why == "one process: what a batch costs"
    assert {type(trial.settings.backend) for trial in tuning.trials} == {Knobs}
    assert any(trial.why.startswith(("more ", "less ")) for trial in tuning.trials)
