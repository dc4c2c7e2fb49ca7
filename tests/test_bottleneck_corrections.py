"""What the check corrects in blocks before it compares arms: exact figures from given segments."""

import math

import pytest

from dataloaders.bottleneck.evidence.corrections import Loop, Segment, block_of, corrected

STEP_S = 0.01


def result(*rounds, part=None, asynchronous=False, parallel=False, length=1000):
    """Return the correction of rounds: dicts of an arm's segments."""
    whole = [{arm: block_of(those) for arm, those in one.items()} for one in rounds]
    part = {arm: block_of(those) for arm, those in (part or {}).items()}
    loop = Loop(asynchronous=asynchronous, parallel=parallel, length=length)
    return corrected(whole, part, loop)


def seconds(found, arm, number=0):
    return [segment.seconds for segment in found.rounds[number][arm].segments]


def waits(found, arm):
    return [segment.waited for segment in found.rounds[0][arm].segments]


def resident(count=4):
    return [Segment(STEP_S, 1) for _ in range(count)]


def sized(steps, nbytes, slope=1e-6, waited=0.0):
    return Segment(STEP_S * steps + slope * nbytes + waited, steps, waited, nbytes=nbytes)


class TestSizes:
    SIZES = (100, 900, 300, 700, 500, 1100, 200, 1600)
    REAL = (sized(1, 400, waited=0.002), sized(2, 3000), sized(1, 600))  # 1,000 bytes a step

    def test_each_step_is_moved_to_the_size_of_a_usual_batch(self):
        arms = [sized(1 + at % 2, nbytes) for at, nbytes in enumerate(self.SIZES)]
        found = result({"real": self.REAL, "synthetic": arms})
        usual = STEP_S + 1e-6 * 1000
        steps = [1 + at % 2 for at in range(8)]
        assert seconds(found, "synthetic") == pytest.approx([usual * n for n in steps])
        assert seconds(found, "real") == pytest.approx([usual + 0.002, 2 * usual, usual])

    @pytest.mark.parametrize(
        ("arms", "real"),
        [
            ([sized(1, nbytes) for nbytes in SIZES[:7]], REAL),  # too few to tell
            ([sized(1, nbytes) for nbytes in SIZES], (*REAL, sized(1, 0))),  # sizes not known
        ],
    )
    def test_no_step_is_moved_where_the_cost_of_bytes_is_not_known(self, arms, real):
        found = result({"real": real, "synthetic": arms})
        assert seconds(found, "synthetic") == [one.seconds for one in arms]
        assert seconds(found, "real") == [one.seconds for one in real]


class TestEpochs:
    def test_the_segment_in_which_an_epoch_starts_is_set_apart(self):
        real = [Segment(0.5, 3, starts_epoch=True), Segment(0.04, 2), Segment(0.02, 1)]
        found = result({"real": real, "synthetic": resident()}, parallel=True)
        assert seconds(found, "real") == [0.04, 0.02]
        assert found.starts == pytest.approx([0.5 - 2 * 0.02])
        assert not found.whole_epochs
        alone = result({"real": real[:1], "synthetic": resident()}, parallel=True)
        assert alone.starts == [0.5]  # no other step says what one takes

    def test_whole_epochs_stay_as_they_are(self):
        real = [Segment(0.5, 10, starts_epoch=True), Segment(0.1, 5), Segment(0.1, 5)]
        found = result({"real": real, "synthetic": resident()}, parallel=True, length=10)
        assert seconds(found, "real") == [0.5, 0.1, 0.1]
        assert found.whole_epochs
        assert not found.starts
        one = {"real": block_of([Segment(0.5, 1, starts_epoch=True)])}
        assert corrected([one], {}, Loop()).whole_epochs  # of one batch, if nothing else is said

    @pytest.mark.parametrize("length", [100, 101])
    def test_without_workers_only_long_epochs_start_apart(self, length):
        real = [Segment(0.1, 1, starts_epoch=True), Segment(0.02, 1)]
        found = result({"real": real, "synthetic": resident()}, length=length)
        assert found.whole_epochs == (length == 100)
        assert len(found.starts) == (length == 101)


class TestNewShapes:
    REAL = (Segment(0.04, 2, 0.002, new_shape=True), Segment(STEP_S, 1))

    def test_a_shape_that_costs_more_at_first_is_left_out(self):
        found = result({"real": self.REAL, "synthetic": resident()}, parallel=True)
        assert seconds(found, "real") == [STEP_S]
        assert found.left_out == 2

    def test_without_workers_its_wait_counts(self):
        found = result({"real": self.REAL, "synthetic": resident()})
        assert seconds(found, "real") == pytest.approx([0.002 + 2 * STEP_S, STEP_S])

    @pytest.mark.parametrize(
        "first", [Segment(1.1 * STEP_S, 1, new_shape=True), Segment(0.05, 1, 0.04, new_shape=True)]
    )
    def test_a_shape_that_costs_the_same_or_only_waits_stays(self, first):
        found = result({"real": [first, *resident(1)], "synthetic": resident()}, parallel=True)
        assert seconds(found, "real") == [first.seconds, STEP_S]
        assert not found.left_out
        slower = [Segment(2 * STEP_S, 1, new_shape=at == 0) for at in range(9)]  # new or not
        found = result({"real": slower, "synthetic": resident(1)}, parallel=True)
        assert not found.left_out

    def test_where_every_shape_is_new_there_is_nothing_to_compare(self):
        found = result({"real": [self.REAL[0]]}, parallel=True)
        assert seconds(found, "real") == [0.04]


def test_a_wait_for_another_loader_is_input_on_the_host():
    arm = [Segment(0.05, 1, 0.01, elsewhere=0.03)]
    found = result({"real": arm, "synthetic": arm})
    assert waits(found, "real") == [pytest.approx(0.04)]
    assert seconds(found, "real") == [0.05]
    assert waits(found, "synthetic") == [0]
    assert seconds(found, "synthetic") == [pytest.approx(0.02)]


def test_on_a_device_a_dropped_batch_that_is_waited_for_is_no_contention():
    arms = {"real": resident(), "synthetic": resident(), "contended": [Segment(0.05, 2, 0.045)]}
    found = result(arms, asynchronous=True, parallel=True)
    assert seconds(found, "contended") == [pytest.approx(0.02)]


def test_rounds_that_lack_an_arm_count_by_their_segments_only():
    whole = {"real": resident(), "synthetic": resident()}
    found = result(whole, {"real": resident(2)}, whole, part={"synthetic": resident(3)})
    assert len(found.rounds) == 2
    assert {arm: took.steps for arm, took in found.part.items()} == {"real": 2, "synthetic": 3}
    assert math.isclose(found.part["real"].per_batch, STEP_S)
    assert len(result(whole, whole, {**whole, "host": resident()}).rounds) == 1
