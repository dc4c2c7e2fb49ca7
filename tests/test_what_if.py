"""What the check finds after its verdict: waits, preparation by calls, cold files, remedies."""

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomCrop, ToTensor, v2

from bench.check import played
from bench.check.known_work import burn
from bench.check.played import HostOn, VirtualTime
from dataloaders import DataLoader as Ours
from dataloaders.bottleneck import Check, Interval, check_bottleneck
from dataloaders.bottleneck.causes import causes
from dataloaders.predicting import (
    Candidate,
    Sharing,
    SmallCache,
    Stages,
    best_of,
    candidates,
    left_open,
    seconds_of_a_worker,
    seconds_per_batch,
    small_caches,
)
from helpers.datasets import MapDataset, Waiting, wait
from helpers.pictures import smooth
from helpers.processes import children

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def exactly(seconds):
    return Interval(seconds, seconds, seconds)


def by_name(found):
    return {candidate.name: candidate for candidate in found}


class Quick:
    """A transform that waits."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, value):
        wait(self.seconds)
        return value


class Slow(Quick):
    pass


class Busy(Quick):
    """A transform that computes."""

    def __call__(self, value):
        burn("work", self.seconds)
        return value


class Transformed(Waiting):
    """Samples that a function loads, and transforms change."""

    def __getitem__(self, index):
        return self.transform(self.load(index))

    def load(self, index):
        wait(self.seconds)
        return torch.zeros(4)

    transform = Compose([Quick(0.002), Slow(0.012), Busy(0.004)])


class Files(Waiting):
    """Samples that are files; ``slow`` takes 40 ms."""

    def __init__(self, folder, count, slow=None):
        super().__init__(count, 0.002)
        self.paths = [folder / f"{number}.bin" for number in range(count)]
        self.slow = slow
        for path in self.paths:
            path.write_bytes(bytes(50_000))
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    def __getitem__(self, index):
        self.paths[index].read_bytes()
        wait(0.04 * (index == self.slow))
        return super().__getitem__(index)


class Uneven(Waiting):
    """One sample of 50 takes 100 times as long."""

    def sample(self, index):
        self.wait(self.seconds * 99 * (index % 50 == 7))
        return {"x": super().sample(index)}


class Bulk(Waiting):
    """Samples that are read by lists of indices."""

    def __getitem__(self, indices):
        return torch.stack([self.sample(index) for index in indices])


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        for _ in range(self.count):
            wait(0.004)
            yield torch.zeros(4)


def checked(dataset, *, batch=2, step_s=0.002, budget_s=1.5, workers=0, **options):
    """The report of a loop over ``dataset``, in real time."""
    loader = DataLoader(dataset, batch, num_workers=workers)
    return check_bottleneck(loader, lambda batch: wait(step_s), budget_s=budget_s, **options)


def played_check(make, step_s, time=None, **options):
    """The same of the loader that ``make`` makes of a way to wait, on a virtual time."""
    time = time or VirtualTime()
    given = {"budget_s": 10, "clock": HostOn(time), **options}
    return check_bottleneck(make(time.sleep), lambda batch: time.sleep(step_s), **given)


def on_played_time(make, load_s, step_s, **options):
    """The same of samples of ``load_s``."""
    return played_check(lambda sleep: DataLoader(make(5000, load_s, sleep), 2), step_s, **options)


def test_transforms_and_functions_have_their_shares():
    before = children()
    report = checked(Transformed(400, 0.002), workers=1)
    assert children() <= before
    shares = {row.call.partition(" ")[0]: row.share for row in report.preparation}
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert shares["Slow"] > 2 * shares["Quick"]
    assert {"Slow", "Quick", "Busy", "load", "collate", "passing"} <= set(shares)
    cpu = {row.call: row.cpu_seconds_per_sample for row in report.preparation}
    assert cpu["Busy"] > 0.002 > cpu["Slow"]
    assert sum(shares.values()) == pytest.approx(1)
    assert 0 < cpu["passing between processes"] < 0.002
    assert report.preparation[0].seconds_per_sample >= 0.004
    assert "Slow" in str(report)
    assert set(report.seconds_per_batch) == {"synthetic", "contended", "real"}  # without files
    assert "fetch" not in report.stalls


@pytest.mark.parametrize(
    ("kind", "workers", "count", "slow"),
    [
        (Ours, 1, 60, None),
        pytest.param(DataLoader, 0, 24, 9, marks=pytest.mark.nightly),
    ],
)
def test_files_are_evicted_and_read_again_and_slow_ones_named(tmp_path, kind, workers, count, slow):
    loader = kind(Files(tmp_path, count, slow), 2, num_workers=workers)
    report = check_bottleneck(loader, lambda batch: wait(0.002), budget_s=4 + workers // 2)
    seconds, waits = report.seconds_per_batch, report.waits
    lost = seconds["cold"].estimate - seconds["real"].estimate
    assert report.stalls["fetch"].estimate == pytest.approx(lost)
    assert waits["p50"] <= waits["p99"] <= waits["longest"]
    if slow is not None:
        assert waits["p50"] < 0.04
        found = {index: (file, seconds) for index, file, seconds in waits["slow"]}
        assert found[slow][0] == str(tmp_path / f"{slow}.bin")
        assert found[slow][1] >= 0.04
        assert f"slow: sample {slow}" in str(report)


@pytest.mark.nightly
def test_decoding_and_transforms_of_photos_have_their_own_shares(tmp_path):
    (tmp_path / "a").mkdir()
    for number in range(40):
        noise = Image.effect_noise((640, 480), 64).convert("RGB")
        noise.save(tmp_path / "a" / f"{number}.jpeg")
    chain = v2.Compose([v2.RandomResizedCrop(64), v2.ToImage(), v2.GaussianBlur(5)])
    report = checked(ImageFolder(tmp_path, chain), step_s=0.001, budget_s=2)
    assert report.preparation, str(report)
    shares = {row.call: row.share for row in report.preparation}
    assert {"decode", "RandomResizedCrop", "GaussianBlur"} <= set(shares)


@pytest.mark.parametrize(
    ("dataset", "options", "sample_s"),
    [
        (Uneven, {"batch_size": 2, "sampler": np.arange(5000)}, 0.001),
        (Bulk, {"batch_size": None, "sampler": BatchSampler(range(5000), 3, False)}, 0.003),
    ],
)
def test_samples_are_looked_at_by_keys_as_the_sampler_draws_them(dataset, options, sample_s):
    report = played_check(lambda sleep: DataLoader(dataset(5000, 0.001, sleep), **options), 0.002)
    assert report.preparation, report.notes
    took = sum(row.seconds_per_sample for row in report.preparation)
    assert sample_s * 0.99 < took < sample_s + 0.01


def test_samples_are_read_in_another_process():
    here = os.getpid()

    class Failing(Waiting):
        def sample(self, index):
            if os.getpid() != here:
                raise ValueError("read elsewhere")
            return super().sample(index)

    report = on_played_time(Failing, 0.004, 0.002)
    assert not report.preparation
    assert not report.candidates
    assert any("read elsewhere" in note for note in report.notes)


def test_a_step_of_several_threads_is_run_with_workers_after_its_only_epoch(monkeypatch):
    monkeypatch.setitem(candidates.__globals__, "_RUN_S", 0.05)
    monkeypatch.setitem(candidates.__globals__, "_ROOM", 60)  # there is no time for a second run
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    loader = DataLoader(range(24), collate_fn=Busy(0.02))
    check = Check(loader, budget_s=3, only_epoch=True)
    steps, matrices = 0, [torch.ones(700, 700)] * 2
    with ThreadPoolExecutor(2) as threads, suppress(IndexError):
        for _ in check:
            steps += 1
            list(threads.map(torch.mm, matrices, matrices))
            if check.report().candidates:
                raise IndexError("the script has no room for further batches")
    report = check.report()
    check.close()
    assert report.verdict == "input-bound"
    assert steps > 22  # two batches are the script's own
    assert {"workers", "h5"} <= set(by_name(report.candidates))


def test_an_iterable_dataset_has_no_indices():
    report = checked(Stream(10**9), budget_s=1)
    assert report.preparation[0].call.startswith("wait (datasets.py")
    assert report.waits["slow"] == ()
    found = by_name(report.candidates)
    assert found["h5"].reason.startswith("an iterable dataset has no samples by index")
    assert found["workers"].options["num_workers"] > 1
    assert any("if it does not divide its samples among workers" in one for one in report.notes)


def test_what_does_not_fit_into_half_of_the_budget_is_left_out_and_progress_goes_on():
    shown = []
    found = on_played_time(Waiting, 3.0, 0.5, progress=shown.append)
    assert "too small a budget" in by_name(found.candidates)["h5"].reason
    phases = {one.phase for one in shown}
    assert {"what preparation consists of", "what changes would gain"} <= phases


def test_causes_are_not_sought_if_the_step_is_the_limit_or_if_switched_off():
    quick = on_played_time(Waiting, 0.0, 0.01)
    assert (quick.verdict, quick.preparation, quick.candidates) == ("step-bound", (), ())
    off = on_played_time(Waiting, 0.004, 0.002, predict=False)
    assert off.candidates == ()
    assert off.advice[0].startswith("let workers prepare batches")


OUT = Candidate("workers", reason="0 workers and the step share 2 cores: more are missing")
CORES, DALI = (
    Candidate("more cores", predicted=Interval(1.1, 1.44, 1.7)),
    Candidate("dali", {"num_workers": 1, "backend": "dali"}, Interval(0.9, 1.2, 1.7)),
)
H5 = Candidate("h5", {"backend": "h5"}, Interval(1.3, 1.35, 1.4))
TRY = "to measure what changes gain in this loop, give `--try` (try_candidates=True)"
UNSURE = "no change of the input that was predicted is sure to gain 5 %"
MISSING = "cores are missing: with twice as many, the loop is 1.44 x (1.10 to 1.70) as fast"


@pytest.mark.parametrize(
    ("found", "advice", "last"),
    [
        ([OUT, CORES, DALI], [UNSURE, TRY, MISSING, "do less a sample: "], "-> do less"),
        ([replace(H5, measured=exactly(1.6)), CORES], [], '   DataLoader(..., backend="h5")'),
    ],
)
def test_advice_is_what_the_predictions_leave_to_do(found, advice, last, monkeypatch):
    """Workers are not advised where the table says that cores are missing."""

    def predicted(*given, **options):
        return tuple(found)
        yield

    monkeypatch.setattr(causes, "candidates", predicted)
    report = on_played_time(Waiting, 0.004, 0.002)
    assert len(report.advice) == len(advice)
    assert all(map(str.startswith, report.advice, advice))
    assert str(report).splitlines()[-1].startswith(last)
    assert "let workers prepare" not in str(report)


def test_workers_are_predicted_and_a_sampler_and_its_draws_left_alone():
    time = VirtualTime()
    loader = DataLoader(Waiting(400, 0.005, time.sleep), 4, shuffle=True)
    report = played_check(lambda _: loader, 0.01, time)
    found = by_name(report.candidates)
    assert found["workers"].predicted.estimate == pytest.approx(3, rel=0.1)
    seconds = json.loads(report.to_json())["candidates"][0]["seconds"]["estimate"]
    real = report.seconds_per_batch["real"].estimate
    assert seconds == pytest.approx(real / report.candidates[0].predicted.estimate)
    assert "no images are decoded" in found["dali"].reason
    torch.manual_seed(3)
    own = [batch[:, 0].tolist() for batch in loader]
    torch.manual_seed(3)
    assert own == [batch[:, 0].tolist() for batch in DataLoader(loader.dataset, 4, True)]


def test_what_is_tried_is_compared_with_the_loop_as_it_is_before_and_after():
    """On a machine that grows slower all the while."""
    time = VirtualTime()
    began = []

    def drifting(seconds):
        began[:] = began or [time.now()]
        time.sleep(seconds * (1 + (time.now() - began[0]) / 10))

    loader = DataLoader(Waiting(5000, 0.002, drifting), 2)
    given = {"budget_s": 10, "clock": HostOn(time), "try_candidates": True}
    report = check_bottleneck(loader, lambda batch: drifting(0.004), **given)
    found = by_name(report.candidates)["h5"]
    assert report.seconds_per_batch["real"].high < 0.01  # it was faster then
    assert time.now() > 7
    assert found.measured.estimate == pytest.approx(2, rel=0.03)  # of 8 ms a batch 4 are left
    assert found.measured.low < 2 < found.measured.high


def test_more_memory_is_said_where_the_files_are_larger(tmp_path):
    path = tmp_path / "large.bin"
    path.touch()
    os.truncate(path, 1 << 30)  # it takes no room

    class Large(Waiting):
        def __getitem__(self, index):
            path.open("rb").close()
            return super().__getitem__(index)

    (note,) = (one for one in on_played_time(Large, 0.004, 0.002).notes if "memory" in one)
    assert note.startswith("the dataset's files take about 5000 GiB and memory has room for ")
    assert note.endswith("more memory is missing")


IDLE = {"load_cores": 0.0, "step_cores": 0.0}  # what waits for data needs no core
GIVEN = {"decodes": False, "batches": 16, "until": math.inf}


class TestModel:
    """Decisions on given numbers."""

    def stages(self, load, **options):
        real, step = options.pop("real", load + 0.01), options.pop("step", 0.01)
        sharing = {"cores": 8, "load_cores": 1.0, "step_cores": 1.0}
        sharing = {name: options.pop(name, value) for name, value in sharing.items()}
        loads = options.pop("loads", [load])
        return Stages(exactly(real), exactly(step), loads, sharing=Sharing(**sharing), **options)

    def found(self, stages):
        steps = candidates(DataLoader(Waiting(64, 0.0), 4), stages, **GIVEN)
        with pytest.raises(StopIteration) as ended:
            next(steps)
        return by_name(ended.value.value)

    @pytest.mark.parametrize(
        ("load", "options", "name", "change", "gain"),
        [
            (0.04, {}, "workers", "num_workers=4", 5),  # the fewest that keep up
            (0.005, {"real": 0.015, "transfer": 0.005, "workers": 2}, "prefetch", None, 1.5),
            (0.001, {"real": 0.02, "workers": 2, "starting": 0.01}, "persistent_workers", None, 2),
            (0.08, {**IDLE, "real": 0.08, "workers": 1, "cores": 1}, "workers", "num_workers=4", 4),
        ],
    )
    def test_what_a_change_gains(self, load, options, name, change, gain):
        found = self.found(self.stages(load, **options))[name]
        assert found.predicted.estimate == pytest.approx(gain, rel=0.02)
        assert change in (None, found.change)

    def test_without_workers_batches_are_made_beside_the_work_of_a_device(self):
        given = {"step": 0.02, "transfer": 0.008, "overlaps": True}
        stages = self.stages(0.015, real=0.028, **given)
        assert stages.seconds().estimate == pytest.approx(0.028)
        found = self.found(stages)
        assert found["prefetch"].predicted.estimate == pytest.approx(1.4)
        assert found["workers"].reason == "loading costs next to nothing"
        longer = self.found(self.stages(0.06, real=0.068, **given))
        assert longer["workers"].seconds.estimate == pytest.approx(0.028, rel=0.02)

    def test_a_cache_gains_what_reading_a_small_one_takes_less(self):
        given = {"": SmallCache(0.25, 64), "jpeg": SmallCache(0.5, 16)}
        cached = self.found(self.stages(0.04, cached=given, samples=4))
        raw, small = cached["h5"], cached["h5 (jpeg)"]
        assert raw.predicted.estimate == pytest.approx(2.5, rel=0.02)
        assert small.predicted.estimate == pytest.approx(5 / 3, rel=0.02)
        assert small.change == 'backend=H5(images="jpeg")'
        assert cached["h5 + workers"].change == 'num_workers=1, backend="h5"'
        assert (raw.build_bytes, small.build_bytes) == (4096, 1024)
        half = {"": SmallCache(0.25, 64), "jpeg": SmallCache(0.5, 48)}
        assert "h5 (jpeg)" not in self.found(self.stages(0.04, cached=half, samples=4))

    def test_a_cache_says_what_it_takes_and_when_it_pays(self):
        stages = self.stages(2.0, real=2.1, step=0.1, cached={"": SmallCache(0.96, 1e6)})
        found = self.found(stages)
        assert found["h5 + workers"].seconds.estimate < found["h5"].seconds.estimate / 2
        assert found["h5"].costs.startswith("built once: about 4 s, 15 MiB, pays after ")
        for one in (found["h5"], found["h5 + workers"]):
            assert one.pays_after == math.ceil(4 / (16 * (2.1 - one.seconds.estimate)))
        full = {"": SmallCache(0.25, 1e15)}
        assert "a larger one is missing" in self.found(self.stages(0.04, cached=full))["h5"].reason

    def test_small_caches_and_taking_are_measured_in_a_worker_and_nothing_is_drawn(self):
        state, until = torch.get_rng_state(), time.perf_counter() + 60
        (found,), reason = small_caches(DataLoader(Waiting(100, 0.004), 4), 4, 0.004, until)
        assert (found, reason) == ("", "")
        take_s, start_s = seconds_of_a_worker({"x": torch.zeros(4, 3), "name": "a"})
        assert 0 < take_s < start_s
        assert torch.equal(torch.get_rng_state(), state)
        found, reason = small_caches(DataLoader(MapDataset("drawing", 100), 4), 4, 0.001, until)
        assert not found
        assert "random" in reason
        assert "too small a budget" in small_caches(DataLoader([1, 2]), 1, 20.0, until)[1]

    def test_caches_of_images_come_in_each_format(self, tmp_path):
        for number in range(16):
            folder = tmp_path / "photos" / str(number % 2)
            folder.mkdir(parents=True, exist_ok=True)
            smooth(number, 150, 200).save(folder / f"{number}.jpg")
        chain = Compose([RandomCrop(64), ToTensor()])
        loader = DataLoader(ImageFolder(str(tmp_path / "photos"), chain), 4)
        found, reason = small_caches(loader, 4, 0.01, time.perf_counter() + 60)
        assert not reason
        assert set(found) == {"", "jpeg", "packed"}
        assert found["jpeg"].bytes_per_sample < found[""].bytes_per_sample / 2

    @pytest.mark.parametrize(
        ("load", "options", "name", "reason"),
        [
            (0.08, {"real": 0.08, "workers": 1, "cores": 1}, "workers", "more cores are missing"),
            (0.08, {"real": 0.04, "workers": 2, "room": 4}, "workers", "shared memory"),
            (0.02, {"starting": 0.03}, "workers", "starting them for each epoch takes as long"),
            (0.005, {"real": 0.015, "transfer": 0.005, "workers": 2}, "workers", "keep up"),
            (0.04, {}, "prefetch", "no copy"),
            (0.04, {"uncached": "no cache holds it"}, "h5", "no cache holds it"),
        ],
    )
    def test_why_a_change_is_out(self, load, options, name, reason):
        found = self.found(self.stages(load, **options))
        assert reason in found[name].reason
        if "cores" in options:
            assert found["more cores"].predicted.estimate > 1.5
            assert found["more cores"].code == ""

    def test_workers_and_a_step_share_the_cores(self):
        """Two workers of 16 ms and a step of 8 ms want 24 ms of 2 cores: 12 ms a batch."""
        stages = self.stages(0.016, step=0.008, real=0.024, cores=2)
        assert stages.seconds(workers=2).estimate == pytest.approx(0.012, rel=0.02)
        # Where nothing is prepared most of the time, the step has the cores for itself.
        light = self.stages(0.002, step=0.02, real=0.022, cores=2, step_cores=2.0)
        assert light.seconds(workers=2).estimate == pytest.approx(0.021, rel=0.03)
        device = replace(stages, sharing=replace(stages.sharing, step_cores=0.0, behind=True))
        assert device.seconds(workers=2).estimate == pytest.approx(0.008, rel=0.02)

    @pytest.mark.parametrize(("took", "gain"), [(0.04, 1.5), (0.2, None)])
    def test_the_loop_is_run_where_workers_wait_for_a_step_of_several_threads(self, took, gain):
        """With two workers, then as it is, twice: on a machine that has become half as fast."""
        cached = {"": SmallCache(0.8, 64)}
        stages = self.stages(0.02, step=0.01, real=0.03, cores=2, step_cores=2.0, cached=cached)
        computed = self.found(stages)
        seen = []

        def run(options, seconds, timeout_s):
            seen.append((options.get("num_workers", 0), seconds))
            yield torch.ones(1)
            return exactly((took if options else 0.06) * (0.9 if len(seen) < 3 else 1.1))

        steps = candidates(DataLoader(Waiting(400, 0.01), 2), stages, **GIVEN, run=run)
        for _ in range(4):
            assert next(steps).all()
        with pytest.raises(StopIteration) as end:
            next(steps)
        assert seen == [(2, 1.5), (0, 1.5)] * 2
        every = by_name(end.value.value)
        longer = took / 2 / computed["workers"].seconds.estimate  # on the machine as it was
        wanted = max(1, longer) * computed["h5 + workers"].seconds.estimate
        assert every["h5 + workers"].seconds.estimate == pytest.approx(wanted, rel=0.01)
        found = every["workers"]
        if gain is None:
            assert "more cores are missing" in found.reason
            assert every["more cores"].predicted.estimate > 2  # with workers beside the step
        else:
            assert found.predicted.estimate == pytest.approx(gain, rel=0.01)
            ends = found.predicted.low, found.predicted.high
            assert ends == pytest.approx((gain / 1.1, gain / 0.9), rel=0.01)

    def test_the_scale_makes_the_model_agree_with_the_loop(self):
        stages = self.stages(0.02, real=0.03, workers=1)  # alone a batch takes 20 ms, here 30
        assert stages.scale == pytest.approx(1.5, rel=0.01)
        assert stages.seconds().estimate == pytest.approx(0.03, rel=0.01)
        two = stages.seconds(workers=2)
        assert two.low <= 0.01 + 1e-9 <= 0.015 <= two.high + 1e-9

    def test_of_changes_that_gain_alike_the_simplest_is_the_one_to_make(self):
        gain = exactly(2.0)
        one = Candidate("workers", {"num_workers": 2}, gain)
        pair = Candidate("a + b", {"a": 1, "b": 2}, gain)
        build = Candidate("h5", {"backend": "h5"}, exactly(2.01), build_s=1.0)
        assert best_of([build, pair, one]) is one
        assert best_of([replace(build, predicted=exactly(3.0)), one]).name == "h5"
        assert best_of([replace(build, measured=exactly(1.5)), one]) is one
        assert best_of([replace(one, predicted=exactly(1.01))]) is None
        assert best_of([Candidate("dali", reason="no device")]) is None

    def test_left_open_is_what_may_gain_and_may_be_the_best(self):
        def change(name, *ends, **more):
            return Candidate(name, {"num_workers": 1}, Interval(*ends), **more)

        best, near = change("best", 1.9, 2.0, 2.1), change("near", 1.5, 1.7, 1.87)
        beaten, out = change("beaten", 1.2, 1.5, 1.8), change("out", 3.0, 3.0, 3.0, reason="why")
        assert left_open([beaten, near, out, best]) == [near, best]
        assert left_open([beaten, Candidate("more cores", predicted=exactly(3.0))]) == [beaten]
        assert left_open([change("nothing", 0.9, 1.0, 1.04)]) == []
        assert left_open([change("little", 0.9, 1.0, 1.06)]) != []


MILLISECONDS = st.integers(1, 200).map(lambda value: value / 1000)


@settings(max_examples=40)
@example([0.01 * (1 + number % 7) for number in range(67)], 0.001, 6, 2)  # a period of 402
@example([0.001, 0.008], 0.001, 3, 1)  # queues come together again after two periods
@given(
    st.lists(MILLISECONDS, min_size=1, max_size=8),
    MILLISECONDS,
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_the_model_is_torchs_loader_as_it_is_played(loads, step, workers, ahead):
    real = seconds_per_batch(loads, step, workers=workers, prefetch=ahead)
    twice = seconds_per_batch(
        loads, step, workers=workers, prefetch=ahead, slowed=lambda busy, stepping: (2.0, 2.0)
    )
    assert twice == pytest.approx(2 * real)
    assert step * (1 - 1e-9) <= real <= (max(loads) + step) * (1 + 1e-9)
    as_played = played.seconds_per_batch(loads, [step], workers=workers, prefetch=ahead)
    assert real == pytest.approx(as_played, rel=0.01)  # which counts no whole periods
    constant = seconds_per_batch(loads[:1], step, workers=workers, prefetch=ahead)
    assert constant == pytest.approx(max(step, loads[0] / workers), rel=0.03)


def test_bursts_and_the_time_to_take_a_batch():
    burst = [0.01] * 7 + [0.16]
    assert seconds_per_batch(burst, 0.04, workers=2, prefetch=4) == pytest.approx(0.04)
    # One batch ahead: the slow one is waited for 160 - 40 ms, once in eight steps.
    assert seconds_per_batch(burst, 0.04, workers=1, prefetch=1) == pytest.approx(0.04 + 0.12 / 8)
    taken = seconds_per_batch([0.01], 0.05, workers=1, prefetch=2, take_s=0.001)
    assert taken == pytest.approx(0.051)
    # Half as fast beside a step: 10 ms of it make 5 of the 30.
    beside = seconds_per_batch(
        [0.03], 0.01, workers=1, prefetch=2, slowed=lambda busy, stepping: (1.0 + stepping, 1.0)
    )
    assert beside == pytest.approx(0.035)
    # Once its queue is full, a worker is busy for 5 ms of each batch, 2.5 of the step's 10.
    full = seconds_per_batch(
        [0.005], 0.01, workers=1, prefetch=100, slowed=lambda busy, stepping: (1.0, 1.0 + busy)
    )
    assert full == pytest.approx(0.0125)
