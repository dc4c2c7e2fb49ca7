"""Intervals and verdicts from figures that are made up, so that the right answer is known."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dataloaders.bottleneck.evidence.corrections import Loop, corrected
from dataloaders.bottleneck.evidence.estimates import estimates_of, held_share
from dataloaders.bottleneck.evidence.verdict import (
    BOUND_FROM,
    STEP_BOUND_UP_TO,
    Analysis,
    _says_something,
    analyse,
    name,
)
from dataloaders.measuring.intervals import (
    BlockTimes,
    Interval,
    Segment,
    block_of,
    interval_of,
    mean_of,
)

ARMS = ("synthetic", "host", "contended", "real")


def rounds_of(spread, **seconds):
    """Rounds whose arms have these means, each off by at most ``spread`` of it."""
    generator = np.random.default_rng(7)
    return [
        {
            arm: BlockTimes(10 * mean * (1 + spread * generator.uniform(-1, 1)), 10)
            for arm, mean in seconds.items()
        }
        for _ in range(8)
    ]


@pytest.mark.parametrize("waited", [0.0, 0.5])
def test_intervals_cover_the_truth_as_often_as_they_say(waited):
    """On a device's clock, and of heavy-tailed waits of few steps, about as often."""
    generator = np.random.default_rng(1)
    covered = 0
    trials = 300
    for _ in range(trials):
        waits = waited * generator.lognormal(-0.5, 1.0, 12)
        real = [Segment(1 + wait, 1, wait) for wait in waits]
        rounds = [{"real": block_of(real), "synthetic": block_of([Segment(1.0, 1)] * 4)}]
        truth = 1 + waited
        if not waited:
            noise, truth = generator.normal(1.0, 0.05, size=(6, 2)), 1.5
            rounds = [
                {"synthetic": BlockTimes(a, 1), "real": BlockTimes(1.5 * b, 1)} for a, b in noise
            ]
        bound = analyse(rounds, asynchronous=not waited, parallel=False).speedup_bound
        covered += bound is None or bound.low <= truth <= bound.high
    assert covered / trials >= (0.88 if waited else 0.92)


def test_the_interval_of_a_mean_is_about_students():
    found = mean_of(range(1, 10))  # Student's t of 8 degrees times the standard error: 2.11
    assert (found.low, found.estimate, found.high) == pytest.approx((2.89, 5, 7.11), abs=0.2)
    assert mean_of([2, 2, 2]) == Interval(2, 2, 2)


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ({"synthetic": 1.0, "real": 1.01}, "step-bound"),
        ({"synthetic": 1.0, "real": 1.5}, "input-bound"),
        ({"synthetic": 1.0, "contended": 1.45, "real": 1.5}, "contention-bound"),
        ({"synthetic": 1.0, "host": 1.4, "real": 1.5}, "transfer-bound"),
    ],
)
def test_verdict_names_the_largest_stall(seconds, verdict):
    assert analyse(rounds_of(0.005, **seconds)).verdict == verdict


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(ARMS), st.floats(0.5, 2), min_size=4))
def test_stalls_add_up_to_the_gap(seconds):
    assume(seconds["real"] >= seconds["synthetic"])
    analysis = analyse(rounds_of(0.0, **seconds))
    gap = seconds["real"] - seconds["synthetic"]
    total = sum(stall.estimate for stall in analysis.stalls.values())
    assert total == pytest.approx(gap, abs=1e-12)


def test_an_arm_that_was_not_measured_loses_nothing():
    """Steps beside workers may look quicker than steps alone, and real ones with them."""
    stalls = analyse(rounds_of(0.0, synthetic=1.0, contended=0.9, real=0.99)).stalls
    assert stalls["transfer"].estimate == 0
    assert stalls["prep"].estimate == pytest.approx(0.09)


def stall_draws(**means):
    """Draws of each stall around its mean, a tenth of a unit wide."""
    generator = np.random.default_rng(3)
    return {stall: mean + generator.uniform(-0.1, 0.1, 1000) for stall, mean in means.items()}


def named(bound, draws):
    return name(bound, draws, {stall: float(those.mean()) for stall, those in draws.items()})


GAP = Interval(1.4, 1.5, 1.6)


class TestRule:
    """`name` on given arrays: when a cause may be named, and when not."""

    @pytest.mark.parametrize(
        ("means", "verdict"),
        [
            ((1.0, 1.0, 0.0), "inconclusive"),  # prep or transfer: no common name
            ((0.0, 1.0, 1.0), "inconclusive"),
            ((1.0, 0.0, 1.0), "input-bound"),  # both are the loader's work on the CPU
        ],
    )
    def test_two_causes_of_equal_size_get_a_common_name_or_none(self, means, verdict):
        draws = stall_draws(**dict(zip(("prep", "transfer", "contention"), means, strict=True)))
        assert named(GAP, draws) == verdict

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [
            (BOUND_FROM, 2.0, "input-bound"),
            (BOUND_FROM - 1e-9, 2.0, "inconclusive"),
            (0.9, STEP_BOUND_UP_TO, "step-bound"),
            (0.9, STEP_BOUND_UP_TO + 1e-9, "inconclusive"),
        ],
    )
    def test_thresholds_hold_on_both_sides(self, low, high, verdict):
        draws = stall_draws(prep=1.0, transfer=0.0, contention=0.0)
        assert named(Interval(low, (low + high) / 2, high), draws) == verdict

    @pytest.mark.parametrize(
        ("prep", "contention", "verdict"),
        [
            ([0.0] * 50 + [2.0] * 950, 1.0, "input-bound"),  # the largest in 95 draws of 100
            ([0.0] * 51 + [2.0] * 949, 1.0, "inconclusive"),
        ],
    )
    def test_a_cause_is_the_largest_in_95_draws_of_100(self, prep, contention, verdict):
        draws = {"transfer": np.ones(1000), "contention": np.full(1000, contention)}
        assert named(GAP, {"prep": np.array(prep), **draws}) == verdict

    @pytest.mark.parametrize(
        ("low", "high", "says"),
        [
            (0.5, 1.5, True), (0.5, 1.51, False), (0.0, 1.0, False), (-1.0, 1.0, False),
            (0.9, 0.95, True), (0.9, 0.94, False),
        ],
    )  # fmt: skip
    def test_an_interval_that_is_too_wide_or_below_1_says_nothing(self, low, high, says):
        assert _says_something(Interval(low, high, high)) == says


def blocks_of(step, wait, *, slower=0.0, noise=0.0, rounds=4, segments=4, seed=0):
    """Rounds of segments of one step: what next() took is known, the step is off by ``noise``."""
    generator = np.random.default_rng(seed)

    def block(waited, more):
        own = (step + more) * generator.normal(1.0, noise, segments)
        return block_of([Segment(float(seconds) + waited, 1, waited) for seconds in own])

    return [{"real": block(wait, slower), "synthetic": block(0.0, 0.0)} for _ in range(rounds)]


class TestWaits:
    """What next() of a real step took, as evidence beside the difference of blocks."""

    def test_what_the_machine_did_to_a_few_steps_is_trimmed(self):
        rounds = blocks_of(0.1, 0.0, noise=0.002, rounds=5, segments=8)
        first, *rest = rounds[0]["real"].segments
        rounds[0]["real"] = block_of([first._replace(seconds=2.0), *rest])
        analysis = analyse(rounds, parallel=True)
        assert (analysis.verdict, analysis.evidence) == ("step-bound", "waits")
        assert analysis.seconds_per_batch["contended"].estimate == pytest.approx(0.1, rel=0.05)

    def test_one_round_carries_a_verdict_if_its_steps_do(self):
        assert analyse([]) == Analysis("inconclusive", precise=False, left_out=0, held=0.0)
        one = blocks_of(1.0, 0.5, noise=0.02, rounds=1, segments=4)
        assert analyse(one, parallel=False).verdict == "input-bound"
        assert analyse([], part=one[0], parallel=False).verdict == "input-bound"

    def test_of_intervals_that_carry_no_verdict_the_narrowest_is_reported(self):
        rounds = blocks_of(1.0, 0.0, slower=0.065, noise=0.08, segments=8, seed=3)
        part = {"real": block_of([Segment(1.12, 1)] * 8)}
        analysis = analyse(rounds, part=part, asynchronous=True)
        assert (analysis.verdict, analysis.evidence) == ("inconclusive", "steps")

    @settings(max_examples=50, deadline=None)
    @given(
        noise=st.floats(0.0, 1.5), rounds=st.integers(1, 5), segments=st.integers(1, 4),
        seed=st.integers(0, 1000), wait=st.floats(0, 2), asynchronous=st.booleans(),
        alone=st.booleans(),
    )  # fmt: skip
    def test_no_interval_is_too_wide_to_say_anything(
        self, noise, rounds, segments, seed, wait, asynchronous, alone
    ):
        """As 0.04 to 8555 is, which a check of a noisy loop once printed."""
        blocks = blocks_of(1.0, wait, noise=noise, rounds=rounds, segments=segments, seed=seed)
        blocks = [
            {arm: replace(took, seconds=abs(took.seconds)) for arm, took in one.items()}
            for one in blocks
        ]
        analysis = analyse(blocks, asynchronous=asynchronous, parallel=not alone)
        bound = analysis.speedup_bound
        assert bound is None or 0 < bound.low <= bound.high <= 3.0 * bound.low
        if bound is None:
            assert analysis.verdict == "inconclusive"


def estimated(rounds, part=None, **facts):
    """The estimates from these rounds, by their evidence, in order."""
    loop = Loop(**facts)
    found = estimates_of(corrected(rounds, part or {}, loop), loop)
    return {one.evidence: one for one in found}


def ends(bound):
    return pytest.approx((bound.low, bound.estimate, bound.high), abs=1e-9)


DEVICE = {"asynchronous": True, "parallel": False}
STARTS = {"epoch_starts": [10.0], "length": 20}


class TestEstimates:
    """Each way to estimate, by figures without noise: they can be computed by hand."""

    STEP, REAL = Segment(4.0, 2), Segment(6.0, 2, 1.6)  # 2 s a step; 3 s, of which 0.8 are a wait

    def rounds(self, count, segments=4, **arms):
        arms = {"synthetic": self.STEP, "real": self.REAL, **arms}
        return [{arm: block_of([each] * segments) for arm, each in arms.items()}] * count

    @pytest.mark.parametrize(
        ("rounds", "facts", "evidence"),
        [
            (3, {}, ["waits"]),  # too few rounds to compare blocks
            (4, {"parallel": False}, ["waits", "blocks"]),
            (1, DEVICE, ["steps", "waits"]),
            (4, {**DEVICE, "ranks": True}, ["blocks", "steps"]),
        ],
    )
    def test_which_there_are_and_which_is_the_best(self, rounds, facts, evidence):
        assert list(estimated(self.rounds(rounds), **facts)) == evidence

    def test_blocks_without_segments_need_two_rounds_and_steps_two_segments(self):
        unmarked = {"synthetic": BlockTimes(1.0, 1), "real": BlockTimes(1.5, 1)}
        assert list(estimated([unmarked] * 2)) == ["blocks"]
        assert list(estimated([unmarked])) == []
        assert list(estimated(self.rounds(1, segments=2))) == ["waits"]
        assert list(estimated(self.rounds(1, segments=1))) == []

    @pytest.mark.parametrize(
        ("rounds", "arms", "facts", "evidence", "means", "bound", "count"),
        [
            # The bound is known to 1 % of itself.
            (4, {}, STARTS, "blocks", {"real": 3.45}, (1.70775, 1.725, 1.74225), 4),
            (3, {}, STARTS, "waits", {"contended": 2.2, "real": 3.46}, (1.7127, 1.73, 1.7473), 12),
            (4, {"real": Segment(6.0, 2, 1.5)}, {}, "waits", {"contended": 2.25, "real": 3},
             (1.485, 1.5, 1.515), 16),
            (3, {"host": Segment(4.2, 2)}, {}, "waits", {"host": 2.1}, (1.485, 1.5, 1.515), 12),
            # Steps without their waits are as good as those on resident batches.
            # Real steps look quicker than resident ones: the wait is lost all the same.
            (3, {"real": Segment(5.0, 2, 1.6)}, {}, "waits", {"real": 2.5},
             (0.99 * 5 / 3.4, 5 / 3.4, 1.01 * 5 / 3.4), 12),
            (4, {}, DEVICE, "steps", {"real": 3}, (1.485, 1.5, 1.515), 8),
            (4, {"real": STEP}, DEVICE, "waits", {"real": 2}, (0.99, 1, 1.01), 16),
            (1, {"synthetic": Segment(4.0, 2, elsewhere=3.98)}, DEVICE, "steps", {"real": 3},
             (1.485, 1.5, 151.5), 2),
        ],
    )  # fmt: skip
    def test_what_each_says(self, rounds, arms, facts, evidence, means, bound, count):
        found = estimated(self.rounds(rounds, **arms), **facts)[evidence]
        assert ends(found.bound) == bound
        assert found.count == count
        assert found.means == pytest.approx({**found.means, "synthetic": 2, **means})
        drawn = {arm: draws.mean() for arm, draws in found.draws.items()}
        assert drawn == pytest.approx(found.means, rel=0.01)

    def test_seconds_are_known_to_1_percent_of_themselves(self):
        seconds = analyse(self.rounds(4)).seconds_per_batch
        assert {arm: ends(interval) for arm, interval in seconds.items()} == {
            "synthetic": (1.98, 2, 2.02), "contended": (2.178, 2.2, 2.222), "real": (2.97, 3, 3.03)
        }  # fmt: skip

    def test_on_a_device_the_starts_of_epochs_and_other_blocks_bound_the_gap(self):
        high = interval_of(1.4, np.full(1000, 1 + (0.8 + 0.46) / 2), 16).high
        found = estimated(self.rounds(4), **DEVICE, **STARTS)["waits"].bound
        assert ends(found) == (1.485, 1.5, high)
        beside = block_of([Segment(4.2, 2), Segment(4.6, 2)] * 2)  # 5 % slower, give or take 5
        rounds = [{**one, "contended": beside} for one in self.rounds(4)]
        high = estimated(rounds, asynchronous=True)["waits"].bound.high
        assert 1.52 < high < 1.55  # 1.515 without that spread
        slow = {"real": block_of([Segment(60.0, 2, 6.0)] * 2)}  # of the running round
        rounds = self.rounds(4, real=self.REAL._replace(waited=6.0))
        assert ends(estimated(rounds, slow, **DEVICE)["waits"].bound) == (1.485, 1.5, 2.525)

    @pytest.mark.parametrize(("step_s", "mean"), [(0.05, 0.05), (0.06, 0.09)])
    def test_steps_of_the_warm_up_count_where_steps_are_slow(self, step_s, mean):
        segments = [Segment(step_s, 1)] * 2
        warm = block_of(segments, warm_up=(0.12, 0.12))
        arms = {"synthetic": warm, "real": block_of(segments)}
        assert estimated([arms])["waits"].means["synthetic"] == pytest.approx(mean)
        assert estimated([arms], **DEVICE)["steps"].means["synthetic"] == pytest.approx(step_s)
        for seconds, apart in ((0.005, True), (0.004, False)):  # shorter ones miss their caches
            arms = dict.fromkeys(("synthetic", "real"), block_of([Segment(seconds, 1)] * 2))
            assert estimated([arms] * 4, parallel=False)["waits"].apart == apart

    def test_where_the_wait_is_the_lower_end_the_upper_one_has_all_of_5_percent(self):
        found = estimated(blocks_of(1.0, 0.3, noise=0.3, rounds=3))["waits"]
        ratio = found.draws["real"] / found.draws["synthetic"]
        mean = found.means["real"] / found.means["synthetic"]
        wide = interval_of(mean, ratio, found.count, 0.01, tails=(5, 95))
        assert found.bound.high == wide.high
        assert found.bound.low > wide.low

    def test_a_round_that_was_disturbed_counts_as_one_observation(self):
        rounds = self.rounds(3) + self.rounds(1, real=Segment(7.6, 2, 1.6))
        found = estimated(rounds)["waits"]
        assert found.means["contended"] == pytest.approx(2 + (3 * 0.2 + 1) / 4)
        assert found.count == 8

    def test_of_few_waits_that_make_up_the_sum_there_are_few(self):
        real = block_of([Segment(2.0 + wait, 1, wait) for wait in (3, 0, 0, 0, 0, 0)])
        found = estimated([{"synthetic": block_of([self.STEP] * 12), "real": real}])["waits"]
        assert found.count == 2

    @pytest.mark.parametrize(("turns", "width"), [(2, 0.0), (1, 1.0)])
    def test_waits_that_repeat_with_each_turn_of_the_workers_do_not_differ(self, turns, width):
        real = [Segment(2.0 + wait, 1, wait) for wait in (2.0, 0.0, 0.0, 0.0)] * turns
        arms = {"synthetic": block_of([self.STEP] * 16), "real": block_of(real)}
        found = estimated([arms], turn=4)["waits"]
        assert found.means["real"] == 2.5
        assert np.ptp(np.quantile(found.draws["real"], (0.1, 0.9))) == width
        assert found.count == (2 * turns if turns > 1 else 2)

    def test_blocks_of_a_round_drift_together_and_steps_do_not(self):
        drift = np.linspace(1.0, 1.2, 8)
        rounds = [
            {arm: block_of([Segment(float(a * s), 1) for s in (b, b + 0.1)])
             for arm, a in (("synthetic", 1.0), ("contended", 1.1), ("real", 1.5))}
            for b in drift
        ]  # fmt: skip
        blocks, steps, _ = estimated(rounds, asynchronous=True).values()
        assert ends(blocks.bound) == (1.485, 1.5, 1.515)
        assert steps.bound.low < 1.48
        for one in rounds:
            alone = one["synthetic"].segments
            one["real"] = block_of([each._replace(seconds=each.seconds + 0.1) for each in alone])
        draws = estimated(rounds)["waits"].draws
        assert (draws["contended"] - draws["synthetic"]).std() > 0.01

    def test_many_segments_are_joined_to_200(self):
        rounds = self.rounds(1, segments=210, real=Segment(6.0, 2, 1.5))
        assert estimated(rounds)["waits"].count == 200

    @pytest.mark.parametrize(
        ("seconds", "held", "share"),
        [(1.0, 0.005, 0.0), (1.0, 0.4, 0.4), (1.0, 2.0, 0.9), (0.0, 0.1, 0.0), (4.0, 0.4, 0.1)],
    )
    def test_the_share_for_which_steps_were_held_up(self, seconds, held, share):
        assert held_share([{"real": BlockTimes(seconds, 1, held=held)}, {}], "real") == share


def bound_of(rounds, **options):
    return analyse(rounds, **options).speedup_bound


class TestAllowances:
    """What is known to be off is put right, by numbers that can be computed by hand."""

    PLAIN = rounds_of(0.02, synthetic=1.0, real=1.5)

    def held(self, share, real, busy):
        held = {"synthetic": share, "real": real}

        def disturbed(arm, took):
            facts = {"busy": busy} if arm == "real" and busy != 1 else {}  # by default all are
            return replace(took, held=held[arm] * took.seconds, **facts)

        return [{arm: disturbed(arm, took) for arm, took in one.items()} for one in self.PLAIN]

    @pytest.mark.parametrize(
        ("options", "share", "real", "busy", "low", "high"),
        [
            ({"parallel": True}, 0.2, 0.1, 1.0, 1.0, 1 / 0.8),  # the step may be shorter by it
            ({"parallel": False}, 0.1, 0.2, 1.0, 0.8 / 0.9, 1.0),
            ({"parallel": False, "asynchronous": True}, 0.2, 0.1, 1.0, 0.9, 0.9 / 0.8),
        ],
    )
    def test_time_taken_by_other_processes_widens_the_bound(
        self, options, share, real, busy, low, high
    ):
        plain = bound_of(self.PLAIN, **options)
        got = bound_of(self.held(share, real, busy), **options)
        assert got.low == pytest.approx(plain.low * low)
        assert got.high == pytest.approx(plain.high * high)
        assert got.estimate == plain.estimate

    @pytest.mark.parametrize(("wait", "verdict"), [(0.001, "step-bound"), (1.0, "input-bound")])
    @pytest.mark.parametrize("held", ["synthetic", "real"])
    def test_a_wait_that_is_measured_apart_is_no_gain_and_as_long_as_it_was(
        self, wait, verdict, held
    ):
        """Other processes take 0.4 of the time of one arm; the step takes 1 s, with them or not."""
        arms = {"synthetic": Segment(1.0, 1), "real": Segment(1 + wait, 1, wait)}
        rounds = [{arm: block_of([each] * 4) for arm, each in arms.items()}]
        plain, took = bound_of(rounds, parallel=False).low, rounds[0][held]
        rounds[0][held] = replace(took, held=0.4 * took.seconds)
        found = analyse(rounds, parallel=False)
        assert (found.evidence, found.verdict) == ("waits", verdict)
        bound = found.speedup_bound
        assert 1 - 0.01 <= bound.low <= bound.estimate == pytest.approx(1 + wait)
        least = max(plain * (0.6 if held == "real" else 1.0), min(plain, 1.0))
        assert bound.low == pytest.approx(least)
        assert bound.high == pytest.approx(
            1 + wait / 0.6 if held == "synthetic" else bound.high, rel=0.02
        )

    def test_starts_of_epochs_are_shared_by_their_batches(self):
        """An epoch of 20 batches starts in 4 s where the loop waits 0.5 s for each batch anyway."""
        rounds = rounds_of(0.0, synthetic=1.0, real=1.5)
        with_starts = bound_of(rounds, epoch_starts=[3.0, 5.0], length=20)
        assert with_starts.estimate == pytest.approx(1.5 + (4 - 0.5) / 20, rel=0.01)
        assert bound_of(rounds, epoch_starts=[0.4, 0.3], length=20).estimate == 1.5

    def test_on_a_device_the_wait_and_what_workers_cost_are_the_most(self):
        """Blocks differ by 30 % of a step; the host waited for 1 %, workers cost 4 %."""
        step = 0.1
        rounds = blocks_of(step, 0.0, noise=0.3, rounds=3, segments=2, seed=2)
        for one in rounds:
            one["real"] = block_of([each._replace(waited=0.001) for each in one["real"].segments])
            one["synthetic"] = block_of([Segment(step, 1)] * 2)
            one["contended"] = block_of([Segment(1.04 * step, 1)] * 2)
        analysis = analyse(rounds, asynchronous=True)
        assert (analysis.verdict, analysis.evidence) == ("step-bound", "waits")
        assert analysis.speedup_bound.high == pytest.approx(1.06, abs=0.005)

    @pytest.mark.parametrize(("spread", "settled"), [(0.005, True), (0.06, False)])
    def test_a_verdict_is_precise_once_the_interval_is_narrow(self, spread, settled):
        analysis = analyse(rounds_of(spread, synthetic=1.0, real=1.1))
        bound = analysis.speedup_bound
        assert analysis.smallest_gap == (bound.high - bound.low) / 2 / bound.estimate
        assert analysis.precise == settled == (bound.half_width <= 0.02)


# Intervals and the bootstrap on numbers whose answer is known

DRAWS = np.linspace(0.8, 1.2, 2001)
"""Their 2.5 and 97.5 per cent points are 0.81 and 1.19."""


def interval(rounds, estimate=1.0, draws=DRAWS):
    return interval_of(estimate, draws, rounds)


def test_a_block_and_an_interval_in_figures():
    assert BlockTimes(seconds=6.0, steps=4).per_batch == 1.5
    assert Interval(1.0, 1.25, 2.0).half_width == 0.5
    assert f"{Interval(1.0, 1.25, 1.5)}" == "1.250 (1.000 to 1.500)"
    assert f"{Interval(1.0, 1.25, 1.5):.1f}" == "1.2 (1.0 to 1.5)"


# Two-sided 95 % points of Student's t for n - 1 degrees of freedom; 1.96 is the normal's.
@pytest.mark.parametrize(
    ("rounds", "t"), [(2, 12.706), (3, 4.303), (11, 2.228), (31, 2.042), (32, 1.96), (500, 1.96)]
)
def test_few_rounds_widen_an_interval_by_students_t(rounds, t):
    widened = math.sqrt(rounds / (rounds - 1)) * t / 1.96
    ratio = interval(rounds)
    assert math.log(ratio.low) == pytest.approx(widened * math.log(0.81))
    assert math.log(ratio.high) == pytest.approx(widened * math.log(1.19))
    assert ratio.estimate == 1.0
    difference = interval(rounds, 0.1, DRAWS - 1)
    assert 0.1 - difference.low == pytest.approx(widened * 0.29)
    assert difference.high - 0.1 == pytest.approx(widened * 0.09)


def test_each_further_round_narrows_an_interval_and_one_round_has_none():
    widths = [interval(rounds).half_width for rounds in range(2, 60)]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == len(widths)
    assert interval(1) == Interval(-math.inf, 1.0, math.inf)


def test_intervals_that_contain_zero_are_widened_by_differences():
    found, widened = interval(4, 0.0), math.sqrt(4 / 3) * 3.182 / 1.96
    assert found.low == 0.0
    assert found.high == pytest.approx(widened * 1.19)
