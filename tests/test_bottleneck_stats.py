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


def bound_of(rounds: list[dict[str, Timed]], **options: Any) -> Interval:
    bound = analysed(rounds, **options).speedup_bound
    assert bound is not None
    return bound


def marked(**arms: Lap) -> list[dict[str, Timed]]:
    """Rounds without noise, of four laps an arm."""
    blocks = {arm: Timed(4 * lap.seconds, 4 * lap.steps, (lap,) * 4) for arm, lap in arms.items()}
    return [dict(blocks) for _ in range(6)]


class TestAllowances:
    """What is known to be off is put right, by numbers that can be computed by hand."""

    PLAIN = rounds_of(0.02, synthetic=1.0, real=1.5)

    @staticmethod
    def held(share: float, real: float, busy: float = 1.0) -> list[dict[str, Timed]]:
        def struck(block: Timed, share: float, busy: float) -> Timed:
            return Timed(block.seconds, block.steps, held=share * block.seconds, busy=busy)

        return [
            {
                "synthetic": struck(one["synthetic"], share, 1.0),
                "real": struck(one["real"], real, busy),
            }
            for one in TestAllowances.PLAIN
        ]

    @pytest.mark.parametrize(
        ("options", "share", "real", "busy", "low", "high"),
        [
            ({"parallel": True}, 0.2, 0.1, 1.0, 1.0, 1 / 0.8),  # the step may be shorter by it
            ({"parallel": True}, 0.1, 0.2, 0.9, 1.0, 0.9 / 0.8),  # and so may a worker's batch
            ({"parallel": True}, 0.2, 0.1, 0.4, 1.0, 1.0),  # workers had time to spare
            ({"parallel": False}, 0.2, 0.1, 1.0, 1.0, 0.9 / 0.8),
            ({"parallel": False}, 0.1, 0.2, 1.0, 0.8 / 0.9, 1.0),
            ({"parallel": True, "behind": True}, 0.2, 0.1, 0.4, 0.8, 1.0),
            ({"parallel": False, "behind": True}, 0.2, 0.1, 1.0, 0.9, 0.9 / 0.8),
            ({"parallel": True}, 0.004, 0.004, 1.0, 1.0, 1.0),  # no machine has less
        ],
    )
    def test_what_others_held_up_widens_the_bound(
        self,
        options: dict[str, bool],
        share: float,
        real: float,
        busy: float,
        low: float,
        high: float,
    ) -> None:
        plain, got = (
            bound_of(self.PLAIN, **options),
            bound_of(self.held(share, real, busy), **options),
        )
        assert got.low == pytest.approx(plain.low * low)
        assert got.high == pytest.approx(plain.high * high)
        assert got.estimate == plain.estimate

    def test_starts_of_epochs_are_shared_by_their_batches(self) -> None:
        """An epoch of 20 batches starts in 4 s where the loop waits 0.5 s for each batch anyway."""
        rounds = rounds_of(0.0, synthetic=1.0, real=1.5)
        with_starts = bound_of(rounds, epoch_starts=[3.0, 5.0], batches=20)
        assert with_starts.estimate == pytest.approx(1.5 + (4 - 0.5) / 20, rel=0.01)
        assert bound_of(rounds, epoch_starts=[0.4, 0.3], batches=20).estimate == 1.5

    def test_waits_for_another_loader_are_input(self) -> None:
        arms = {"synthetic": Lap(1.0, 1, elsewhere=0.2), "real": Lap(1.3, 1, 0.3, elsewhere=0.2)}
        got = bound_of(marked(**arms), parallel=False)
        assert got.estimate == pytest.approx(1.3 / 0.8, rel=0.02)

    def test_on_a_device_such_a_wait_may_be_hidden(self) -> None:
        arms = {"synthetic": Lap(1.0, 1), "real": Lap(1.3, 1)}
        plain = bound_of(marked(**arms), behind=True)
        arms = {arm: lap._replace(elsewhere=0.2) for arm, lap in arms.items()}
        got = bound_of(marked(**arms), behind=True)
        assert (got.low, got.estimate) == (plain.low, plain.estimate)
        assert got.high == pytest.approx(plain.high / 0.8)

    def test_on_a_device_the_wait_and_what_workers_cost_are_the_most(self) -> None:
        """Blocks differ by 30 % of a step; the host waited for 1 %, workers cost 4 %."""
        step = 0.1
        rounds = blocks_of(step, 0.0, noise=0.3, rounds=3, laps=2, seed=2)
        for one in rounds:
            waited = tuple(lap._replace(waited=0.001) for lap in one["real"].laps)
            one["real"] = Timed(one["real"].seconds, 2, waited)
            one["synthetic"] = Timed(2 * step, 2, (Lap(step, 1),) * 2)
            one["contended"] = Timed(2.08 * step, 2, (Lap(1.04 * step, 1),) * 2)
        analysis = analysed(rounds, behind=True)
        assert (analysis.verdict, analysis.evidence) == ("step-bound", "waits")
        assert analysis.speedup_bound is not None
        assert analysis.speedup_bound.high == pytest.approx(1.06, abs=0.005)

    def test_a_shape_seen_first_costs_no_arm_alone(self) -> None:
        usual, first = Lap(1.0, 1), Lap(9.0, 1, fresh=True)
        block = Timed(12.0, 4, (usual, first, usual, usual))
        rounds = [{**one, "real": block} for one in marked(synthetic=usual, real=usual)]
        analysis = analysed(rounds, behind=True)
        assert (analysis.verdict, analysis.left_out) == ("step-bound", 6)
        assert bound_of(rounds, behind=True).estimate == pytest.approx(1.0)

    def test_batches_of_different_sizes_are_compared_at_the_usual_one(self) -> None:
        """A step of 1 ms a byte: resident batches are smaller than the loader's by chance."""
        rounds = []
        for seed in range(6):
            sizes = np.random.default_rng(seed).integers(50, 150, (2, 4))
            own, real = ([Lap(1e-3 * n, 1, nbytes=int(n)) for n in those] for those in sizes)
            rounds.append(
                {
                    "synthetic": Timed(sum(lap.seconds for lap in own), 4, tuple(own)),
                    "real": Timed(sum(lap.seconds for lap in real), 4, tuple(real)),
                }
            )
        assert bound_of(rounds, parallel=False).estimate == pytest.approx(1.0)

    @pytest.mark.parametrize(("spread", "settled"), [(0.005, True), (0.06, False)])
    def test_it_is_settled_once_the_interval_is_narrow(self, spread: float, settled: bool) -> None:
        analysis = analysed(rounds_of(spread, synthetic=1.0, real=1.1))
        bound = analysis.speedup_bound
        assert bound is not None
        assert analysis.smallest_gap == (bound.high - bound.low) / 2 / bound.estimate
        assert analysis.settled == settled == (bound.half_width <= 0.02)
