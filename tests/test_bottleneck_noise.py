"""How often the check is right where steps differ and other processes run; on a played time.

Nothing waits here: minutes of a loop are computed in a moment, so that many seeds fit in.
"""

import random

import pytest

from bench.check.played import HostOn, PlayedLoader, VirtualTime
from dataloaders.bottleneck import check_bottleneck

Neighbour = tuple[tuple[float, float], tuple[float, float], float]
"""Seconds at work, seconds away (low, high), and the share of the core that it takes."""


def checked(step, load, workers, *, noise, seed, budget_s, neighbour=None):
    """The report, and the seconds that it took; every step and load is off by ``noise``."""
    draw = random.Random(seed)
    time = VirtualTime(neighbour, seed)

    def work(batch):
        time.burn("busy", step * max(0.3, draw.gauss(1, noise)))

    loads = [load * max(0.3, draw.gauss(1, noise)) for _ in range(97)]
    loader = PlayedLoader(time, loads, workers=workers)
    report = check_bottleneck(loader, work, budget_s=budget_s, clock=HostOn(time))
    return report, time.now()


def right(report, step, load, workers):
    """Whether the verdict is true of a machine with nothing else to do; None: there is none."""
    if report.verdict == "inconclusive":
        return None
    truth = max(step, load / workers) / step if workers else 1 + load / step
    assert truth < 1.03 or truth > 1.1
    return (report.verdict == "step-bound") == (truth < 1.03)


SEEDS = [5, pytest.param(40, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("step", [0.5, 0.7, 1.0])
def test_slow_steps_that_differ_get_a_verdict_in_nine_of_ten(step, seeds):
    """Ten per cent of noise, with workers: within twice the budget, and never a wrong one."""
    verdicts = []
    for share, workers in ((0.1, 1), (0.5, 1), (1.6, 2), (0.5, 4), (1.3, 1), (3.0, 2)):
        for seed in range(seeds):
            case = step, step * share, workers
            report, seconds = checked(*case, noise=0.1, seed=seed, budget_s=30)
            verdicts.append(right(report, *case))
            assert seconds < 65
    assert verdicts.count(False) <= (0 if seeds < 10 else len(verdicts) / 200)
    assert verdicts.count(None) <= 0.1 * len(verdicts)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "seeds", [2, pytest.param(20, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]
)
@pytest.mark.parametrize(
    "neighbour",
    [((0.01, 0.3), (0.01, 0.3), 0.5), ((1, 8), (1, 8), 0.4), ((2, 6), (5, 15), 0.5)],
    ids=["short", "long", "rare"],
)
def test_another_process_never_makes_a_verdict_wrong(neighbour, seeds):
    """Also where its bursts hide that the loader is too slow: then there is no verdict."""
    cases = [(0.02, 0.001, 1), (0.02, 0.046, 2), (0.03, 0.138, 4), (0.1, 0.26, 2), (0.02, 0.01, 0)]
    verdicts = {
        case: [
            right(checked(*case, noise=0.02, seed=seed, budget_s=20, neighbour=neighbour)[0], *case)
            for seed in range(seeds)
        ]
        for case in cases
    }
    assert not any(False in those for those in verdicts.values())
    assert verdicts[0.02, 0.01, 0] == [True] * seeds
