"""The check where the step's device runs behind the host: played, exact; resident batches."""

import itertools
import re
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

from bench.check.known_work import burn
from bench.check.played import HostOn, Loop, VirtualTime
from bench.check.workloads import WORKLOADS, accepted
from dataloaders.bottleneck import Check, check_bottleneck, placement, resident
from dataloaders.errors import CheckError
from dataloaders.measuring.clocks import DeviceClock, HostClock, clock_of, cpu_seconds
from helpers.datasets import MapDataset

PLAYED = [workload for workload in WORKLOADS.values() if workload.loop and workload.computed]


def checked(loop, budget_s=30):
    loader, step = loop.made(VirtualTime())
    device = "meta" if loop.nbytes and not loop.ahead else None
    return check_bottleneck(loader, step, budget_s=budget_s, device=device, clock=step.clock)


def noting(clock, done):
    """The clock; its marks and waits are noted."""
    mark, wait = clock.mark, clock.wait
    clock.mark = lambda: done.append("mark ") or mark()
    clock.wait = lambda: done.append("wait ") or wait()
    return clock


@pytest.mark.parametrize("workload", PLAYED, ids=lambda workload: workload.name)
@pytest.mark.thinned(2)
def test_the_verdict_on_a_simulated_device_is_true(workload):
    assert workload.loop is not None
    loop = workload.loop
    truth = loop.truth()
    report = checked(loop)
    assert report.verdict in accepted(workload, truth)
    # One interval of twenty may miss, but by no more than this.
    assert 0.98 * report.speedup_bound.low <= truth <= 1.02 * report.speedup_bound.high


@pytest.mark.parametrize(
    ("kernels", "host_s", "launches", "lost"),
    [
        ((0.0005,), 0.002, 20, 0.03),  # tiny kernels: the host gives out 40 ms, the device does 10
        ((0.002,), 0.002, 20, 0.0),  # just as quick
        ((0.0002, 0.0018), 0.001, 20, 0.0),  # of two steps in turn one is launch-bound: 20 + 36
    ],
)
def test_what_a_step_loses_to_launches(kernels, host_s, launches, lost):
    report = checked(Loop((0.001,), kernels, launches=launches, host_s=host_s))
    assert report.verdict == "step-bound"
    assert report.stalls["launch"].estimate == pytest.approx(lost, abs=2e-3)
    assert any("launch less" in said for said in report.advice) == (lost > 0)


@pytest.mark.parametrize(
    ("load_s", "slowed", "verdict"),
    [(0.06, 1.5, "contention-bound"), (0.2, 1.5, "input-bound"), (0.2, 1.0, "input-bound")],
)
def test_workers_that_slow_the_launching_thread_down_are_a_finding_under_any_verdict(
    load_s, slowed, verdict, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    report = checked(Loop((load_s,), (0.01,), workers=2, host_s=0.02, slowed=slowed))
    assert report.verdict == verdict
    assert [one.name for one in report.findings] == ["contention"] * (slowed > 1)
    for finding in report.findings:
        assert finding.gain.estimate == pytest.approx(0.01, rel=0.1)
        assert re.search(r"2 workers and the step share \d+ cores: `dataloaders", finding.message)
        assert " in place of 1000 leaves them some" in finding.message
        assert finding.message in " ".join(str(report).split())
        assert "less (" in str(report)


@pytest.mark.parametrize(("queue", "verdict"), [(1, "inconclusive"), (64, "step-bound")])
def test_another_loaders_wait_is_no_part_of_the_step_unless_the_device_hides_it(queue, verdict):
    """The step alone holds that wait as well: only where the device hid it is nothing lost."""
    other_s = 0.045 if queue == 1 else 0.01
    loader, step = Loop((0.001,), (0.03,), queue=queue).made(VirtualTime())
    check = Check(loader, budget_s=15, clock=step.clock)
    for batch in check:
        step.device.time.sleep(other_s)
        check.waited_elsewhere("the other", other_s)
        step(batch)
    report = check.report()
    assert report.verdict == verdict
    assert any(f"{other_s * 1e3:.1f} ms" in one and "the other" in one for one in report.notes)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_that_are_short_are_hidden_by_the_device_as_in_training(workers):
    """A block that began with an idle device would show each epoch's first batch."""
    loop = Loop((0.1,), (0.2,), host_s=0.03, workers=workers, queue=8)
    loader, step = loop.made(VirtualTime())
    loader.batches = 5
    report = check_bottleneck(loader, step, budget_s=30, clock=step.clock)
    assert report.verdict == "step-bound"
    assert report.speedup_bound.estimate == pytest.approx(1.0, abs=0.005)


def test_a_dropped_batch_that_waits_for_another_worker_is_no_contention():
    """One of two workers is slow: the other's batches are ready, but not next in order."""
    loop = Loop((0.09, 0.001), (0.02,), host_s=0.015, workers=2, queue=2)
    report = checked(loop)
    assert report.verdict == "input-bound"
    assert report.speedup_bound.estimate == pytest.approx(loop.truth(), rel=0.02)
    assert report.stalls["contention"].estimate == pytest.approx(0.0, abs=1e-3)


def test_a_round_in_which_steps_become_too_slow_for_an_arm_goes_on():
    """Of steps that wait for a batch of 9 s, few fit into the budget: "contended" is left out."""
    report = checked(Loop((*[0.15] * 9, 9.0), (0.3,), host_s=0.03, workers=1, queue=8))
    assert report.verdict in ("input-bound", "inconclusive")


def test_every_batch_is_taken_on_the_loops_own_thread():
    """Also those that are dropped beside the step: next() runs the loader's sampler."""
    loop = Loop((0.03,), (0.02,), workers=1)
    loader, step = loop.made(VirtualTime())
    taken = []

    class Told(type(iter(loader))):
        def __next__(self):
            taken.append(threading.current_thread())
            return super().__next__()

    check = Check(loader, budget_s=5, clock=step.clock, iterate=lambda: Told(loader))
    steps = sum(step(batch) is None for batch in check)
    assert "contended" in check.report().seconds_per_batch
    assert set(taken) == {threading.current_thread()}
    assert len(taken) < steps


def test_no_block_waits_for_the_device_but_at_its_end():
    """A wait in or before a block would show the loading that the device's work hides."""
    loader, step = Loop((0.06,), (0.1,), host_s=0.015).made(VirtualTime())
    done = []

    def watched(batch):
        done.append("step ")
        step(batch)

    check_bottleneck(loader, watched, budget_s=10, clock=noting(step.clock, done))
    after_warm_up = "".join(done[done.index("mark ") - 2 :])
    # Settled by two steps at least; refilled after a wait that found the device idle.
    block = "(step ){2,}mark ((step )+mark )+wait (wait )?"
    launched = "wait mark step mark wait "  # after the last round, with the device kept busy
    assert re.fullmatch(f"({block})+({launched})+", after_warm_up)


class TestClocks:
    def test_what_workers_and_other_processes_use_is_known_apart(self):
        before = HostClock().held_up()
        data = MapDataset(lambda index: burn("work", 0.01) or index, 100)
        batches = iter(DataLoader(data, num_workers=1))
        for _ in range(20):
            next(batches)
        used = cpu_seconds(worker.pid for worker in batches._workers)
        after = HostClock().held_up()
        assert used >= 0.1
        assert after[0] >= before[0]
        assert after[1] - before[1] >= 0.05  # workers are other processes, in ticks of 10 ms

    @pytest.mark.gpu
    def test_cuda_is_timed_by_events_on_its_current_stream(self):
        device = torch.device("cuda", torch.cuda.current_device())
        clock = clock_of([device])
        assert isinstance(clock, DeviceClock)
        matrix = torch.zeros(2048, 2048, device=device)
        with torch.cuda.stream(torch.cuda.Stream()):
            first = clock.mark()
            for _ in range(50):
                matrix = matrix @ matrix
            last = clock.mark()
        began = clock.now()
        clock.wait()
        assert clock.seconds(first, last) > 0
        assert clock.now() >= began


# Resident batches: how many are kept, and where the step wants them


def filled(*batches):
    pool = resident.Pool()
    for batch in batches:
        pool.keep(batch)
    pool.place([None])  # of one tensor each
    return pool


@pytest.mark.parametrize(("kilobytes", "kept"), [(1, 8), (4, 3), (100, 2)])
def test_as_many_batches_are_kept_as_fit_into_memory_and_at_least_two(kilobytes, kept):
    pool = resident.Pool(most_bytes=36 << 10)
    while pool.wants_more:
        pool.keep(torch.zeros(kilobytes << 10, dtype=torch.uint8))
    assert len(pool) == kept


def test_batches_that_vary_are_replaced_by_later_ones():
    pool = filled(torch.zeros(1), torch.zeros(2))
    for length in range(3, 100):
        pool.record(torch.zeros(length))
    assert len(pool) == pool.room == 64
    lengths = [len(batch) for batch in pool.issue("synthetic", 64)]
    assert sorted(lengths) == list(range(36, 100))


def test_real_blocks_of_varied_shapes_hold_no_batch_and_copy_none_inside_the_clock(monkeypatch):
    """Held pinned ones make the loader pin new memory for each; a copy is no step's time."""
    time, record = VirtualTime(), resident.Pool.record
    done, delivered, held = [], [], []

    def varied():
        for number in itertools.count():
            batch = torch.zeros(1 + number % 7)
            delivered.append(weakref.ref(batch))
            yield batch
            del batch

    def recorded(pool, batch):
        done.append("copy ")
        record(pool, batch)

    def step(batch):
        del batch
        time.sleep(0.01)
        held.append(sum(one() is not None for one in delivered[-50:]))

    monkeypatch.setattr(resident.Pool, "record", recorded)
    check_bottleneck(varied(), step, budget_s=4, clock=noting(HostOn(time), done))
    assert re.search("copy mark (mark )+wait", "".join(done))
    assert not re.search("mark copy", "".join(done))
    assert max(held) <= 2


@pytest.mark.parametrize("fit", [3, 1])
def test_a_full_device_gets_as_many_resident_batches_as_fit(fit, monkeypatch):
    """Two at least; the step's own error is left alone."""
    room = iter(range(fit))

    def moved(pool, batch):
        if next(room, None) is None:
            raise torch.OutOfMemoryError("the device is full")
        return batch.to("meta")

    monkeypatch.setattr(resident.Pool, "_moved", moved)
    pool = filled(*(torch.full((4,), float(value)) for value in range(8)))
    pool.place([torch.device("meta")])
    if fit < 2:
        with pytest.raises(CheckError, match="memory of meta does not hold 2 batches"):
            pool.build()
    else:
        pool.build()
        assert (len(pool), pool.crowded) == (fit, True)
        assert len(pool.issue("synthetic", 5)) == 5


@pytest.mark.parametrize(("fit", "kept"), [(8, 8), (4, 4), (1, 2)])
def test_of_batches_on_a_device_as_many_are_kept_as_fit(fit, kept, monkeypatch):
    """Twice a batch has to be free, for the step; two are kept without asking."""
    pool = resident.Pool()
    accelerator = {
        "get_memory_info": lambda device: ((fit - len(pool)) * 1024, 2**30),
        "memory_reserved": lambda device: 0,
        "max_memory_allocated": lambda device: 0,
    }
    for name, function in accelerator.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    with FakeTensorMode():
        for _ in range(8):
            if pool.wants_more:
                pool.keep(torch.zeros(512, dtype=torch.uint8, device="cuda"))
    assert (len(pool), pool.crowded) == (kept, kept < 8)


def test_placement_sees_which_leaves_the_step_copies_away():
    batch = {"x": torch.zeros(2, 3), "lengths": torch.tensor([1, 2]), "y": torch.zeros(2)}
    static = torch.empty(2, device="meta")
    watched = placement.Placement()
    watched.watch(batch)
    with watched:
        batch["x"].to("meta", non_blocking=True)
        static.copy_(batch["y"])
        batch["x"].double()  # a copy, but not to another device
    assert watched.devices == [torch.device("meta"), None, torch.device("meta")]


@pytest.mark.gpu
def test_pinned_batches_stay_pinned_in_the_host_pool():
    pool = resident.Pool()
    pool.keep(torch.zeros(4).pin_memory())
    pool.place([torch.device("cuda", 0)])
    assert pool.issue("host", 1)[0].is_pinned()
    assert pool.issue("synthetic", 1)[0].is_cuda
