"""tune() on real loaders: trials, errors, and that it leaves loader and random states alone."""

import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch
from torch.utils.data import RandomSampler, TensorDataset

from dataloaders import DataLoader, tune, tuning
from dataloaders.bottleneck import Interval
from dataloaders.errors import CapacityWarning, CheckError, OptionError
from dataloaders.machine import resources
from dataloaders.tuning import trial, tuner
from helpers import datasets
from helpers.compare import assert_same, generator_states

TorchLoader = torch.utils.data.DataLoader
ONE = 0.2  # seconds of budget: one process is tried, and nothing else
SOME = 8.0  # trials of 0.4 s, and time for those that a test waits for
CHILDREN = []


@pytest.fixture(autouse=True)
def alone_here(cache_folder):
    """Children of earlier tests are not `started`."""
    CHILDREN[:] = multiprocessing.active_children()


def started():
    return [child for child in multiprocessing.active_children() if child not in CHILDREN]


def in_worker():
    return torch.utils.data.get_worker_info() is not None


class Waiting(datasets.Waiting):
    """Each sample waits 20 ms, as for a remote disk, and calls ``happens``."""

    def __init__(self, size=10_000, seconds=0.02, happens=int):
        super().__init__(size, seconds)
        self.happens = happens

    def __getitem__(self, index):
        self.happens(index)
        return super().__getitem__(index)[:1]


class Shared(datasets.CountingStream):
    def __iter__(self):
        for sample in super().__iter__():
            time.sleep(0.005)
            yield sample


def slow_step(batch):
    """Take as long as four samples of `Waiting` do: one worker pays."""
    time.sleep(0.08)


def in_memory():
    return TensorDataset(torch.arange(60_000.0), torch.zeros(60_000, 8))


def alone(loader, step=None, **options):
    """Tuning with one process only."""
    return tune(loader, step, **{"budget_s": ONE, "max_workers": 0, **options})


def tried(found):
    return [each.settings.num_workers for each in found.trials]


class PlayedClock:
    """A clock on which a step takes 10 ms, known only after `wait`."""

    def __init__(self):
        self.now, self.known = 0.0, 0.0

    def step(self, batch):
        assert (batch >= 0).all()
        batch.fill_(-1.0)  # as a step may: those after it get copies
        self.now += 0.01

    def mark(self):
        return self.now

    def wait(self):
        self.known = self.now

    def seconds(self, first, last):
        assert last <= self.known
        return last - first


def test_a_device_works_on_while_a_batch_is_loaded():
    clock, held = PlayedClock(), [torch.zeros(4)]
    cost = trial.driven(trial.observe_step(held, 0.02, clock), clock.step)
    assert cost.seconds.estimate == pytest.approx(0.01)
    assert held[0].tolist() == [0.0] * 4
    loader = TorchLoader(Waiting(size=10, seconds=0.001), 4)
    seen = trial.driven(trial.observe(loader, stepping=True, seconds=0.1, clock=clock), clock.step)
    assert seen.samples_per_batch == pytest.approx(10 / 3, rel=0.1)
    assert seen.epochs > 1
    for took, on_thread, seconds in ((0.02, 1.0, 0.03), (0.02, 0.25, 0.02), (0.012, 0.5, 0.016)):
        step = trial.StepCost(Interval(took, took, took), on_thread)
        assert seen.followed_by(step).seconds_per_batch.estimate == pytest.approx(seconds)


def test_a_given_clock_times_all_trials():
    clock = PlayedClock()
    found = tune(TorchLoader(Waiting(seconds=0.003), 4), clock.step, budget_s=3, clock=clock)
    assert found.needed_samples_per_second.estimate == pytest.approx(400)
    rates = [each.samples_per_second.estimate for each in found.trials]
    assert rates[0] < 340  # loading takes 12 ms
    assert rates[1:] == [pytest.approx(400)] * len(rates[1:]) != []


def test_trials_are_printed_and_go_to_json(tmp_path):
    rate = Interval(95.0, 100.0, 105.0)
    slow, fast = tuning.Settings(0, None, False), tuning.Settings(2, 2, True)
    trials = (
        tuning.Trial(slow, "one process", rate, 100.0, cpu_share=0.5),
        tuning.Trial(fast, "workers", rate, 90.0, 0.1, 0.5, 0.9),
        tuning.Trial(tuning.Settings(4, 2, True), "more", None, None, failed="they died"),
    )
    found = tuning.Tuning(fast, "it is faster", slow, None, trials, rate, 2.0, 64, ("by the way",))
    assert "use num_workers=2, prefetch_factor=2, pin_memory=True: it is faster" in str(found)
    assert "they died" in str(found)
    entry = json.loads(found.to_json(tmp_path / "tuning.json"))
    assert entry == json.loads((tmp_path / "tuning.json").read_text())
    assert entry["given"] == {"num_workers": 0, "prefetch_factor": None, "pin_memory": False}
    assert entry["trials"][2]["failed"] == "they died"


def test_tensors_in_memory_need_no_workers():
    found = tune(DataLoader(in_memory(), 256, shuffle=True), budget_s=SOME)
    assert found.choice == tuning.Settings(0, None, False)
    assert found.worth_it is False
    assert "in memory" in found.reason
    assert tried(found) == [0]
    found = tune(DataLoader(in_memory(), 256, num_workers=2), budget_s=ONE)
    assert (found.choice.num_workers, found.given) == (0, tuning.Settings(2, 2, False))
    assert found.worth_it is None


def test_a_batch_that_takes_longer_than_the_budget():
    found = tune(TorchLoader(Waiting(seconds=0.4), 1), budget_s=0.6)
    assert tried(found) == [0]
    assert any("a larger one (budget_s=, or --budget)" in note for note in found.notes)


@pytest.mark.gpu
def test_with_cuda_pinning_is_tried_both_ways():
    def step(batch):
        batch[0].to("cuda", non_blocking=True).sum()

    for one in (step, None):
        loader = TorchLoader(Waiting(), 8, pin_memory=one is None)
        found = tune(loader, one, budget_s=SOME, max_workers=2)
        assert {each.settings.pin_memory for each in found.trials[-2:]} == {False, True}
        assert len(list(zip(range(3), found.apply(loader), strict=False))) == 3


def test_batches_of_several_sizes_single_samples_and_short_epochs():
    arguments = ({"batch_size": None}, {"batch_sampler": [[1, 2], [3], [4, 5, 6]]})
    for given in (*arguments, {"batch_size": 80}):
        loader = DataLoader(Waiting(size=100, seconds=0.001), **given)
        found = alone(loader)
        assert found.trials[0].samples_per_second is not None
        assert len(list(found.apply(loader))) == len(loader)


@pytest.mark.nightly
def test_an_iterable_dataset_gets_no_more_workers_than_it_has():
    found = tune(TorchLoader(Shared(100_000), 4, num_workers=2), budget_s=SOME)
    assert set(tried(found)) == {0, 2}
    assert any("iterable" in note for note in found.notes)


def test_a_one_shot_sampler_is_refused_and_not_consumed():
    indices = (index for index in range(8))
    with pytest.raises(CheckError, match="cannot copy the loader's generator"):
        alone(TorchLoader(Waiting(size=8), 2, sampler=indices))
    assert list(indices) == list(range(8))


def states(*generators):
    return [*generator_states(), *(each.get_state() for each in generators)]


@pytest.mark.nightly
def test_tune_restores_random_states_and_leaves_the_loader_unchanged():
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(range(100), generator=torch.Generator().manual_seed(1))
    for options in ({"shuffle": True, "generator": generator}, {"sampler": sampler}):
        loader = TorchLoader(Waiting(100), 4, num_workers=1, **options)
        before, known = dict(vars(loader)), states(generator, sampler.generator)
        tune(loader, lambda batch: random.random(), budget_s=1.0, max_workers=1)
        assert vars(loader) == before
        assert_same(states(generator, sampler.generator), known)
    steps = tuner.Tuner(DataLoader(Waiting(), 4, num_workers=1), SOME).run()
    known = states()
    while not started():  # a loop that ends first closes it
        next(steps)
    random.random()
    steps.close()
    assert not started()
    assert_same(states(), known)


def test_live_workers_of_the_loader_go_on():
    loader = TorchLoader(Waiting(40), 4, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    first = next(batches)
    tune(loader, budget_s=1.0, max_workers=1)
    assert torch.cat([first, *batches]).flatten().tolist() == list(range(40))


def test_applying_shares_everything_but_the_settings():
    loader = TorchLoader(Waiting(20), 4, num_workers=2, timeout=30, persistent_workers=True)
    applied = alone(loader).apply(loader)
    assert type(applied) is TorchLoader
    assert (applied.num_workers, applied.timeout, applied.persistent_workers) == (0, 0, False)
    assert applied.dataset is loader.dataset
    assert loader.num_workers == 2
    assert len(list(applied)) == 5
    loader = DataLoader(Waiting(), 4, backend="prefetch", seed=3)
    applied = alone(loader).apply(loader)
    assert (applied.backend, applied.seed, applied.num_workers) == ("prefetch", 3, 0)


def dies(index):
    """A worker is killed, as by a full /dev/shm or by lack of memory."""
    if in_worker():
        os.kill(os.getpid(), signal.SIGKILL)


def is_broken(index):
    if index == 7:
        raise LookupError("sample 7 is broken")


def is_broken_in_a_worker(index):
    if in_worker():
        raise LookupError("broken in a worker")


# torch waits five seconds for each worker that a killed one left waiting for a lock.
@pytest.mark.usefixtures("workers_end_fast")
class TestWhatGoesWrong:
    @pytest.mark.nightly
    def test_workers_that_die_are_a_failed_trial(self):
        loader = TorchLoader(Waiting(happens=dies), 4, num_workers=2)
        found = tune(loader, budget_s=SOME, max_workers=8)
        assert found.choice.num_workers == 0
        assert tried(found) == [0, 2]
        assert any(word in str(found.trials[1].failed) for word in ("exited", "killed"))
        assert "failed" in " ".join(found.notes)
        assert not started()

    def test_a_dataset_that_no_worker_can_read_is_not_read_here(self):
        here = []
        dataset = Waiting(happens=lambda index: here.append(index))
        loader = TorchLoader(dataset, 4, num_workers=1, multiprocessing_context="forkserver")
        found = tune(loader, budget_s=SOME)
        assert found.choice.num_workers == 0
        assert (tried(found), here) == ([], [])
        assert "workers cannot be used for this dataset: " in found.reason
        assert "must be picklable" in str(found)

    @pytest.mark.parametrize("happens", [is_broken, is_broken_in_a_worker])
    def test_an_error_of_the_dataset_is_raised(self, happens):
        with pytest.raises(LookupError, match="broken"):
            tune(TorchLoader(Waiting(happens=happens), 4), budget_s=SOME)
        assert not started()

    def test_a_loader_without_a_batch(self):
        for loader in (TorchLoader(Waiting(3), 4, drop_last=True), TorchLoader(Shared(0), 4)):
            with pytest.raises(CheckError, match="yields no batch"):
                tune(loader, budget_s=ONE)

    def test_bad_options(self):
        for name, value, rule in (
            ("budget_s", float("nan"), "a positive"),
            ("max_workers", -1, "0 or more"),
            ("step", 3, "a function"),
        ):
            with pytest.raises(OptionError, match=f"{name}={value}: must be {rule}"):
                tune(TorchLoader(in_memory()), **{name: value})
        with pytest.raises(TypeError, match="and got list"):
            tune([1, 2])

    def test_ctrl_c_is_raised_and_progress_has_the_result_so_far(self):
        seen = []

        def interrupt(progress):
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

    @pytest.mark.nightly
    def test_a_warning_says_that_more_workers_have_no_room(self, monkeypatch):
        monkeypatch.setattr(resources, "shm_room", lambda path=None: 5 * 4)  # five batches
        loader = TorchLoader(Waiting(), None)  # a sample of 4 bytes
        rule = "7 workers with prefetch_factor=1.*--shm-size"
        with pytest.warns(CapacityWarning, match=rule) as caught:
            found = tune(loader, budget_s=SOME, max_workers=9)
        assert [warning.filename for warning in caught] == [__file__]  # the line that asked
        assert set(tried(found)) == {0, 2, 3}
        assert {each.settings.prefetch_factor for each in found.trials} == {None, 1}

    def test_a_warning_says_that_the_loaders_own_settings_cannot_fit(self):
        huge = torch.zeros(1).expand(100, 10**10)  # 40 GB a sample by its shape, 4 bytes in truth
        loader = TorchLoader(huge, None, num_workers=2, prefetch_factor=100)
        rule = "the loader as it is will fail: 2 workers"
        with pytest.warns(CapacityWarning, match=rule) as caught:
            found = alone(loader)
        assert [warning.filename for warning in caught] == [__file__]
        assert found.choice.num_workers == 0


def test_a_choice_of_one_process_is_not_used_by_several_ranks(monkeypatch):
    dataset = Waiting(seconds=0)

    def auto(batch_size=4):
        return DataLoader(dataset, batch_size, num_workers="auto").num_workers

    found = alone(DataLoader(dataset, 4, shuffle=True), slow_step)
    assert found.remembered is not None
    assert found.choice.num_workers == auto() == 0
    assert auto(5) > 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(max(2, resources.usable_cores())))
    assert auto() == 1  # by the rule
    alone(DataLoader(dataset, 4), slow_step)
    assert auto() == 0


def test_nothing_is_remembered_if_not_wanted_or_not_writable(tmp_path, monkeypatch):
    assert alone(TorchLoader(Waiting(), 4), remember=False).remembered is None
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("DATALOADERS_CACHE", __file__)
    found = alone(TorchLoader(Waiting(), 4))
    assert found.remembered is None
    assert any("set DATALOADERS_CACHE to a folder" in note for note in found.notes)
