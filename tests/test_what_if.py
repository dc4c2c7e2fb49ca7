"""What the check finds after its verdict: waits, preparation by calls, cold files, remedies."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dataloaders.bottleneck import Interval, Report, check_bottleneck
from dataloaders.predicting import Candidate, Stages, best_of, candidates
from helpers import warm
from helpers.waits import Waiting, wait

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.played import HostOn, VirtualTime

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


def exactly(seconds: float) -> Interval:
    return Interval(seconds, seconds, seconds)


def by_name(found: Any) -> dict[str, Candidate]:
    return {candidate.name: candidate for candidate in found}


class Quick:
    """A transform that waits."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, value: Any) -> Any:
        wait(self.seconds)
        return value


class Slow(Quick):
    pass


class Compose:
    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class Transformed(Waiting):
    """Samples that a function loads, and transforms change."""

    def __getitem__(self, index: int) -> torch.Tensor:
        made: torch.Tensor = self.transform(self.load(index))
        return made

    def load(self, index: int) -> torch.Tensor:
        wait(self.seconds)
        return torch.zeros(4)

    transform = Compose(Quick(0.002), Slow(0.012))


class Files(Dataset[torch.Tensor]):
    """Samples that are files; ``slow`` ones take 40 ms."""

    def __init__(self, folder: Path, count: int, slow: tuple[int, ...] = ()) -> None:
        self.paths = [folder / f"{number}.bin" for number in range(count)]
        self.slow = slow
        for path in self.paths:
            path.write_bytes(bytes(50_000))
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        data = self.paths[index].read_bytes()
        wait(0.04 if index in self.slow else 0.002)
        return torch.full((4,), float(len(data)))


class Failing(Dataset[torch.Tensor]):
    """Samples that can be read in this process only."""

    def __init__(self) -> None:
        self.here = os.getpid()

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.getpid() != self.here:
            raise ValueError("read elsewhere")
        wait(0.004)
        return torch.zeros(4)


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            wait(0.004)
            yield torch.zeros(4)


def checked(dataset: Any, *, batch: int = 2, budget_s: float = 2.0, **options: Any) -> Report:
    loader: Any = DataLoader(dataset, batch, num_workers=options.pop("workers", 0))
    return check_bottleneck(loader, lambda batch: wait(0.002), budget_s=budget_s, **options)


class TestWaits:
    @pytest.mark.nightly
    def test_slow_samples_are_named_by_index_and_file(self, tmp_path: Path) -> None:
        report = checked(Files(tmp_path, 24, slow=(9,)), budget_s=3.0)
        assert report.waits is not None
        assert report.waits["p50"] < 0.04 < report.waits["longest"]
        assert report.waits["p50"] <= report.waits["p99"] <= report.waits["longest"]
        found = {index: (file, seconds) for index, file, seconds in report.waits["slow"]}
        assert found[9][0] == str(tmp_path / "9.bin")
        assert found[9][1] >= 0.04
        assert "slow: sample 9" in str(report)

    @pytest.mark.nightly
    def test_indices_that_workers_ordered_are_known_in_order(self, tmp_path: Path) -> None:
        report = checked(Files(tmp_path, 80, slow=(61,)), workers=1, budget_s=3.0)
        assert report.waits is not None
        assert 61 in [index for index, _, _ in report.waits["slow"]]

    def test_a_sampler_and_its_draws_are_left_alone(self, time: VirtualTime) -> None:
        loader = DataLoader(Waiting(64, 0.01, time.sleep), 4, shuffle=True)
        check_bottleneck(loader, lambda batch: time.sleep(0.01), budget_s=5, clock=HostOn(time))
        torch.manual_seed(3)
        own = [batch[:, 0].tolist() for batch in loader]
        torch.manual_seed(3)
        assert own == [batch[:, 0].tolist() for batch in DataLoader(loader.dataset, 4, True)]


class TestPreparation:
    def test_transforms_and_functions_have_their_shares(self) -> None:
        report = checked(Transformed(400, 0.002), workers=1, budget_s=3.0)
        shares = {row.call.partition(" ")[0]: row.share for row in report.preparation}
        assert next(iter(shares)) == "Slow"
        assert {"Slow", "Quick", "load", "collate", "passing"} <= set(shares)
        assert sum(shares.values()) == pytest.approx(1)
        assert report.preparation[0].seconds_per_sample >= 0.004
        assert "Slow" in str(report)

    def test_samples_are_read_in_another_process(self) -> None:
        report = checked(Failing(), budget_s=3.0)
        assert not report.preparation
        assert not report.candidates
        assert any("read elsewhere" in note for note in report.notes)

    def test_an_iterable_dataset_has_no_indices(self) -> None:
        report = checked(Endless())
        assert report.preparation[0].call.startswith("wait (waits.py")
        assert by_name(report.candidates)["workers"].predicted is not None
        assert report.waits is not None
        assert report.waits["slow"] == ()

    def test_nothing_is_looked_for_where_the_step_is_the_limit_or_it_is_not_wanted(self) -> None:
        quick = check_bottleneck(
            DataLoader(Waiting(400, 0.0)), lambda batch: wait(0.01), budget_s=10
        )
        assert quick.verdict == "step-bound"
        assert not quick.preparation
        assert not quick.candidates
        assert checked(Waiting(400, 0.004), predict=False).candidates == ()


class TestCold:
    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is in memory")
    @pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.nightly), 1])
    def test_files_are_evicted_and_read_again(self, tmp_path: Path, workers: int) -> None:
        report = checked(Files(tmp_path, 60), workers=workers)
        assert {"cold", "real"} <= set(report.seconds_per_batch)
        lost = report.seconds_per_batch["cold"].estimate - report.seconds_per_batch["real"].estimate
        assert report.stalls["fetch"].estimate == pytest.approx(lost)

    def test_without_files_there_is_none(self) -> None:
        report = checked(Waiting(400, 0.004))
        assert "cold" not in report.seconds_per_batch
        assert "fetch" not in report.stalls


class TestModel:
    """Decisions on given numbers."""

    def stages(self, load: float, **options: Any) -> Stages:
        real, step = options.pop("real", load + 0.01), options.pop("step", 0.01)
        given = {"cores": 8, "load_cores": 1.0, "step_cores": 1.0, **options}
        return Stages(exactly(real), exactly(step), [load], **given)

    def found(self, stages: Stages, dataset: Any = None, **options: Any) -> dict[str, Candidate]:
        loader: Any = DataLoader(dataset or Waiting(64, 0.0), 4)
        given = {
            "by_call": {"load": 0.01},
            "batch": 4,
            "batches": 16,
            "random": True,
            "sample_bytes": 16,
            **options,
        }
        return by_name(candidates(loader, stages, **given))

    def test_the_fewest_workers_that_keep_up(self) -> None:
        found = self.found(self.stages(0.04))
        assert found["workers"].change == "num_workers=4"
        assert found["workers"].predicted is not None
        assert found["workers"].predicted.estimate == pytest.approx(5, rel=0.02)

    def test_taking_batches_from_workers_takes_its_time(self) -> None:
        stages = self.stages(0.04, take=0.01)
        assert stages.seconds().estimate == pytest.approx(0.05)  # without workers nothing is taken
        assert stages.seconds(workers=8).estimate == pytest.approx(0.02, rel=0.02)
        assert self.found(stages)["workers"].change == "num_workers=2"

    def test_cores_that_are_missing_are_said(self) -> None:
        found = self.found(self.stages(0.08, real=0.08, workers=1, cores=1))
        assert "more cores are missing" in found["workers"].reason
        assert found["more cores"].predicted is not None
        assert found["more cores"].predicted.estimate > 1.5
        assert found["more cores"].change == ""

    def test_shared_memory_that_is_missing_is_said(self) -> None:
        found = self.found(self.stages(0.08, real=0.04, workers=2, room=4))
        assert "shared memory" in found["workers"].reason

    def test_what_waits_for_data_needs_no_core(self) -> None:
        stages = self.stages(0.08, real=0.08, workers=1, cores=1, load_cores=0.0, step_cores=0.0)
        assert self.found(stages)["workers"].change == "num_workers=4"

    def test_longer_queues_help_where_batches_differ(self) -> None:
        loads = [0.001] * 15 + [0.13]
        stages = Stages(
            exactly(0.016), exactly(0.01), loads, workers=1, cores=8, step_cores=0, load_cores=0
        )
        assert self.found(stages)["prefetch_factor"].predicted is not None
        even = self.found(self.stages(0.02, real=0.02, workers=1))
        assert "even out nothing" in even["prefetch_factor"].reason

    def test_copies_are_hidden_by_prefetch_and_by_nothing_else(self) -> None:
        stages = self.stages(0.005, real=0.015, transfer=0.005, workers=2)
        found = self.found(stages)
        assert found["prefetch"].predicted is not None
        assert found["prefetch"].predicted.estimate == pytest.approx(1.5, rel=0.01)
        assert "keep up" in found["workers"].reason
        assert "no copy" in self.found(self.stages(0.04))["prefetch"].reason

    def test_copies_longer_than_the_step_are_not_hidden(self) -> None:
        for pinned, most in ((True, 1.5), (False, 3.0)):
            stages = self.stages(0.001, real=0.03, transfer=0.02, workers=2, pinned=pinned)
            gain = self.found(stages)["prefetch"].predicted
            assert gain is not None
            assert gain.estimate == pytest.approx(1.5, rel=0.01)
            assert gain.high == pytest.approx(most, rel=0.01)

    def test_workers_kept_between_epochs(self) -> None:
        stages = self.stages(0.001, real=0.02, workers=2, starting=0.01)
        kept = self.found(stages)["persistent_workers"]
        assert kept.predicted is not None
        assert kept.predicted.estimate == pytest.approx(2, rel=0.01)

    def test_a_cache_says_what_it_takes_and_when_it_pays(self) -> None:
        cached = self.found(self.stages(0.04), random=False)["h5"]
        assert cached.predicted is not None
        assert cached.predicted.estimate == pytest.approx(5, rel=0.05)
        assert cached.change.startswith('backend="h5"  # built once: ')
        assert "paid for after" in cached.change
        slow = self.found(self.stages(4.0), by_call={"load": 1.0}, random=False)["h5"]
        assert "built once: about 8 s, paid for after 1 epoch" in slow.change  # 64 s on 8 cores
        drawn = self.found(self.stages(0.04))["h5"]
        assert "random" in drawn.reason

    def test_the_scale_makes_the_model_agree_with_the_loop(self) -> None:
        stages = self.stages(0.02, real=0.03, workers=1)  # alone a batch takes 20 ms, here 30
        assert stages.scale == pytest.approx(1.5, rel=0.01)
        assert stages.seconds().estimate == pytest.approx(0.03, rel=0.01)
        two = stages.seconds(workers=2)
        assert two.low <= 0.01 + 1e-9 <= 0.015 <= two.high + 1e-9

    def test_of_changes_that_gain_alike_the_simplest_is_the_one_to_make(self) -> None:
        gain = exactly(2.0)
        one, pair = Candidate("workers", "num_workers=2", gain), Candidate("a + b", "b", gain)
        build = Candidate("h5", 'backend="h5"', exactly(2.01))
        assert best_of([build, pair, one]) is one
        assert best_of([Candidate("h5", 'backend="h5"', exactly(3.0)), one]).name == "h5"  # type: ignore[union-attr]
        assert best_of([Candidate("workers", "num_workers=2", exactly(1.01))]) is None
        assert best_of([Candidate("dali", "", reason="no device")]) is None


class TestInTheCheck:
    def test_workers_are_predicted_on_a_virtual_time(self, time: VirtualTime) -> None:
        loader = DataLoader(Waiting(5000, 0.005, time.sleep), 4)
        report = check_bottleneck(
            loader, lambda batch: time.sleep(0.01), budget_s=10, clock=HostOn(time)
        )
        found = by_name(report.candidates)
        assert found["workers"].predicted is not None
        assert found["workers"].predicted.estimate == pytest.approx(3, rel=0.1)
        assert report.advice[-1].startswith("the one change to make: num_workers=")
        text = json.loads(report.to_json())
        assert {"name", "change", "predicted", "measured", "reason"} == set(text["candidates"][0])
        assert "no CUDA device" in found["dali"].reason or torch.cuda.is_available()

    @pytest.mark.nightly
    def test_remedies_are_tried_beside_their_prediction(self) -> None:
        report = checked(Waiting(4000, 0.004), try_candidates=True)
        workers = by_name(report.candidates)["workers"]
        assert workers.predicted is not None
        assert workers.measured is not None
        assert workers.measured.estimate > 1
        assert by_name(report.candidates)["h5"].measured is None


SCRIPT = """\
import time, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((4,), float(index))
if __name__ == "__main__":
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for batch in DataLoader(Rows(), 2):
        loss = (batch @ weight).sum()
        loss.backward()
        optimizer.step()
        time.sleep(0.002)
"""


@pytest.mark.parametrize(
    "option", ["--no-predict", pytest.param("--try", marks=pytest.mark.nightly)]
)
def test_a_script_gets_its_change_as_code(tmp_path: Path, option: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["-m", "dataloaders", "check", "--budget", 2, option, script.name]
    done = warm.run(words, cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    changed = "the one change to make: num_workers=" in done.stdout
    assert changed == (option == "--try")
    assert ("what if" in done.stdout) == (option == "--try")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
