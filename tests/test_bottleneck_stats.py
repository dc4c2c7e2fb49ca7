"""Intervals and verdicts from figures that are made up, so that the right answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from dataloaders import DataLoader
from dataloaders.bottleneck.report import Report
from dataloaders.bottleneck.summary import summarise
from dataloaders.bottleneck.verdict import (
    BOUND_FROM,
    STEP_BOUND_UP_TO,
    Analysis,
    analyse,
    name,
)
from dataloaders.machine import resources
from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import Interval, Lap, Timed

ARMS = ("synthetic", "host", "contended", "real")


def rounds_of(spread: float, count: int = 8, **seconds: float) -> list[dict[str, Timed]]:
    """Rounds whose arms have these means, each off by at most ``spread`` of it."""
    generator = np.random.default_rng(7)
    return [
        {
            arm: Timed(10 * mean * (1 + spread * generator.uniform(-1, 1)), 10)
            for arm, mean in seconds.items()
        }
        for _ in range(count)
    ]


def report_of(loader: DataLoader[Any], **seconds: float) -> Report:
    return summarise(
        analyse(rounds_of(0.001, **seconds)), loader=loader, feed=Feed(loader),
        batch="float32 2", rounds=8, seconds=1.0, notes=(),
    )  # fmt: skip


def analysed(rounds: list[dict[str, Timed]], **options: Any) -> Analysis:
    analysis = analyse(rounds, **options)
    assert analysis is not None
    return analysis


@pytest.mark.parametrize(
    ("real", "line"), [(1.01, "leave the input as it is"), (2.0, "num_workers")]
)
def test_advice_follows_the_verdict(real: float, line: str) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)
    report = report_of(loader, synthetic=1.0, real=real)
    assert line in report.advice[0]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
def test_contention_is_told_with_the_numbers_at_hand(
    threads: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "usable_cores", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    loader = DataLoader(TensorDataset(torch.zeros(8)), batch_size=2, num_workers=1)
    host = {"host": 1.0} if on_device else {}

    def advice() -> list[str]:
        report = report_of(loader, synthetic=1.0, **host, contended=1.9, real=2.0)
        assert report.verdict == "contention-bound"
        return list(report.advice)

    said = advice()
    assert said[0].startswith("the step shares 3 cores with 1 worker: ")
    assert "`dataloaders tune`" in said[0]
    several = threads > 1 and not on_device
    assert ("torch.set_num_threads(2) in place of 4" in said[0]) == several
    assert ("OMP_WAIT_POLICY=passive" in said[1]) == several
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert "OMP_WAIT_POLICY" not in " ".join(advice())


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    trials = 300
    for _ in range(trials):
        noise = generator.normal(1.0, 0.05, size=(6, 2))
        rounds = [{"synthetic": Timed(a, 1), "real": Timed(1.5 * b, 1)} for a, b in noise]
        bound = analysed(rounds).speedup_bound
        assert bound is not None
        covered += bound.low <= 1.5 <= bound.high
    assert covered / trials >= 0.92


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ({"synthetic": 1.0, "real": 1.01}, "step-bound"),
        ({"synthetic": 1.0, "contended": 1.02, "real": 1.03}, "step-bound"),
        ({"synthetic": 1.0, "real": 1.5}, "input-bound"),
        ({"synthetic": 1.0, "contended": 1.05, "real": 1.5}, "input-bound"),
        ({"synthetic": 1.0, "contended": 1.45, "real": 1.5}, "contention-bound"),
        ({"synthetic": 1.0, "host": 1.4, "real": 1.5}, "transfer-bound"),
        ({"synthetic": 1.0, "host": 1.1, "contended": 1.1, "real": 2.0}, "input-bound"),
    ],
)
def test_verdict_names_the_largest_stall(seconds: dict[str, float], verdict: str) -> None:
    assert analysed(rounds_of(0.005, **seconds)).verdict == verdict


@pytest.mark.parametrize("gap", [1.0, 1.1, 1.5])
def test_a_wide_interval_carries_no_verdict(gap: float) -> None:
    analysis = analysed(rounds_of(0.9, count=4, synthetic=1.0, real=gap))
    assert analysis.verdict == "inconclusive"
    assert not analysis.settled


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(ARMS), st.floats(0.5, 2), min_size=4))
def test_stalls_add_up_to_the_gap(seconds: dict[str, float]) -> None:
    assume(seconds["real"] >= seconds["synthetic"])
    analysis = analysed(rounds_of(0.0, **seconds))
    gap = seconds["real"] - seconds["synthetic"]
    total = sum(stall.estimate for stall in analysis.stalls.values())
    assert total == pytest.approx(gap, abs=1e-12)


def test_an_arm_that_was_not_measured_loses_nothing() -> None:
    """Steps beside workers may look quicker than steps alone, and real ones with them."""
    stalls = analysed(rounds_of(0.0, synthetic=1.0, contended=0.9, real=0.99)).stalls
    assert stalls["transfer"].estimate == 0
    assert stalls["prep"].estimate == pytest.approx(0.09)


def stall_draws(**means: float) -> dict[str, np.ndarray]:
    """Draws of each stall around its mean, a tenth of a unit wide."""
    generator = np.random.default_rng(3)
    return {stall: mean + generator.uniform(-0.1, 0.1, 1000) for stall, mean in means.items()}


def named(bound: Interval, draws: dict[str, np.ndarray]) -> str:
    return name(bound, draws, {stall: float(those.mean()) for stall, those in draws.items()})


STALL_NAMES = ("prep", "transfer", "contention")
CAUSES = dict(zip(STALL_NAMES, ("input-bound", "transfer-bound", "contention-bound"), strict=True))
GAP = Interval(1.4, 1.5, 1.6)


class TestRule:
    """`name` on given arrays: when a cause may be named, and when not."""

    @pytest.mark.parametrize("largest", STALL_NAMES)
    def test_a_cause_that_is_surely_the_largest_is_named(self, largest: str) -> None:
        draws = stall_draws(**{stall: 1.0 if stall == largest else 0.2 for stall in STALL_NAMES})
        assert named(GAP, draws) == CAUSES[largest]

    @pytest.mark.parametrize(
        ("means", "verdict"),
        [
            ((1.0, 1.0, 0.0), "inconclusive"),  # prep or transfer: no common name
            ((0.0, 1.0, 1.0), "inconclusive"),
            ((1.0, 0.0, 1.0), "input-bound"),  # both are the loader's work on the CPU
        ],
    )
    def test_of_two_that_cannot_be_told_apart_none_is_named(
        self, means: tuple[float, float, float], verdict: str
    ) -> None:
        assert named(GAP, stall_draws(**dict(zip(STALL_NAMES, means, strict=True)))) == verdict

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [
            (BOUND_FROM, 2.0, "input-bound"),
            (BOUND_FROM - 1e-9, 2.0, "inconclusive"),
            (0.9, STEP_BOUND_UP_TO, "step-bound"),
            (0.9, STEP_BOUND_UP_TO + 1e-9, "inconclusive"),
            (BOUND_FROM, STEP_BOUND_UP_TO, "input-bound"),
        ],
    )
    def test_thresholds_hold_on_both_sides(self, low: float, high: float, verdict: str) -> None:
        draws = stall_draws(prep=1.0, transfer=0.0, contention=0.0)
        assert named(Interval(low, (low + high) / 2, high), draws) == verdict


def blocks_of(
    step: float,
    wait: float,
    *,
    slower: float = 0.0,
    noise: float = 0.0,
    rounds: int = 4,
    laps: int = 4,
    seed: int = 0,
) -> list[dict[str, Timed]]:
    """Rounds of laps of one step: what next() took is known, the step is off by ``noise``."""
    generator = np.random.default_rng(seed)

    def block(waited: float, more: float) -> Timed:
        own = (step + more) * generator.normal(1.0, noise, laps)
        those = [Lap(float(seconds) + waited, 1, waited) for seconds in own]
        return Timed(sum(lap.seconds for lap in those), laps, tuple(those))

    return [{"real": block(wait, slower), "synthetic": block(0.0, 0.0)} for _ in range(rounds)]


class TestWaits:
    """What next() of a real step took, as evidence beside the difference of blocks."""

    @pytest.mark.parametrize(("wait", "verdict"), [(0.02, "step-bound"), (0.15, "input-bound")])
    def test_the_wait_is_the_gap_where_nothing_else_runs(self, wait: float, verdict: str) -> None:
        """Steps of a second, off by 20 %: blocks differ by more than what is looked for."""
        for seed in range(20):
            rounds = blocks_of(1.0, wait, noise=0.2, rounds=3, laps=2, seed=seed)
            analysis = analysed(rounds, parallel=False)
            assert (analysis.verdict, analysis.evidence) == (verdict, "waits")
            assert analysis.speedup_bound is not None
            assert analysis.speedup_bound.low <= 1 + wait <= analysis.speedup_bound.high
            # With workers, what they do to the step is open; what it waits is lost all the same.
            beside = analysed(rounds, parallel=True).verdict
            assert wait < 0.05 or beside != "step-bound"

    def test_a_loop_that_seems_faster_than_its_step_alone_carries_nothing(self) -> None:
        rounds = [
            {arm: Timed(seconds, 10) for arm, seconds in (("synthetic", 10.0), ("real", 8.0))}
            for _ in range(6)
        ]
        assert analysed(rounds).verdict == "inconclusive"

    def test_with_workers_the_steps_slowing_down_comes_on_top(self) -> None:
        rounds = blocks_of(0.05, 0.001, slower=0.015, noise=0.05, rounds=6, laps=8)
        analysis = analysed(rounds, parallel=True)
        assert analysis.verdict == "contention-bound"
        assert analysis.seconds_per_batch["contended"].estimate == pytest.approx(0.065, rel=0.05)
        assert analysis.stalls["prep"].estimate == pytest.approx(0.001, rel=0.1)

    def test_what_the_machine_did_to_a_few_steps_is_trimmed(self) -> None:
        rounds = blocks_of(0.1, 0.0, noise=0.002, rounds=5, laps=8)
        struck = rounds[0]["real"].laps
        laps = (struck[0]._replace(seconds=2.0), *struck[1:])
        rounds[0]["real"] = Timed(sum(lap.seconds for lap in laps), len(laps), laps)
        analysis = analysed(rounds, parallel=True)
        assert (analysis.verdict, analysis.evidence) == ("step-bound", "waits")

    def test_one_round_carries_a_verdict_if_its_steps_do(self) -> None:
        one = blocks_of(1.0, 0.5, noise=0.02, rounds=1, laps=4)
        assert analysed(one, parallel=False).verdict == "input-bound"
        assert analysed([], part=one[0], parallel=False).verdict == "input-bound"

    @pytest.mark.parametrize(("wait", "verdict"), [(0.001, "step-bound"), (0.06, "inconclusive")])
    def test_on_a_device_the_wait_is_only_the_most_that_can_be_lost(
        self, wait: float, verdict: str
    ) -> None:
        # What the host waits for may be hidden: a long wait carries no gap.
        rounds = blocks_of(0.1, 0.0, noise=0.3, rounds=3, laps=2, seed=2)
        for one in rounds:
            laps = tuple(lap._replace(waited=wait) for lap in one["real"].laps)
            one["real"] = Timed(one["real"].seconds, one["real"].steps, laps)
        assert analysed(rounds, behind=True, parallel=False).verdict == verdict

    def test_single_steps_tell_causes_apart_as_blocks_do(self) -> None:
        rounds = blocks_of(0.1, 0.02, noise=0.001, rounds=2, laps=4)
        rounds = [{**one, "host": one["real"]} for one in rounds]
        analysis = analysed(rounds, behind=True, parallel=False)
        assert (analysis.verdict, analysis.evidence) == ("transfer-bound", "steps")

    @settings(max_examples=50, deadline=None)
    @given(
        noise=st.floats(0.0, 1.5), rounds=st.integers(1, 5), laps=st.integers(1, 4),
        seed=st.integers(0, 1000), wait=st.floats(0, 2), behind=st.booleans(), alone=st.booleans(),
    )  # fmt: skip
    def test_no_interval_is_too_wide_to_say_anything(
        self,
        noise: float,
        rounds: int,
        laps: int,
        seed: int,
        wait: float,
        behind: bool,
        alone: bool,
    ) -> None:
        """As 0.04 to 8555 is, which a check of a noisy loop once printed."""
        blocks = blocks_of(1.0, wait, noise=noise, rounds=rounds, laps=laps, seed=seed)
        blocks = [
            {arm: Timed(abs(took.seconds), took.steps, took.laps) for arm, took in one.items()}
            for one in blocks
        ]
        analysis = analyse(blocks, behind=behind, parallel=not alone)
        bound = None if analysis is None else analysis.speedup_bound
        assert bound is None or 0 < bound.low <= bound.high <= 3.0 * bound.low
        if analysis is not None and bound is None:
            assert analysis.verdict == "inconclusive"
