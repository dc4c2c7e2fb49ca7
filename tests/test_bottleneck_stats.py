"""Intervals and verdicts from figures that are made up, so that the right answer is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from dataloaders import DataLoader
from dataloaders.bottleneck.report import Report
from dataloaders.bottleneck.summary import summarise
from dataloaders.bottleneck.verdict import analyse
from dataloaders.machine import resources
from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import Interval, Timed, resample

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
        analyse(rounds_of(0.001, **seconds)),
        loader=loader,
        feed=Feed(loader),
        batch="float32 2",
        rounds=8,
        seconds=1.0,
        finished=True,
        writes=False,
    )


def test_interval_formats_as_estimate_and_range() -> None:
    assert f"{Interval(1.0, 1.25, 1.5):.2f}" == "1.25 (1.00 to 1.50)"
    assert Interval(1.0, 1.25, 1.5).half_width == 0.25


@pytest.mark.parametrize(
    ("real", "line"), [(1.01, "leave the input as it is"), (2.0, "num_workers")]
)
def test_advice_follows_the_verdict(real: float, line: str) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8)), batch_size=2)
    report = report_of(loader, synthetic=1.0, real=real)
    assert line in report.advice[0]


@pytest.mark.parametrize(
    ("own_code", "line"), [(False, "threads and its depth"), (True, "workers")]
)
def test_workers_are_not_advised_where_a_backend_has_threads(own_code: bool, line: str) -> None:
    pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")
    from torchvision.transforms import ToTensor

    from helpers.photos import Opened, folder

    data: Any = Opened(ToTensor()) if own_code else folder(ToTensor())
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, backend="dali")
    report = report_of(loader, synthetic=1.0, real=2.0)
    assert line in report.advice[0]
    assert ("num_workers=" in report.advice[0]) == own_code


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


def test_one_round_carries_no_interval() -> None:
    analysis = analyse([{"synthetic": Timed(1.0, 10), "real": Timed(3.0, 10)}])
    assert analysis.verdict == "inconclusive"
    assert analysis.speedup_bound.low == -math.inf


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(4, 12),
    spread=st.floats(0.005, 0.1),
    seed=st.integers(0, 2**32 - 1),
)
def test_interval_of_few_rounds_is_wider_than_the_plain_percentiles(
    count: int, spread: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    rounds = [
        {"real": Timed(1 + spread * float(generator.standard_normal()), 1)} for _ in range(count)
    ]
    sampled = resample(rounds)
    interval = sampled.interval(sampled.means["real"], sampled.draws["real"])
    low, high = np.percentile(sampled.draws["real"], (2.5, 97.5))
    assert interval.low < low < high < interval.high


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    trials = 300
    for _ in range(trials):
        noise = generator.normal(1.0, 0.05, size=(6, 2))
        rounds = [{"synthetic": Timed(a, 1), "real": Timed(1.5 * b, 1)} for a, b in noise]
        bound = analyse(rounds).speedup_bound
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
    assert analyse(rounds_of(0.005, **seconds)).verdict == verdict


@pytest.mark.parametrize("gap", [1.0, 1.1, 1.5])
def test_a_wide_interval_carries_no_verdict(gap: float) -> None:
    analysis = analyse(rounds_of(0.9, count=4, synthetic=1.0, real=gap))
    assert analysis.verdict == "inconclusive"
    assert not analysis.settled


def test_preparation_and_contention_of_equal_size_are_input_bound() -> None:
    rounds = [
        {"synthetic": Timed(1.0, 1), "contended": Timed(contended, 1), "real": Timed(1.5, 1)}
        for contended in (1.15, 1.35, 1.15, 1.35, 1.15, 1.35)
    ]
    assert analyse(rounds).verdict == "input-bound"


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(ARMS), st.floats(0.5, 2), min_size=4))
def test_stalls_add_up_to_the_gap(seconds: dict[str, float]) -> None:
    analysis = analyse(rounds_of(0.0, **seconds))
    gap = seconds["real"] - seconds["synthetic"]
    total = sum(stall.estimate for stall in analysis.stalls.values())
    assert total == pytest.approx(gap, abs=1e-12)


def test_epoch_starts_count_as_part_of_real() -> None:
    rounds = rounds_of(0.001, synthetic=1.0, real=1.0)
    assert analyse(rounds).verdict == "step-bound"
    with_starts = analyse(rounds, epoch_starts=[5.0, 5.0], batches=10)
    assert with_starts.verdict == "input-bound"
    assert with_starts.speedup_bound.estimate == pytest.approx(1.5, rel=0.01)
    assert with_starts.seconds_per_batch["real"].estimate == pytest.approx(1.5, rel=0.01)


def test_the_smallest_visible_gap_grows_with_the_noise() -> None:
    quiet = analyse(rounds_of(0.001, synthetic=1.0, real=1.0)).smallest_gap
    noisy = analyse(rounds_of(0.3, synthetic=1.0, real=1.0)).smallest_gap
    assert 0.009 < quiet < 0.02 < noisy
