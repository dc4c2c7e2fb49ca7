"""Decisions of the check from given numbers: cycles, warm-ups, lengths of blocks, ranks."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.check.played import HostOn, PlayedLoader, VirtualTime
from dataloaders.bottleneck import Check
from dataloaders.bottleneck.rhythm import Rhythm, WarmUp
from dataloaders.bottleneck.schedule import Numbers, Schedule

SECONDS = st.floats(1e-7, 10)


@pytest.mark.parametrize(
    ("gaps", "every", "cycle"),
    [
        *(([0.01] * 3 * cycle, cycle, cycle) for cycle in (2, 128)),  # an optimizer's steps
        ([0.01] * 3 * 129, 129, 1),
        ([0.01, 0.01, 0.01, 0.01, 0.018, 0.04] * 4, 0, 6),  # half longer than all others
        ([*[0.01] * 4, 0.3, 0.01, 0.01, 1.0] * 4, 0, 8),  # others are a third of the longest
    ],
)
def test_a_cycle_and_its_first_batch_are_found(gaps, every, cycle):
    rhythm, aligned = Rhythm(), []
    for turn in (*range(len(gaps)), *range(2 * cycle)):
        if len(aligned) == len(gaps):
            rhythm.update()
        if every and turn % every == every - 1:
            rhythm.stepped()
        rhythm.asked(gaps[turn])
        aligned.append(rhythm.aligned)
    assert (rhythm.cycle, rhythm.known) == (cycle, True)
    assert aligned[len(gaps) :] == ([False] * (cycle - 1) + [True]) * 2


@pytest.mark.parametrize(
    ("gaps", "steps", "known"),
    [
        ([], (), True),
        ([0.01] * 9, (3, 5), False),
        ([0.01, 0.01, 9.0, *[0.01] * 9], (), False),
        ([gap for short in (5, 4, 3, 5) for gap in (*[0.01] * short, 9.0)], (), True),
    ],
)
def test_a_cycle_is_not_ruled_out_before_its_end_was_seen_often_enough(gaps, steps, known):
    rhythm = Rhythm()
    assert rhythm.aligned
    for number, gap in enumerate(gaps):
        if number in steps:
            rhythm.stepped()
        rhythm.asked(gap)
    assert rhythm.cycle == 1
    rhythm.update()
    assert (rhythm.cycle, rhythm.known) == (1, known)


@pytest.mark.parametrize(
    ("steps", "over"),
    [
        ([0.2] * 20, 3),  # three agree
        ([1.0, 3.0] * 20, 5),
        ([0.001, 0.0025] * 200, 286),  # half a second: a millisecond is no difference
        ([60.0, *[0.1, 0.9] * 20], 11),
    ],
)
def test_warming_up_ends_when_steps_agree_or_after_a_while(steps, over):
    warm_up, count = WarmUp(4.5, 2), 0
    while not warm_up.over():
        warm_up.stepped(steps[count], steps[count])
        count += 1
    assert count == over


def test_warming_up_takes_its_fewest_steps_and_is_looked_at_now_and_then():
    warm_up = WarmUp(4.5)
    warm_up.fewest = 70
    due, over = [], []
    for count in range(1, 99):
        warm_up.stepped(0.02, 0.02)
        due += [count] * warm_up.due
        over += [count] * warm_up.over()
    assert due == [*range(1, 65), 80, 96]
    assert over == list(range(70, 99))
    assert not warm_up.over(waiting_for_more=True)


@pytest.mark.parametrize(
    ("steps", "excess"),
    [
        ([9.0, 0.1], 0.0),  # nothing to compare it with
        ([9.0, 9.0, 0.2, 1.0], 18.0),  # the last half is the usual
        ([1.05, 0.1, 0.1], 1.05),  # ten times
        ([1.0, 0.1, 0.1], 0.0),
        ([0.5, 0.01, 0.01], 0.0),  # half a second
        ([2.0, *[0.1] * 63, 9.0, *[0.1] * 64], 2.0),  # of the first 64, by the last 64
    ],
)
def test_what_first_steps_took_longer_is_their_excess(steps, excess):
    warm_up = WarmUp(4.5)
    for step in steps:
        warm_up.stepped(step, step)
    assert warm_up.excess_s == pytest.approx(excess)


FOUR, SIX = {"workers": 4, "in_flight": 8}, {"workers": 6, "in_flight": 12}
ASYNC = {"asynchronous": True}


class TestPlan:
    # Of the first block, the random factor is 1.344, and of up to 2 steps or 4 more, 1 or 3 come.
    @pytest.mark.parametrize(
        ("arm", "options", "numbers", "plan"),
        [
            ("synthetic", {"budget_s": 9}, (9, 0.001, 0.001), (0, 2, 270, 2, 1.088)),  # 0.2 s
            ("synthetic", ASYNC, (30, 1e-5, 1e-5), (0, 4096, 20000, 200, 1)),
            ("synthetic", {}, (30, 1e-7, 1e-7, 2), (0, 2, 20000, 5000, 1)),
            ("synthetic", {"length": 11}, (30, 0.01, 0.01), (0, 2, 48, 1, 2)),  # all in the pool
            ("real", ASYNC, (30, 0.01, 0.02), (0, 10, 23, 1, 2.64)),
            ("real", ASYNC, (30, 0.01, 0.01, 1, -1, 0.05), (5, 20, 45, 1, 2.8)),
            ("real", {"length": 12}, (30, 0.01, 0.01), (0, 3, 45, 1, 1.92)),
            ("real", {"workers": 2, "in_flight": 4, "length": 20}, (30, 0.01, 0.15),
             (0, 9, 20, 20, 17.4)),  # a tenth of the budget
            # Slow steps, of which a block has few
            ("synthetic", {}, (1, 0.25, 0.25), (0, 2, 4, 1, 1)),
            ("synthetic", {}, (2, 1, 1), (0, 0, 2, 1, 2)),
            ("synthetic", ASYNC, (2, 1, 1), (0, 1, 1, 1, 2)),
            ("real", {}, (30, 0.25, 0.25), (0, 3, 4, 1, 7)),
            ("real", {}, (4.3, 1, 1.06), (0, 1, 3, 1, 4.3)),
            ("real", {"workers": 4, "in_flight": 12}, (30, 0.01, 0.25), (0, 27, 12, 1, 30)),
            ("real", SIX, (30, 0.01, 0.3, 1, 0), (0, 7, 10, 1, 20.4)),
            ("real", SIX, (14.9, 1, 1.06, 1, 0), (0, 7, 7, 1, 14.9)),
            ("real", SIX, (8, 1, 1.06, 1, 0), (0, 5, 6, 1, 8)),
            ("real", SIX, (8, 1, 1.05, 1, 0), (0, 5, 2, 1, 8)),
            ("real", SIX, (16, 2, 2.05, 1, 0), (0, 5, 2, 1, 16)),
            # A fifth of a second on a device, twice what is in flight or what workers have begun
            ("real", FOUR, Numbers(30, 1, 0.1, ready=0), (0, 19, 8, 1, 30)),
            ("real", FOUR, Numbers(30, 0.02, 0.02, ready=3, steady=1), (0, 0, 24, 1, 1.92)),
            # Refilled as the last block left the device, half a second at most
            ("real", {}, Numbers(30, 0.03, 0.03, lag_s=0.09), (0, 3, 15, 1, 2.16)),
            ("real", ASYNC, Numbers(30, 0, 0.03, lag_s=0.09), (0, 7, 15, 1, 2.64)),
            # Copied too slowly, and just in time
            ("real", ASYNC, Numbers(30, 0.03, 0.04, lag_s=0.09, ahead=1), (0, 5, 12, 1, 2.72)),
            ("real", ASYNC, Numbers(30, 0.03, 0.0306, lag_s=0.09, ahead=1), (3, 7, 15, 1, 3.06)),
            ("real", ASYNC, Numbers(30, 0.2, 0.03, lag_s=9), (4, 7, 15, 1, 20.8)),
            ("synthetic", {}, Numbers(30, 1e-5, 1e-5, varied=1), (0, 2, 20000, 1, 1)),
        ],
    )  # fmt: skip
    def test_the_first_block_of_an_arm(self, arm, options, numbers, plan):
        found = Schedule(**{"budget_s": 30, **options}).plan(arm, Numbers(*numbers))
        figures = found.refill, found.warm_up, found.batches, found.segment, found.most_s
        assert figures == pytest.approx(plan)

    def test_a_block_is_at_most_four_times_as_long_as_the_last_of_its_arm(self):
        schedule, step_s = Schedule(30), 0.00233  # 180 of these, and the block is as long
        assert schedule.plan("synthetic", Numbers(30, 0.01, 0.01)).batches == 45
        assert schedule.plan("synthetic", Numbers(30, step_s, step_s, 7)).batches == 175

    @pytest.mark.parametrize("arm", ["synthetic", "host", "contended", "real"])
    @given(step=SECONDS, real=SECONDS, cycle=st.integers(1, 64), asynchronous=st.booleans())
    def test_a_block_holds_whole_cycles_and_has_a_deadline(
        self, arm, step, real, cycle, asynchronous
    ):
        schedule = Schedule(30, workers=2, in_flight=4, asynchronous=asynchronous)
        plan = schedule.plan(arm, Numbers(30, step, real, cycle))
        assert plan.batches % plan.segment == plan.segment % cycle == plan.warm_up % cycle == 0
        assert plan.batches > 0
        assert 0 < plan.most_s <= 30

    @example(first=0.0002, then=9.979109494468688e-07)
    @given(first=SECONDS, then=st.floats(0, 1e-6))
    def test_a_step_time_of_nothing_makes_no_endless_block(self, first, then):
        schedule = Schedule(30)
        before = schedule.plan("synthetic", Numbers(30, first, first)).batches
        after = schedule.plan("synthetic", Numbers(30, then, first)).batches
        assert after <= 4 * before + 3

    def test_time_goes_to_arms_by_their_spread(self):
        steady, bursts, uneven = Schedule(30), Schedule(30), Schedule(30)
        assert steady.adapt(3, 0.01, 0.01) == 1
        assert bursts.adapt(3, 0.03, 0.12) == pytest.approx((2 + 4) / 3)  # real blocks alone
        blocks = {arm: bursts.plan(arm, Numbers(30, 0.01, 0.01)) for arm in ("real", "synthetic")}
        assert 4 * 17 <= blocks["real"].batches <= 4 * 50
        assert 17 <= blocks["synthetic"].batches <= 50
        assert uneven.adapt(3, 0.12, 0.12) == pytest.approx(2)  # all of them
        assert uneven.adapt(3, 0.12, 0.12) == pytest.approx(30 / 12 / 3 / (2 / 3))  # at most

    def test_one_process_looks_at_the_deadline_after_each_segment_and_ranks_rarely(self):
        assert Schedule(30).late(3, 2.0, most_s=1.0)
        assert not Schedule(30).late(3, 1.0, most_s=1.0)
        asked = []

        def agree(numbers):
            asked.extend(numbers)
            return numbers

        together = Schedule(30, agree=agree)
        late = [lap for lap in range(1, 17) if together.late(lap, 2.0, most_s=1.0)]
        assert late == [1, 2, 4, 8, 16]
        assert len(asked) == 5
        assert not together.late(1, 1.0, most_s=1.0)
        assert (Schedule(30).alone, together.alone) == (True, False)


@pytest.mark.parametrize(
    ("rounds", "spent", "step", "known", "enough", "over"),
    [
        (5, 14.0, 0.02, (True, True, False), False, False),
        (5, 14.5, 0.02, (True, True, False), True, False),  # half of the budget
        (9, 27.4, 0.02, (True, False, False), False, False),
        (9, 27.5, 0.02, (True, False, False), True, False),  # another round would not fit
        (9, 30.0, 0.02, (True, False, False), True, False),
        (2, 31.0, 0.25, (False, False, False), True, True),
        (1, 60.0, 0.02, (False, False, False), False, False),
        (2, 52.0, 4.0, (False, False, False), False, False),
        (2, 52.5, 4.0, (False, False, False), True, False),  # no room for two of them
        (2, 55.5, 2.2, (False, False, False), False, False),
        (3, 31.0, 1.0, (True, False, False), True, True),
        (3, 61.0, 1.0, (False, False, False), True, True),
    ],
)
def test_measuring_ends_with_a_verdict_or_the_budget(rounds, spent, step, known, enough, over):
    schedule = Schedule(30)
    schedule.plan("real", Numbers(30, step, step))
    assert schedule.over(rounds, spent, lambda: known) == over
    assert schedule.enough(rounds, spent, 1.0, lambda: known) == enough


def test_long_rounds_may_be_few_and_slow_steps_have_twice_the_budget():
    schedule = Schedule(30)
    assert not schedule.interrupted
    assert [schedule.left_s(rounds, 10.0) for rounds in (1, 2)] == [50, 20]
    assert [schedule.few_steps(seconds) for seconds in (1.5, 1.6)] == [False, True]
    known = True, True, True
    rounds = [(2, 3.1), (3, 3.0), (3, 3.1), (5, 3.0)]  # of more than a tenth of the budget, three
    found = [schedule.enough(number, 10.0, seconds, lambda: known) for number, seconds in rounds]
    assert found == [False, False, True, True]
    schedule.plan("real", Numbers(30, 1.0, 1.0))
    assert schedule.left_s(2, 10.0) == 50


@pytest.mark.parametrize("lengths", [(None, None), (7, 7), (60, 40)])
@pytest.mark.parametrize("slower_s", [0.0, 0.03])
def test_unequal_ranks_run_the_same_number_of_steps(lengths, slower_s):
    """Rank 1 loads more slowly, or has shorter epochs; every step is a barrier, as with DDP."""
    sent = queue.Queue()  # rank 0's numbers
    together = threading.Barrier(2, timeout=20)

    def run(rank):
        steps, asked = 0, 0

        def agree(numbers):
            nonlocal asked
            asked += 1
            if rank == 0:
                sent.put(numbers)
                return numbers
            first = sent.get(timeout=20)
            assert len(first) == len(numbers)
            return first

        time = VirtualTime()
        loader = PlayedLoader(time, [0.001 + rank * slower_s], workers=1, batches=lengths[rank])
        check = Check(loader, budget_s=4, clock=HostOn(time), agree=agree)
        try:
            for _ in check:
                together.wait()
                steps += 1
                time.sleep(0.01)
        except BaseException:
            together.abort()
            raise
        return steps, asked, check.report()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first[:2] == second[:2]
    assert first[0] > 50
    if slower_s and lengths[0] == lengths[1]:
        assert second[2].verdict == "input-bound"
