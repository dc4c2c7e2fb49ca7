"""The check in a loop: what it yields, counts, ends with and hands back; on a played time.

Loaders and steps wait on a virtual time, so that verdicts are exact and no test takes long. A few
tests at the end measure real time; they run by ``make test-all``.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dataloaders import DataLoader
from dataloaders.bottleneck import Check, Progress, Report, check_bottleneck
from dataloaders.errors import CheckError, OptionError
from helpers.waits import SlowOnce, Waiting, wait

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.played import HostOn, PlayedLoader, VirtualTime


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


def waiting_step(seconds: float, time: VirtualTime | None = None) -> Callable[[Any], None]:
    spend = wait if time is None else time.sleep
    return lambda batch: spend(seconds)


def checked(
    loader: Any, step_s: float, time: VirtualTime, budget_s: float = 15, **options: Any
) -> Report:
    return check_bottleneck(
        loader, waiting_step(step_s, time), budget_s=budget_s, clock=HostOn(time), **options
    )


class TestVerdicts:
    @pytest.mark.parametrize("loader_class", [TorchLoader, DataLoader])
    def test_a_slow_serial_loader_is_input_bound(
        self, loader_class: Any, time: VirtualTime
    ) -> None:
        report = checked(loader_class(Waiting(5000, 0.01, time.sleep)), 0.005, time)
        assert report.verdict == "input-bound"
        assert report.speedup_bound is not None
        assert report.speedup_bound.estimate == pytest.approx(3.0)
        assert set(report.seconds_per_batch) == {"synthetic", "real"}
        assert report.stalls["prep"].estimate == pytest.approx(0.01)
        assert "num_workers" in report.advice[0]

    @pytest.mark.parametrize(("load", "truth"), [(0.03, 1.5), (0.021, 1.05), (0.015, 1.0)])
    def test_workers_cost_what_the_step_does_not_hide(
        self, load: float, truth: float, time: VirtualTime
    ) -> None:
        report = checked(PlayedLoader(time, [2 * load], workers=2), 0.02, time)
        assert report.verdict == ("input-bound" if truth > 1.08 else "step-bound")
        assert report.speedup_bound is not None
        assert report.speedup_bound.estimate == pytest.approx(truth, rel=0.01)
        assert report.seconds_per_batch["contended"].estimate == pytest.approx(0.02)

    @pytest.mark.parametrize(("load", "workers"), [(0.001, 0), (0.05, 2), (0.11, 2), (0.3, 4)])
    def test_steps_of_50_ms_that_differ_by_2_percent_need_15_s(
        self, load: float, workers: int, time: VirtualTime
    ) -> None:
        draw = random.Random(1)
        check = Check(PlayedLoader(time, [load], workers=workers), clock=HostOn(time))
        for _ in check:
            time.sleep(draw.gauss(0.05, 0.001))
        assert check.report().verdict == ("input-bound" if load > 0.1 else "step-bound")
        assert time.now() < 15

    @pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
    @pytest.mark.parametrize("workers", [0, 1])
    def test_short_loaders_are_measured_by_whole_epochs(
        self, length: int, workers: int, time: VirtualTime
    ) -> None:
        loader = PlayedLoader(time, [0.05], workers=workers, batches=length)
        report = checked(loader, 0.02, time)
        assert report.verdict == "input-bound"
        assert report.speedup_bound is not None
        first = 0.05 if workers == 0 else (0.05 * length + 0.02) / length - 0.02
        assert report.speedup_bound.estimate == pytest.approx(1 + first / 0.02, rel=0.02)
        assert f"{length} batches an epoch" in report.loader

    def test_a_first_epoch_that_fills_a_cache_does_not_count(self, time: VirtualTime) -> None:
        report = checked(DataLoader(SlowOnce(60, 0.01, time.sleep)), 0.01, time)
        assert report.verdict == "step-bound"

    def test_what_starting_an_epoch_costs_belongs_to_real(self, time: VirtualTime) -> None:
        # 40 batches an epoch whose first takes 200 ms; the others are hidden by the step.
        loader = PlayedLoader(time, [0.2, *[0.001] * 39], workers=1, batches=40)
        report = checked(loader, 0.02, time)
        assert report.speedup_bound is not None
        assert report.speedup_bound.estimate == pytest.approx(1.25, rel=0.02)

    @pytest.mark.parametrize("period", [4, 10])
    def test_a_step_that_is_long_now_and_then_is_measured_by_whole_cycles(
        self, period: int, time: VirtualTime
    ) -> None:
        calls = iter(range(10**9))

        def step(batch: Any) -> None:
            time.sleep(0.15 if next(calls) % period == period - 1 else 0.01)

        loader = PlayedLoader(time, [0.004])
        report = check_bottleneck(loader, step, budget_s=15, clock=HostOn(time))
        usual = (0.15 + (period - 1) * 0.01) / period
        assert report.speedup_bound is not None
        assert report.speedup_bound.estimate == pytest.approx(1 + 0.004 / usual, rel=0.002)
        assert any(f"every {period} batches" in note for note in report.notes)

    def test_a_step_that_pays_once_for_each_shape_is_not_input_bound(
        self, time: VirtualTime
    ) -> None:
        draw = random.Random(0).randrange
        batches = [torch.zeros(draw(50, 600)) for _ in range(4000)]
        seen: set[Any] = set()

        def step(batch: torch.Tensor) -> None:
            time.sleep(0.02 if batch.shape in seen else 0.17)
            seen.add(batch.shape)

        loader = PlayedLoader(time, [0.0001], made=batches)
        report = check_bottleneck(loader, step, budget_s=15, clock=HostOn(time))
        assert report.verdict == "step-bound"
        assert any("first on a shape" in note for note in report.notes)

    @pytest.mark.parametrize(("workers", "truth"), [(0, 1.2), (2, 1.0)])
    def test_steps_in_proportion_to_their_batch_compare_alike_ones(
        self, workers: int, truth: float, time: VirtualTime
    ) -> None:
        batches = [torch.zeros(5 + 7 * k % 31) for k in range(31)]
        loader = PlayedLoader(time, [0.004], workers=workers, made=batches)
        report = check_bottleneck(
            loader, lambda batch: time.sleep(0.001 * len(batch)), budget_s=15, clock=HostOn(time)
        )
        assert report.speedup_bound is not None
        assert report.speedup_bound.estimate == pytest.approx(truth, abs=0.015)


class TestRhythm:
    @pytest.mark.parametrize("hooked", [False, True])
    @pytest.mark.parametrize(
        ("load", "step", "taken", "workers", "truth"),
        [(0.1, 0.02, 8, 2, 2.5), (0.03, 0.15, 4, 0, 1.2), (0.01, 0.05, 4, 2, 1.0)],
    )
    def test_batches_taken_in_bursts(
        self, load: float, step: float, taken: int, workers: int, truth: float, hooked: bool,
        time: VirtualTime,
    ) -> None:  # fmt: skip
        """As HF Trainer does with gradient accumulation: k batches are taken, then k steps."""
        check = Check(PlayedLoader(time, [load], workers=workers), budget_s=15, clock=HostOn(time))
        batches = iter(check)
        while burst := [batch for _, batch in zip(range(taken), batches, strict=False)]:
            time.sleep(step * len(burst))
            if hooked:
                check.optimizer_stepped()
        report = check.report()
        assert report.speedup_bound is not None
        assert report.speedup_bound.estimate == pytest.approx(truth, rel=0.01)
        assert report.verdict == ("step-bound" if truth == 1.0 else "input-bound")
        assert time.now() < 30

    def test_accumulation_in_the_users_step_is_seen_by_the_optimizers_hook(
        self, time: VirtualTime
    ) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        calls = iter(range(10**9))

        def step(batch: Any) -> None:
            time.sleep(0.01)
            if next(calls) % 4 == 3:
                optimizer.step()
                time.sleep(0.01)

        loader = PlayedLoader(time, [0.005])
        report = check_bottleneck(loader, step, budget_s=15, clock=HostOn(time))
        assert any("every 4 batches" in note for note in report.notes)
        assert report.speedup_bound is not None
        assert report.speedup_bound.estimate == pytest.approx(1.4, rel=0.002)

    def test_the_budget_begins_when_steps_are_steady(self, time: VirtualTime) -> None:
        calls = iter(range(10**9))

        def step(batch: Any) -> None:
            time.sleep(60 if next(calls) == 1 else 0.02)  # the second step compiles

        loader = PlayedLoader(time, [0.02])
        report = check_bottleneck(loader, step, budget_s=6, clock=HostOn(time))
        assert report.verdict == "input-bound"
        assert report.speedup_bound is not None
        assert report.speedup_bound.estimate == pytest.approx(2.0)
        assert report.seconds <= 6
        assert time.now() < 67

    def test_a_step_that_becomes_slow_ends_its_block(self, time: VirtualTime) -> None:
        calls = iter(range(10**9))

        def step(batch: Any) -> None:
            time.sleep(0.0005 if next(calls) < 2000 else 0.5)

        check_bottleneck(PlayedLoader(time, [0.0001]), step, budget_s=6, clock=HostOn(time))
        assert time.now() < 12


class TestOtherLoaders:
    def test_waits_for_another_loader_count_as_input_and_name_it(self, time: VirtualTime) -> None:
        check = Check(PlayedLoader(time, [0.01]), budget_s=15, clock=HostOn(time))
        for _ in check:
            time.sleep(0.04)  # next() of the other loader, in the same loop
            check.waited_elsewhere("the unlabelled one", 0.04)
            time.sleep(0.02)
        report = check.report()
        assert report.verdict == "input-bound"
        assert report.speedup_bound is not None
        assert report.speedup_bound.estimate == pytest.approx(0.07 / 0.02)
        assert report.seconds_per_batch["synthetic"].estimate == pytest.approx(0.02)
        assert any("40.0 ms" in note and "the unlabelled one" in note for note in report.notes)


class Shrinking(IterableDataset[torch.Tensor]):
    """An epoch of 40 samples, then of 5 each: nothing to settle in."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.epochs += 1
        yield from torch.arange(40 if self.epochs == 1 else 5)


class TestLoops:
    def test_a_loop_that_breaks_and_comes_back_finishes_the_check(self, time: VirtualTime) -> None:
        loader = DataLoader(Waiting(4000, 0.004, time.sleep))
        check = Check(loader, budget_s=5, clock=HostOn(time))
        loops = 0
        while not check.finished:
            loops += 1
            for index, _ in enumerate(check):
                time.sleep(0.001)
                if index == 70:
                    break
        assert loops > 2
        assert check.report().verdict == "input-bound"

    @pytest.mark.parametrize(("load", "verdict"), [(0.0002, "step-bound"), (0.02, "input-bound")])
    def test_one_short_epoch_is_prolonged_only_if_its_waits_carry_no_step_bound(
        self, load: float, verdict: str, time: VirtualTime
    ) -> None:
        check = Check(PlayedLoader(time, [load], batches=40), clock=HostOn(time))
        steps = 0
        for _ in check:
            time.sleep(0.01)
            steps += 1
        assert check.report().verdict == verdict
        assert (steps == 40) == (verdict == "step-bound")

    @pytest.mark.parametrize(("length", "workers"), [(4, 0), (6, 1), (40, 2)])
    def test_a_consumer_that_counts_its_batches_never_asks_for_the_end(
        self, length: int, workers: int, time: VirtualTime
    ) -> None:
        loader = PlayedLoader(time, [0.004], workers=workers, batches=length)
        check = Check(loader, budget_s=6, clock=HostOn(time))
        for _ in range(300):
            batches = iter(check)  # as Lightning does: len(loader) batches, then a new iterator
            for _ in range(length):
                if next(batches, None) is None:
                    break
                time.sleep(0.001)
            if check.finished:
                break
        assert check.report().verdict == "input-bound"

    def test_an_iterator_left_behind_does_not_disturb_the_one_in_use(
        self, time: VirtualTime
    ) -> None:
        loader = DataLoader(Waiting(400, 0.002, time.sleep))
        check = Check(loader, budget_s=2, clock=HostOn(time))
        left_behind = [iter(check)]
        next(left_behind[0])
        for index, _ in enumerate(check):
            time.sleep(0.001)
            if index == 20:
                left_behind.clear()
        assert check.finished
        assert check.report().verdict == "input-bound"

    def test_epochs_that_turn_out_shorter_than_thought_end_the_check(
        self, time: VirtualTime
    ) -> None:
        assert checked(DataLoader(Shrinking()), 0.001, time, 2).rounds >= 2

    def test_a_short_last_batch_has_its_share_in_every_arm(self, time: VirtualTime) -> None:
        # 9 batches, the last of 1 sample instead of 20: 8 full ones alone would cost 11 % more.
        loader = DataLoader(TensorDataset(torch.zeros(161, 2)), batch_size=20)
        report = check_bottleneck(
            loader, lambda b: time.sleep(0.0005 * len(b[0])), budget_s=15, clock=HostOn(time)
        )
        usual = 0.0005 * 161 / 9
        assert report.seconds_per_batch["synthetic"].estimate == pytest.approx(usual, rel=1e-6)
        assert report.verdict == "step-bound"

    def test_progress_is_told_between_blocks_and_the_report_is_there_at_any_time(
        self, time: VirtualTime
    ) -> None:
        told: list[Progress] = []
        loader = DataLoader(Waiting(4000, 0.002, time.sleep))
        check = Check(loader, budget_s=4, progress=told.append, clock=HostOn(time))
        assert check.report().verdict == "inconclusive"
        for _ in check:
            time.sleep(0.001)
        phases = [one.phase for one in told]
        assert phases[0] == "warm-up"
        assert {"synthetic", "real"} <= set(phases)
        assert told[-1].interval is not None
        assert [one.seconds for one in told] == sorted(one.seconds for one in told)


class TestTraces:
    def test_a_step_that_writes_into_its_batch_sees_what_the_loader_delivered(
        self, time: VirtualTime
    ) -> None:
        seen: list[float] = []

        def step(batch: list[torch.Tensor]) -> None:
            seen.append(batch[0][0, 0].item())
            batch[0].mul_(0.5)
            time.sleep(0.01)

        loader = DataLoader(TensorDataset(torch.ones(4000, 2)), batch_size=2)
        report = check_bottleneck(loader, step, budget_s=3, clock=HostOn(time))
        assert report.verdict == "step-bound"
        assert any("writes into its batch" in note for note in report.notes)
        # Only the block in which the writing is noticed may hand a written batch out again.
        assert seen.count(1.0) > 0.9 * len(seen)

    def test_random_states_are_put_back(self, time: VirtualTime) -> None:
        generator = torch.Generator().manual_seed(5)
        rows = TensorDataset(torch.zeros(300))
        loader = DataLoader(rows, batch_size=3, shuffle=True, generator=generator)

        def step(batch: Any) -> None:
            torch.rand(1), np.random.rand(), random.random()
            time.sleep(0.001)

        before = generator.get_state(), torch.get_rng_state(), random.getstate()
        check_bottleneck(loader, step, budget_s=1, clock=HostOn(time))
        assert torch.equal(generator.get_state(), before[0])
        assert torch.equal(torch.get_rng_state(), before[1])
        assert random.getstate() == before[2]

    def test_a_seeded_loader_trains_the_same_after_a_check(self, time: VirtualTime) -> None:
        def first_epoch(checks: bool) -> list[int]:
            loader = DataLoader(Waiting(30, 0), batch_size=1, shuffle=True, seed=3)
            if checks:
                checked(loader, 0.001, time, 1)
            return [int(batch[0, 0]) for batch in loader]

        assert first_epoch(True) == first_epoch(False)


class TestErrors:
    def test_an_empty_loader_is_an_error_that_says_what_to_look_at(self) -> None:
        loader = DataLoader(TensorDataset(torch.zeros(3)), batch_size=4, drop_last=True)
        with pytest.raises(CheckError, match=r"yields no batch.*drop_last"):
            check_bottleneck(loader, waiting_step(0), budget_s=1)

    @pytest.mark.parametrize("budget", [0, -1, float("nan")])
    def test_a_budget_must_be_positive(self, budget: float) -> None:
        with pytest.raises(OptionError, match="budget_s"):
            Check([], budget_s=budget)

    def test_errors_of_the_step_and_of_the_loader_reach_the_caller(self, time: VirtualTime) -> None:
        class Broken(Dataset[int]):
            def __len__(self) -> int:
                return 100

            def __getitem__(self, index: int) -> int:
                if index == 3:
                    raise LookupError("sample 3 is broken")
                return index

        with pytest.raises(LookupError, match="sample 3 is broken"):
            checked(DataLoader(Broken()), 0.001, time, 1)
        with pytest.raises(LookupError, match="sample 3 is broken"):
            check_bottleneck(DataLoader(Broken(), num_workers=1), waiting_step(0), budget_s=1)

        def step(batch: Any) -> None:
            raise ZeroDivisionError("in the step")

        with pytest.raises(ZeroDivisionError, match="in the step"):
            check_bottleneck(DataLoader(Waiting(10, 0)), step, budget_s=1)

    def test_an_interrupt_carries_what_is_known_so_far(self, time: VirtualTime) -> None:
        steps = iter(range(10**9))

        def step(batch: Any) -> None:
            time.sleep(0.001)
            if next(steps) == 60:
                raise KeyboardInterrupt

        loader = DataLoader(Waiting(1000, 0.001, time.sleep))
        with pytest.raises(KeyboardInterrupt) as caught:
            check_bottleneck(loader, step, budget_s=20, clock=HostOn(time))
        report = caught.value.report  # type: ignore[attr-defined]
        assert report.verdict == "input-bound"  # by the waits of the first steps
        assert any("before the check had enough" in note for note in report.notes)


def test_the_report_as_text_json_and_html(time: VirtualTime, tmp_path: Path) -> None:
    report = checked(DataLoader(Waiting(4000, 0.004, time.sleep)), 0.001, time, 4)
    text = str(report)
    assert text.startswith("INPUT-BOUND")
    assert "float32 1x4" in text
    assert "synthetic" in text
    assert "could not have been seen" in text
    data = json.loads(report.to_json(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == data
    assert data["verdict"] == "input-bound"
    assert data["speedup_bound"]["low"] <= data["speedup_bound"]["estimate"]
    assert data["evidence"] in ("blocks", "waits")
    report.to_html(tmp_path / "report.html")
    assert "INPUT-BOUND" in (tmp_path / "report.html").read_text()


@pytest.mark.measures
class TestOnRealTime:
    def test_workers_that_are_too_slow_are_input_bound_and_end_with_the_check(self) -> None:
        loader = DataLoader(Waiting(2000, 0.02), batch_size=1, num_workers=2)
        before = {child.pid for child in psutil.Process().children()}
        report = check_bottleneck(loader, waiting_step(0.001), budget_s=6)
        assert report.verdict == "input-bound"
        assert "contended" in report.seconds_per_batch
        assert {child.pid for child in psutil.Process().children()} <= before

    def test_workers_that_are_quick_are_not_input_bound(self) -> None:
        loader = DataLoader(Waiting(20_000, 0.001), batch_size=1, num_workers=1)
        report = check_bottleneck(loader, waiting_step(0.03), budget_s=6)
        assert report.verdict in ("step-bound", "inconclusive")  # a busy machine widens intervals

    @pytest.mark.gpu
    def test_a_step_on_cuda_has_a_host_arm_and_nothing_waits_inside_blocks(self) -> None:
        loader = DataLoader(TensorDataset(torch.zeros(4096, 1024)), batch_size=64, pin_memory=True)
        weight = torch.zeros(1024, 1024, device="cuda")

        def step(batch: list[torch.Tensor]) -> None:
            batch[0].to("cuda", non_blocking=True) @ weight

        def forbid_waiting(progress: Progress) -> None:
            # From the end of the warm-up on, every operation that waits for the device raises;
            # synchronize(), which stands behind the last mark of a block, is not one of them.
            torch.cuda.set_sync_debug_mode("error")

        try:
            report = check_bottleneck(loader, step, budget_s=4, progress=forbid_waiting)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert "host" in report.seconds_per_batch
        assert report.rounds >= 2
