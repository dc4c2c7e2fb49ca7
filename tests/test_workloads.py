"""The truth bench: its queue model, its workloads and its judging."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.queue_model import Overhead, seconds_per_batch  # noqa: E402
from bench.verdicts import _case_of, _in_child, judge, main, summarise  # noqa: E402
from bench.workloads import WORKLOADS, accepted, gap_class  # noqa: E402

# Four workers on two cores are meant so here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

MILLISECONDS = st.integers(1, 200).map(lambda value: value / 1000)
PATTERN = st.lists(MILLISECONDS, min_size=1, max_size=8)


class TestQueueModel:
    @given(load=MILLISECONDS, step=MILLISECONDS, workers=st.integers(1, 8), ahead=st.integers(1, 4))
    def test_constant_times_cost_the_slower_of_the_two(
        self, load: float, step: float, workers: int, ahead: int
    ) -> None:
        real = seconds_per_batch([load], [step], workers=workers, prefetch=ahead)
        assert real == pytest.approx(max(step, load / workers), rel=0.03)

    @given(loads=PATTERN, steps=PATTERN)
    def test_without_workers_times_add_up(self, loads: list[float], steps: list[float]) -> None:
        expected = sum(loads) / len(loads) + sum(steps) / len(steps)
        assert seconds_per_batch(loads, steps, workers=0) == pytest.approx(expected)

    @given(loads=PATTERN, steps=PATTERN, workers=st.integers(1, 3), ahead=st.integers(1, 3))
    def test_no_loop_beats_its_step_nor_loses_to_a_serial_one(
        self, loads: list[float], steps: list[float], workers: int, ahead: int
    ) -> None:
        real = seconds_per_batch(loads, steps, workers=workers, prefetch=ahead, batches=30)
        # 20 epochs for each member of the pattern: whole turns of it, so its mean is exact.
        assert real >= sum(steps) / len(steps) * (1 - 1e-9)
        assert real <= (max(loads) + max(steps)) * (1 + 1e-9)

    def test_a_burst_is_hidden_by_enough_batches_ahead(self) -> None:
        loads = [0.01] * 7 + [0.16]
        hidden = seconds_per_batch(loads, [0.04], workers=2, prefetch=4)
        seen = seconds_per_batch(loads, [0.04], workers=1, prefetch=1)
        assert hidden == pytest.approx(0.04)
        # One batch ahead: the slow one is waited for 160 - 40 ms, once in eight steps.
        assert seen == pytest.approx(0.04 + 0.12 / 8)

    def test_a_short_epoch_waits_for_its_first_batch(self) -> None:
        real = seconds_per_batch([0.08], [0.02], workers=8, prefetch=2, batches=20)
        assert real == pytest.approx((0.08 + 20 * 0.02) / 20)

    def test_out_of_order_does_not_wait_for_the_slow_worker(self) -> None:
        loads = [0.01, 0.01, 0.01, 0.2]
        ordered = seconds_per_batch(loads, [0.03], workers=2, prefetch=2)
        free = seconds_per_batch(loads, [0.03], workers=2, prefetch=2, in_order=False)
        assert free < ordered

    def test_overhead_is_added_where_it_is_spent(self) -> None:
        own = Overhead(take=0.001, make=0.002)
        step_bound = seconds_per_batch([0.01], [0.05], workers=1, overhead=own)
        input_bound = seconds_per_batch([0.05], [0.01], workers=1, overhead=own)
        assert step_bound == pytest.approx(0.051)
        assert input_bound == pytest.approx(0.052)


class TestWorkloads:
    def test_there_are_enough_of_every_gap(self) -> None:
        computed = [w.computed(0, Overhead()) for w in WORKLOADS.values() if w.computed]
        gaps = [gap_class(truth) for truth in computed]
        assert len(WORKLOADS) >= 34
        assert gaps.count("large") >= 10
        assert gaps.count("small") >= 10
        assert gaps.count("between") >= 2

    def test_each_third_of_the_examination_is_a_case_of_its_own(self) -> None:
        device = [name for name in WORKLOADS if name.startswith("device_")]
        loaded = [name for name in WORKLOADS if name.startswith("loaded_")]
        assert len(device) >= 24
        assert all(WORKLOADS[name].neighbour for name in loaded)
        assert _case_of(device).name == "verdicts_device"
        assert _case_of(loaded).name == "verdicts_loaded"
        assert _case_of(["serial_double", *device]).name == "verdicts"

    @pytest.mark.parametrize(
        ("name", "truth"),
        [
            ("serial_double", 2.0),
            ("balanced_3", 1.0),
            ("balanced_10", 1.0),
            ("slower_12", 1.12),
            ("slower_15", 1.15),
            ("workers_tenfold", 10.0),
            ("burst_not_absorbed", 1.375),
            ("first_epoch_worker", 1.0),
            ("lengths_serial", 1.2),
            ("short_persistent", 1.2),
        ],
    )
    def test_truth_follows_from_the_times(self, name: str, truth: float) -> None:
        computed = WORKLOADS[name].computed
        assert computed is not None
        assert computed(0, Overhead()) == pytest.approx(truth, rel=1e-6)

    @pytest.mark.parametrize("name", ["collate_heavy", "tiny_serial", "training", "ready_batches"])
    def test_a_serial_one_makes_batches_that_its_step_takes(self, name: str) -> None:
        loader, step = WORKLOADS[name].make(0)
        step(next(iter(loader)))

    def test_every_loader_and_step_can_be_made(self) -> None:
        for workload in WORKLOADS.values():
            loader, step = workload.make(1)
            assert callable(step)
            assert loader.num_workers in (0, 1, 2, 4, 8)


class TestJudging:
    def test_a_large_gap_is_never_step_bound(self) -> None:
        for workload in WORKLOADS.values():
            assert judge(workload, 1.10, "step-bound") == "wrong"
            assert judge(workload, 1.10, "inconclusive") == "inconclusive"
            assert all(judge(workload, 1.2, cause) == "right" for cause in workload.causes)

    def test_a_small_gap_is_step_bound_or_nothing(self) -> None:
        for workload in WORKLOADS.values():
            assert accepted(workload, 1.03) == {"step-bound"}
            assert judge(workload, 1.0, "input-bound") == "wrong"

    def test_in_between_only_a_wrong_cause_is_wrong(self) -> None:
        workload = WORKLOADS["slower_5"]
        assert judge(workload, 1.05, "step-bound") == "right"
        assert judge(workload, 1.05, "input-bound") == "right"
        assert judge(workload, 1.05, "transfer-bound") == "wrong"

    def test_totals_and_bar(self) -> None:
        result = summarise([_entry(2.0, "input-bound", (1.9, 2.1)), _entry(2.0, "step-bound")])
        assert result.met is False
        assert "wrong 1 (50%)" in result.notes[0]
        assert "serial_double" in result.notes[0]
        assert result.notes[1].startswith("truth inside the 95 % interval: 50%")
        assert summarise([_entry(2.0, "input-bound", (1.9, 2.1))]).met is True

    def test_a_workload_that_failed_to_run_fails_the_bar(self) -> None:
        broken = {"name": "tiny_serial", "seed": 0, "failed": "Traceback"}
        result = summarise([_entry(2.0, "input-bound", (1.9, 2.1)), broken])
        assert result.met is False
        assert "failed to run: tiny_serial" in result.notes[0]
        assert summarise([broken]).met is False


def test_an_unknown_workload_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonesuch"]) == 2
    said = capsys.readouterr().out
    assert "nonesuch" in said
    assert "serial_double" in said


@pytest.mark.measures
def test_verify_measures_what_it_computed() -> None:
    found = _in_child("serial_double", 0, 1.0, 1.0, True)
    assert "failed" not in found, found.get("failed")
    assert 1.0 < found["measured"]["value"] < 4.0
    assert 1.9 < found["truth"]["value"] < 3.0
    json.dumps(found)


@pytest.mark.measures
def test_the_check_and_both_rules_run() -> None:
    entries = [_in_child(name, 0, 1.5, 0.5, False) for name in ("serial_double", "workers_free")]
    for entry in entries:
        assert "failed" not in entry, entry.get("failed")
        real = entry["report"]["seconds_per_batch"]["real"]
        assert real["low"] <= real["estimate"] <= real["high"]
        assert entry["check_s"] > 0
    result = summarise(entries)
    assert len(result.rows) == 2
    assert all(len(row) == len(result.headings) for row in result.rows)


def _entry(
    truth: float, verdict: str, bound: tuple[float, float] = (1.0, 1.1)
) -> dict[str, object]:
    low, high = bound
    return {
        "name": "serial_double",
        "seed": 0,
        "overhead": {},
        "truth": {"low": truth, "value": truth, "high": truth},
        "report": {
            "verdict": verdict,
            "speedup_bound": {"low": low, "estimate": (low + high) / 2, "high": high},
        },
        "check_s": 5.0,
    }
