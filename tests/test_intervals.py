"""Intervals and the bootstrap on numbers whose answer is known."""

import math

import numpy as np
import pytest

from dataloaders.measuring.intervals import Interval, Timed, interval_of, ratio_draws

DRAWS = np.linspace(0.8, 1.2, 2001)
"""Their 2.5 and 97.5 per cent points are 0.81 and 1.19."""


def interval(rounds, estimate=1.0, draws=DRAWS, floor=None):
    return interval_of(estimate, draws, rounds, *(() if floor is None else (floor,)))


def test_a_block_and_an_interval_in_figures():
    assert Timed(seconds=6.0, steps=4).per_batch == 1.5
    assert Interval(1.0, 1.25, 2.0).half_width == 0.5
    assert f"{Interval(1.0, 1.25, 1.5)}" == "1.250 (1.000 to 1.500)"
    assert f"{Interval(1.0, 1.25, 1.5):.1f}" == "1.2 (1.0 to 1.5)"


# Two-sided 95 % points of Student's t for n - 1 degrees of freedom; 1.96 is the normal's.
@pytest.mark.parametrize(
    ("rounds", "t"), [(2, 12.706), (3, 4.303), (11, 2.228), (31, 2.042), (32, 1.96), (500, 1.96)]
)
def test_few_rounds_widen_it_by_students_t(rounds, t):
    widened = math.sqrt(rounds / (rounds - 1)) * t / 1.96
    ratio = interval(rounds)
    assert math.log(ratio.low) == pytest.approx(widened * math.log(0.81))
    assert math.log(ratio.high) == pytest.approx(widened * math.log(1.19))
    assert ratio.estimate == 1.0
    difference = interval(rounds, 0.1, DRAWS - 1)
    assert 0.1 - difference.low == pytest.approx(widened * 0.29)
    assert difference.high - 0.1 == pytest.approx(widened * 0.09)


def test_one_round_says_nothing():
    assert interval(1) == Interval(-math.inf, 1.0, math.inf)


@pytest.mark.parametrize(
    ("estimate", "draws"),
    [(0.0, DRAWS), (-1.0, -DRAWS), (1.0, np.where(DRAWS < 0.9, 0.0, DRAWS))],
    ids=["nothing", "negative", "draws of nothing"],
)
def test_what_may_be_nothing_is_widened_by_differences(estimate, draws):
    low, high = np.percentile(draws, (2.5, 97.5))
    widened = math.sqrt(4 / 3) * 3.182 / 1.96
    found = interval(4, estimate, draws)
    assert found.low == pytest.approx(estimate - max(0.0, widened * (estimate - low)))
    assert found.high == pytest.approx(estimate + widened * (high - estimate))


def test_it_is_no_narrower_than_the_clock_allows():
    assert interval(30, floor=0.75) == Interval(0.25, 1.0, 1.75)
    assert interval(30, floor=1e-9) == interval(30)
    assert interval(30, draws=np.ones(2000)) == Interval(1.0, 1.0, 1.0)


def test_observations_are_drawn_whole_and_long_ones_weigh_more():
    seconds, steps = np.array([1.0, 27.0]), np.array([1.0, 9.0])
    draws = ratio_draws(seconds, steps)
    np.testing.assert_allclose(ratio_draws(2 * seconds, steps), 2 * draws)
    values, counts = np.unique(draws, return_counts=True)
    assert values.tolist() == [1.0, 2.8, 3.0]  # the first one twice, each once, the second twice
    assert (counts / counts.sum()).tolist() == pytest.approx([0.25, 0.5, 0.25], abs=0.05)
    assert np.array_equal(draws, ratio_draws(seconds, steps))  # the same each time
    assert not np.array_equal(draws, ratio_draws(seconds, steps, seed=5))
