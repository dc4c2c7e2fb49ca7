"""Tuning: choices where the right one is beyond doubt, and nothing of the user's disturbed."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dataloaders
from dataloaders import DataLoader, wrap
from dataloaders.errors import CapacityWarning, CheckError, OptionError
from dataloaders.machine import resources
from dataloaders.measuring.intervals import Interval
from dataloaders.tuning import Progress, Settings, Tuning, auto, learned, tune
from dataloaders.tuning.attempts import Attempts
from dataloaders.tuning.choice import Need, choose
from dataloaders.tuning.model import Model
from dataloaders.tuning.trial import driven

pytestmark = pytest.mark.measures

TorchLoader = torch.utils.data.DataLoader
SHORT = 1.2  # seconds of budget: the searches below need one to three trials


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))


class Waiting(Dataset[torch.Tensor]):
    """20 ms of waiting a sample, as from a far disk."""

    def __init__(self, size: int = 10_000, seconds: float = 0.02) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor([float(index)])


class Dies(Waiting):
    """A dataset whose workers are killed, as by a full /dev/shm or by lack of memory."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class BadSample(Waiting):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise LookupError("sample 7 is broken")
        return super().__getitem__(index)


class BadInWorker(Waiting):
    def __getitem__(self, index: int) -> torch.Tensor:
        if torch.utils.data.get_worker_info() is not None:
            raise LookupError("broken in a worker")
        return super().__getitem__(index)


class Shared(IterableDataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(start, self.size, step):
            time.sleep(0.01)
            yield torch.tensor([float(index)])


def in_memory() -> TensorDataset:
    return TensorDataset(torch.arange(60_000.0), torch.zeros(60_000, 8))


def quick(loader: Any, step: Any = None, **options: Any) -> Tuning:
    return tune(loader, step, **({"budget_s": SHORT, "max_workers": 2} | options))


class Watched(NamedTuple):
    """A tuning run on samples to wait for, and the progress that it reported."""

    tuning: Tuning
    progress: list[Progress]


@pytest.fixture(scope="module")
def watched() -> Watched:
    seen: list[Progress] = []
    return Watched(quick(TorchLoader(Waiting(), 4), remember=False, progress=seen.append), seen)


class TestChoice:
    def test_waiting_is_overlapped(self, watched: Watched) -> None:
        tuning = watched.tuning
        assert tuning.choice == Settings(2, 2, False)
        assert tuning.worth_it
        assert "one process" in tuning.reason
        assert tuning.trials[0].settings == Settings(0, None, False)

    def test_more_workers_than_cores_where_they_only_wait(self) -> None:
        count = len(os.sched_getaffinity(0)) + 2
        tuning = quick(TorchLoader(Waiting(), 2), max_workers=count, budget_s=3)
        assert tuning.choice.num_workers > count - 2
        assert any("torch may warn" in note for note in tuning.notes)

    def test_tensors_in_memory_need_none(self) -> None:
        tuning = quick(DataLoader(in_memory(), 256, shuffle=True))
        assert tuning.choice == Settings(0, None, False)
        assert not tuning.worth_it
        assert "in memory" in tuning.reason
        assert len(tuning.trials) == 1

    def test_the_import_is_the_better_advice_for_torchs_own_loader(self) -> None:
        tuning = quick(TorchLoader(in_memory(), 256), max_workers=0)
        assert any("indexed gather" in note for note in tuning.notes)

    def test_one_process_suffices_for_the_rate_that_is_needed(self) -> None:
        tuning = quick(TorchLoader(Waiting(), 4), rate_needed=5.0)
        assert tuning.choice.num_workers == 0
        assert "needed are 5 samples/s and one process already gives" in tuning.reason

    def test_the_fewest_that_meet_the_rate(self) -> None:
        # One process gives 50 samples a second, two nearly 100, eight 400.
        tuning = quick(TorchLoader(Waiting(), 4), rate_needed=70.0, max_workers=8)
        assert tuning.choice.num_workers == 2

    def test_a_step_that_is_slower_than_loading_needs_one_worker(self) -> None:
        def step(batch: torch.Tensor) -> None:
            time.sleep(0.05)  # a batch takes 40 ms: serial 90, with one worker 50

        tuning = quick(TorchLoader(Waiting(), 2), step, budget_s=3, max_workers=1)
        assert tuning.choice.num_workers == 1
        assert tuning.needed_samples_per_second is not None
        assert 20 < tuning.needed_samples_per_second.estimate <= 40.0
        assert tuning.worth_it
        assert "faster than the loader as it is (num_workers=0)" in str(tuning)

    def test_loading_that_is_nothing_beside_the_step_needs_none(self) -> None:
        tuning = quick(TorchLoader(in_memory(), 4), lambda batch: time.sleep(0.1))
        assert tuning.choice.num_workers == 0
        assert "workers will not help" in tuning.reason
        assert len(tuning.trials) == 1

    def test_workers_that_are_in_vain_are_taken_back(self) -> None:
        tuning = quick(DataLoader(in_memory(), 256, num_workers=2))
        assert tuning.choice.num_workers == 0
        assert tuning.given == Settings(2, 2, False)
        assert tuning.worth_it is None  # the two were not measured
        assert "the loader as it is (num_workers=2, prefetch_factor=2) was not" in str(tuning)

    def test_an_iterable_dataset_gets_no_more_than_it_has(self) -> None:
        tuning = quick(TorchLoader(Shared(100_000), 4, num_workers=2), max_workers=None)
        assert {trial.settings.num_workers for trial in tuning.trials} <= {0, 1, 2}
        assert tuning.choice.num_workers == 2
        assert any("iterable" in note for note in tuning.notes)

    def test_an_epoch_shorter_than_a_trial(self) -> None:
        tuning = quick(TorchLoader(Waiting(size=3), 2), max_workers=0)
        assert tuning.trials[0].samples_per_second is not None
        tuning = quick(TorchLoader(Shared(4), 2, num_workers=2), budget_s=1)
        assert tuning.trials[1].samples_per_second is not None

    def test_one_worker_alone_overlaps_nothing_without_a_step(self) -> None:
        tuning = quick(TorchLoader(Waiting(), 4), max_workers=1)
        assert tuning.choice.num_workers == 0
        assert "one worker could only do the same" in tuning.reason

    def test_a_batch_that_takes_seconds(self) -> None:
        tuning = quick(TorchLoader(Waiting(seconds=0.5), 1), budget_s=0.6)
        assert len(tuning.trials) == 1
        assert any("give budget_s more" in note for note in tuning.notes)


@pytest.mark.gpu
def test_with_cuda_pinning_is_tried_both_ways() -> None:
    def step(batch: list[torch.Tensor]) -> None:
        batch[0].to("cuda", non_blocking=True).sum()

    for one in (step, None):
        loader = TorchLoader(Waiting(), 8, pin_memory=one is None)
        tuning = quick(loader, one, budget_s=10)
        last = tuning.trials[-2:]
        assert {trial.settings.pin_memory for trial in last} == {False, True}
        assert last[0].settings.num_workers == last[1].settings.num_workers
        assert len(list(zip(range(3), tuning.apply(loader), strict=False))) == 3


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def as_pair(samples: list[torch.Tensor]) -> Pair:
    return Pair(torch.stack(samples), "name")


class TestAnyLoader:
    @pytest.mark.parametrize(
        "arguments",
        [
            {"batch_size": None},
            {"batch_size": None, "sampler": [3, 1, 2] * 50},
            {"batch_sampler": BatchSampler(SequentialSampler(range(100)), 3, True)},
            {"batch_sampler": [[1, 2], [3], [4, 5, 6]] * 20},
            {"sampler": WeightedRandomSampler([0.5] * 100, 40)},
            {"batch_size": 3, "collate_fn": as_pair},
            {"batch_size": 64, "shuffle": True},
        ],
        ids=str,
    )
    def test_samplers_and_collation(self, arguments: dict[str, Any]) -> None:
        cls: Any = DataLoader if "batch_size" in arguments else TorchLoader
        loader = cls(Waiting(size=100, seconds=0.001), **arguments)
        tuning = tune(loader, budget_s=0.5, max_workers=0)
        assert tuning.trials[0].samples_per_second is not None
        assert len(list(tuning.apply(loader))) == len(loader)

    def test_workers_that_are_sent_the_dataset(self) -> None:
        loader = TorchLoader(
            Waiting(), 4, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
        )
        # With a step one worker overlaps something; without one, a second would have to start.
        tuning = quick(loader, lambda batch: time.sleep(0.08), max_workers=1, budget_s=8.0)
        assert tuning.trials[1].settings.num_workers == 1
        assert tuning.trials[1].failed is None
        assert not multiprocessing.active_children()

    def test_a_loader_of_a_subclass_with_an_iteration_of_its_own(self) -> None:
        class Numbered(TorchLoader[Any]):
            def __iter__(self) -> Any:
                return enumerate(super().__iter__())

        for loader in (Numbered(Waiting(), 4), wrap(Numbered(Waiting(), 4))):
            tuning = quick(loader)
            assert tuning.choice.num_workers == 2
            number, batch = next(iter(tuning.apply(loader)))
            assert (number, batch.shape) == (0, (4, 1))
        assert not multiprocessing.active_children()

    def test_another_backend_is_tuned_by_its_workers(self) -> None:
        loader = DataLoader(Waiting(), 4, backend="stock", seed=3)
        tuning = quick(loader)
        applied = tuning.apply(loader)
        assert (applied.backend, applied.seed, applied.num_workers) == ("stock", 3, 2)

    @pytest.mark.parametrize("indices", [iter(range(8)), (i for i in range(8))])
    def test_a_one_shot_sampler_is_replaced_not_consumed(self, indices: Any) -> None:
        loader = TorchLoader(Waiting(size=8, seconds=0.001), 2, sampler=indices)
        tuning = tune(loader, budget_s=1.0, max_workers=0)
        assert list(indices) == list(range(8))
        assert any("at random" in note for note in tuning.notes)


class TestNothingIsDisturbed:
    def test_the_loader_and_the_states_are_as_before(self) -> None:
        generator = torch.Generator().manual_seed(5)
        loader = TorchLoader(Waiting(100), 4, shuffle=True, generator=generator, num_workers=1)
        before = dict(vars(loader))
        states = _states(generator)
        quick(loader)
        assert vars(loader) == before
        assert _states(generator) == states

    def test_the_order_afterwards_is_the_one_without_tuning(self) -> None:
        orders = []
        for tuned in (False, True):
            torch.manual_seed(0)
            loader = TorchLoader(in_memory(), 6000, shuffle=True)
            if tuned:
                tune(loader, budget_s=0.5, max_workers=0)
            orders.append([x[0, None].tolist() for x, _ in loader])
        assert orders[0] == orders[1]

    def test_a_sampler_that_counts_its_epochs_is_not_iterated(self) -> None:
        class Counting(Sampler[int]):
            epochs = 0

            def __iter__(self) -> Iterator[int]:
                self.epochs += 1
                return iter(range(100))

        sampler = Counting()
        tune(TorchLoader(Waiting(100, 0.001), 4, sampler=sampler), budget_s=1, max_workers=0)
        assert sampler.epochs == 0

    def test_live_workers_of_the_loader_go_on(self) -> None:
        loader = TorchLoader(Waiting(40), 4, num_workers=1, persistent_workers=True)
        batches = iter(loader)
        first = next(batches)
        quick(loader)
        rest = list(batches)
        assert torch.cat([first, *rest]).flatten().tolist() == list(range(40))

    def test_applying_shares_everything_but_the_settings(self) -> None:
        loader = TorchLoader(Waiting(20), 4, num_workers=2, timeout=30, persistent_workers=True)
        tuning = tune(loader, budget_s=1.0, rate_needed=1.0)
        applied = tuning.apply(loader)
        assert type(applied) is TorchLoader
        assert (applied.num_workers, applied.timeout, applied.persistent_workers) == (0, 0, False)
        assert applied.dataset is loader.dataset
        assert loader.num_workers == 2
        assert len(list(applied)) == 5

    def test_a_step_may_write_into_its_batch(self) -> None:
        def step(batch: list[torch.Tensor]) -> None:
            batch.pop()[0] = -1.0
            time.sleep(0.01)

        tuning = quick(TorchLoader(in_memory(), 4), step, budget_s=0.5, max_workers=0)
        assert tuning.needed_samples_per_second is not None


def _states(generator: torch.Generator) -> list[Any]:
    return [
        generator.get_state().tolist(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[index,union-attr]
        random.getstate(),
    ]


# torch waits five seconds for each worker that a killed one left waiting for a lock.
@pytest.mark.usefixtures("workers_end_fast")
def test_a_setting_tried_again_has_the_mean_of_its_rates() -> None:
    loader = TorchLoader(Waiting(), 4)
    alone = Settings(0, None, False)
    attempts = Attempts(loader, False, 60.0, alone, lambda doing: None)
    assert driven(attempts.make(alone, "first"), print) is not None
    attempts.rates[alone] = 0.0
    assert driven(attempts.again(alone, "again"), print)
    first, second = attempts.trials
    assert second.why == "again"
    assert attempts.rates[alone] == pytest.approx(second.epoch_samples_per_second / 2)
    assert first.epoch_samples_per_second is not None


def test_a_setting_is_not_tried_again_without_time() -> None:
    alone = Settings(0, None, False)
    attempts = Attempts(TorchLoader(Waiting(), 4), False, 0.01, alone, lambda doing: None)
    assert driven(attempts.make(alone, "first"), print) is not None
    rate = attempts.rates[alone]
    assert not driven(attempts.again(alone, "again"), print)
    assert attempts.rates[alone] == rate
    assert attempts.out_of_time


class TestWhatGoesWrong:
    def test_workers_that_die_are_a_failed_trial(self) -> None:
        tuning = quick(TorchLoader(Dies(), 4))
        assert tuning.choice.num_workers == 0
        assert "exited unexpectedly" in str(tuning.trials[-1].failed) or "killed" in str(
            tuning.trials[-1].failed
        )
        assert "failed" in " ".join(tuning.notes)
        assert not multiprocessing.active_children()

    def test_a_dataset_that_cannot_be_sent_to_a_worker_is_tuned_without_them(self) -> None:
        class Local(Waiting):
            pass

        loader = TorchLoader(Local(), 4, num_workers=1, multiprocessing_context="spawn")
        tuning = quick(loader)
        assert tuning.choice.num_workers == 0
        assert len(tuning.trials) == 1
        assert "workers were not tried" in str(tuning)
        assert "must be picklable" in str(tuning)

    def test_an_error_of_the_dataset_is_the_users_to_see(self) -> None:
        with pytest.raises(LookupError, match="sample 7 is broken"):
            quick(TorchLoader(BadSample(), 4))
        with pytest.raises(LookupError, match="broken in a worker"):
            quick(TorchLoader(BadInWorker(), 4))
        assert not multiprocessing.active_children()

    def test_an_error_of_the_step_too(self) -> None:
        def step(batch: torch.Tensor) -> None:
            raise ZeroDivisionError("in the step")

        with pytest.raises(ZeroDivisionError, match="in the step"):
            quick(TorchLoader(Waiting(), 4), step)

    def test_a_loader_without_a_batch(self) -> None:
        with pytest.raises(CheckError, match="yields no batch"):
            quick(TorchLoader(Waiting(size=3), 4, drop_last=True))
        with pytest.raises(CheckError, match="yields no batch"):
            quick(TorchLoader(Shared(0), 4))

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
            quick(TorchLoader(Waiting(), 4), progress=interrupt)
        assert len(seen[-1].so_far.trials) == 1
        assert "num_workers=0" in str(seen[-1].so_far)
        assert not multiprocessing.active_children()

    def test_too_little_shared_memory_is_told_before_workers_start(self, tmp_path: Path) -> None:
        """/dev/shm of 1 MiB in a mount namespace of its own; batches of 400 KB."""
        script = tmp_path / "script.py"
        script.write_text(
            "import torch, time, warnings\n"
            "from dataloaders.tuning import tune\n"
            "from dataloaders.errors import CapacityWarning\n"
            "class Big(torch.utils.data.Dataset):\n"
            "    def __len__(self): return 1000\n"
            "    def __getitem__(self, index): time.sleep(.05); return torch.zeros(100_000)\n"
            "with warnings.catch_warnings(record=True) as caught:\n"
            "    warnings.simplefilter('always')\n"
            "    tuning = tune(torch.utils.data.DataLoader(Big()), budget_s=1, max_workers=4)\n"
            "caught = [w for w in caught if w.category is CapacityWarning]\n"
            "print([str(w.message) for w in caught], {w.filename for w in caught} == {__file__})\n"
            "print(tuning.choice, [t.settings.num_workers for t in tuning.trials])\n"
        )
        shell = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$1"'
        run = subprocess.run(
            ["unshare", "-m", "sh", "-c", shell, sys.executable, str(script)],
            capture_output=True,
            text=True,
        )
        if "unshare" in run.stderr or "mount" in run.stderr:
            pytest.skip(f"a mount namespace needs root: {run.stderr.strip()}")
        assert run.returncode == 0, run.stderr
        assert "batches of 390.6 KiB in /dev/shm at once" in run.stdout
        assert "--shm-size" in run.stdout
        assert run.stdout.splitlines()[0].endswith("True")  # the caller's line was shown
        assert run.stdout.splitlines()[-1] == "num_workers=0 [0]"

    def test_the_loaders_own_settings_that_cannot_fit_are_told(self) -> None:
        class Huge(Dataset[torch.Tensor]):
            def __len__(self) -> int:
                return 100

            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.zeros(1).expand(10**10)  # 40 GB by its shape, 4 bytes in truth

        loader = TorchLoader(Huge(), None, num_workers=2, prefetch_factor=100)
        rule = "the loader as it is will fail: 2 workers"
        with pytest.warns(CapacityWarning, match=rule) as caught:
            tuning = tune(loader, budget_s=0.5, max_workers=0)
        assert [warning.filename for warning in caught] == [__file__]
        assert tuning.choice.num_workers == 0

    def test_workers_that_memory_does_not_bear_are_ruled_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each worker takes more than half of what two may have, as no rule could know before."""
        bare = auto._WORKER_BYTES + resources.python_heap_bytes()

        class Hoards(Waiting):
            hoard: np.ndarray[Any, Any] | None = None

            def __getitem__(self, index: int) -> torch.Tensor:
                if self.hoard is None and torch.utils.data.get_worker_info() is not None:
                    self.hoard = np.ones(int(1.3 * bare), np.uint8)
                return super().__getitem__(index)

        # Half of it is for workers: two by the rule, of which each may take 1.05 times the rule's.
        monkeypatch.setattr(resources, "available_memory", lambda: int(2 * 2.1 * bare))
        dataset = Hoards()
        tuning = quick(TorchLoader(dataset, 4, num_workers=2))
        assert tuning.choice.num_workers == 0
        refused = tuning.trials[-1]
        assert "do not fit in available memory" in str(refused.failed)
        assert refused.samples_per_second is not None
        assert any("available memory bears 1 of them" in note for note in tuning.notes)
        assert tuning.worth_it is None
        assert DataLoader(dataset, 4, num_workers="auto").num_workers == 0

        # With a step one of them pays, and that one is borne.
        tuning = quick(TorchLoader(dataset, 4), lambda batch: time.sleep(0.02), budget_s=60)
        assert [trial.settings.num_workers for trial in tuning.trials] == [0, 2, 1]
        assert tuning.choice.num_workers == 1


class TestChoose:
    rates: ClassVar = {
        Settings(0, None, False): 100.0,
        Settings(2, 2, False): 195.0,
        Settings(4, 2, False): 200.0,
        Settings(4, 4, False): 260.0,
    }

    def test_the_smallest_within_3_percent_of_the_best(self) -> None:
        assert choose(self.rates, Need(), Settings(0, None, False)) == Settings(4, 4, False)
        fewer = {one: rate for one, rate in self.rates.items() if rate < 250}
        assert choose(fewer, Need(), Settings(0, None, False)) == Settings(2, 2, False)
        assert choose({}, Need(), Settings(0, None, True)) == Settings(0, None, True)

    @pytest.mark.parametrize(
        ("rate", "from_step", "count"),
        [(90, False, 0), (103, True, 0), (103, False, 2), (198, True, 2), (199, False, 4)],
    )
    def test_what_is_needed_and_what_a_step_was_measured_to_need(
        self, rate: float, from_step: bool, count: int
    ) -> None:
        need = Need(Interval(rate, rate, rate), from_step)
        assert choose(self.rates, need, Settings(9, 2, False)).num_workers == count
        assert str(rate) in str(need.clause)


class TestResult:
    def test_it_prints_its_trials_and_goes_to_json(self, tmp_path: Path, watched: Watched) -> None:
        tuning = watched.tuning
        text = str(tuning)
        assert "<- " in text
        assert text.count("prefetch") >= 2
        assert f"use {tuning.choice}: {tuning.reason}" in text
        entry = json.loads(tuning.to_json(tmp_path / "tuning.json"))
        assert entry == json.loads((tmp_path / "tuning.json").read_text())
        assert entry["choice"] == {"num_workers": 2, "prefetch_factor": 2, "pin_memory": False}
        assert entry["trials"][1]["memory_per_worker"] > 0

    def test_auto_finds_what_was_learned(self) -> None:
        dataset = Waiting()
        tuning = quick(DataLoader(dataset, 4, shuffle=True), rate_needed=1.0)
        assert tuning.choice.num_workers == 0
        assert tuning.remembered is not None
        assert DataLoader(dataset, 4, num_workers="auto").num_workers == 0
        assert DataLoader(dataset, 5, num_workers="auto").num_workers > 0

    def test_what_one_process_learned_is_not_for_each_of_several_ranks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dataset = Waiting()
        assert quick(DataLoader(dataset, 4), rate_needed=1.0).choice.num_workers == 0
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(max(2, resources.usable_cores())))
        assert DataLoader(dataset, 4, num_workers="auto").num_workers == 1  # by the rule
        assert quick(DataLoader(dataset, 4), rate_needed=1.0).choice.num_workers == 0
        assert DataLoader(dataset, 4, num_workers="auto").num_workers == 0

    def test_it_is_not_remembered_if_not_wanted(self) -> None:
        tuning = quick(TorchLoader(Waiting(), 4), rate_needed=1.0, remember=False)
        assert tuning.remembered is None
        assert not learned.cache_folder().exists()

    def test_progress_comes_before_each_trial(self, watched: Watched) -> None:
        tuning, seen = watched
        assert len(seen) == len(tuning.trials)
        assert [len(one.so_far.trials) for one in seen] == list(range(len(seen)))
        assert "num_workers=0" in seen[0].doing

    def test_the_name_in_the_package(self) -> None:
        assert dataloaders.tune is tune
        with pytest.raises(AttributeError, match="no attribute 'tuna'"):
            dataloaders.tuna  # noqa: B018


class TestModel:
    @given(
        batch_ms=st.floats(0.01, 5000),
        share=st.floats(0, 1),
        step_ms=st.just(0.0) | st.floats(0.01, 5000),
        cores=st.integers(1, 64),
        cap=st.integers(1, 256),
    )
    def test_its_knee_is_the_fewest_that_are_nearly_as_fast_as_all(
        self, batch_ms: float, share: float, step_ms: float, cores: int, cap: int
    ) -> None:
        batch_s, step_s = batch_ms / 1e3, step_ms / 1e3
        model = Model(batch_s, batch_s * share, step_s, 0.0, batch_s + step_s, step_s, cores)
        knee = model.knee(cap)
        assert 1 <= knee <= cap
        assert model.best_s(knee) <= model.best_s(cap) * 1.3  # its rounding is by a quarter
        assert knee == 1 or model.best_s(knee - 1) > model.best_s(cap)
        assert model.gain(cap) <= model.loop_s / step_s if step_s else True

    def test_cpu_work_is_bounded_by_cores_and_waiting_is_not(self) -> None:
        computing = Model(0.1, 0.1, 0, 0, 0.1, 0, cores=4)
        waiting = Model(0.1, 0.0, 0, 0, 0.1, 0, cores=4)
        assert (computing.knee(32), waiting.knee(32)) == (4, 32)
        assert computing.gain(32) == pytest.approx(4)

    def test_one_core_gains_nothing_from_workers_that_compute(self) -> None:
        assert Model(0.1, 0.1, 0, 0, 0.1, 0, cores=1).gain(32) == pytest.approx(1)

    def test_a_batch_that_costs_less_than_handing_it_over_gains_nothing(self) -> None:
        assert Model(20e-6, 20e-6, 0, 0, 20e-6, 0, cores=8).gain(32) < 1


def test_random_samplers_generator_is_not_drawn_from() -> None:
    generator = torch.Generator().manual_seed(1)
    sampler = RandomSampler(range(100), generator=generator)
    state = generator.get_state()
    tune(TorchLoader(Waiting(100, 0.001), 4, sampler=sampler), budget_s=1.0, max_workers=0)
    assert torch.equal(generator.get_state(), state)
