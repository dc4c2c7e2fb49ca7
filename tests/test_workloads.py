"""The truth bench: its queue model and its judging."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.verdicts import judge, summarise
from bench.workloads import WORKLOADS, accepted
from dataloaders.predicting import Overhead, seconds_per_batch

# Four workers on two cores are meant so here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

MILLISECONDS = st.integers(1, 200).map(lambda value: value / 1000)
PATTERN = st.lists(MILLISECONDS, min_size=1, max_size=8)


@settings(max_examples=40)
@given(PATTERN, PATTERN, st.integers(1, 3), st.integers(1, 3))
def test_no_loop_beats_its_step_nor_loses_to_a_serial_one(loads, steps, workers, ahead):
    real = seconds_per_batch(loads, steps, workers=workers, prefetch=ahead, batches=30)
    # 20 epochs for each member of the pattern: whole turns of it, so its mean is exact.
    assert sum(steps) / len(steps) * (1 - 1e-9) <= real <= (max(loads) + max(steps)) * (1 + 1e-9)
    serial = sum(loads) / len(loads) + sum(steps) / len(steps)
    assert seconds_per_batch(loads, steps, workers=0) == pytest.approx(serial)
    constant = seconds_per_batch(loads[:1], steps[:1], workers=workers, prefetch=ahead)
    assert constant == pytest.approx(max(steps[0], loads[0] / workers), rel=0.03)


def test_bursts_first_batches_and_overhead():
    burst = [0.01] * 7 + [0.16]
    assert seconds_per_batch(burst, [0.04], workers=2, prefetch=4) == pytest.approx(0.04)
    # One batch ahead: the slow one is waited for 160 - 40 ms, once in eight steps.
    assert seconds_per_batch(burst, [0.04], workers=1, prefetch=1) == pytest.approx(0.04 + 0.12 / 8)
    first = seconds_per_batch([0.08], [0.02], workers=8, prefetch=2, batches=20)
    assert first == pytest.approx((0.08 + 20 * 0.02) / 20)
    own = Overhead(take=0.001, make=0.002)
    for load, step, real in ((0.01, 0.05, 0.051), (0.05, 0.01, 0.052)):
        found = seconds_per_batch([load], [step], workers=1, overhead=own)
        assert found == pytest.approx(real)


def test_every_loader_and_step_can_be_made_and_is_judged_by_its_gap():
    for workload in WORKLOADS.values():
        loader, step = workload.make(1)
        assert callable(step)
        assert loader.num_workers in (0, 1, 2, 4, 8)
        assert judge(workload, 1.10, "step-bound") == "wrong"
        assert judge(workload, 1.10, "inconclusive") == "inconclusive"
        assert {judge(workload, 1.2, cause) for cause in workload.causes} == {"right"}
        assert accepted(workload, 1.03) == {"step-bound"}
        assert judge(workload, 1.0, "input-bound") == "wrong"
    found = [judge(WORKLOADS["slower_5"], 1.05, f"{kind}-bound") for kind in ("step", "transfer")]
    assert found == ["right", "wrong"]
    result = summarise([{"name": "tiny_serial", "seed": 0, "failed": "Traceback"}])
    assert result.met is False
    assert "no workload ran: tiny_serial" in result.notes[0]
