"""One block of the check: which batches the step gets, and what is measured of them.

On a played time, in halves of seconds that add up exactly.
"""

import math
import time

import pytest
import torch

from bench.check.played import Device, HostOn, PlayedClock, PlayedLoader, VirtualTime
from dataloaders.bottleneck.blocks import (
    ARMS,
    Blocks,
    BlockTimes,
    Feed,
    Interval,
    Numbers,
    Plan,
    Pool,
    Schedule,
    Segment,
)

PLAN = Plan(refill=0, warm_up=2, batches=7, segment=3, most_s=99.0)


class Planned(Schedule):
    """Plans this block each time, and keeps the numbers that it was asked with."""

    block, asked = PLAN, None

    def plan(self, arm, numbers):
        self.asked = numbers
        return self.block


class Loop:
    """A loop on a played time, with eight resident batches or those given."""

    def __init__(self, loads=(0.25,), *, plan=PLAN, budget_s=30.0, sizes=(4,), device=False, **how):
        self.time = VirtualTime()
        self.device = Device(self.time)
        self.clock = PlayedClock(self.device) if device else HostOn(self.time)
        batches = [torch.zeros(size) for size in sizes]
        loader = PlayedLoader(self.time, loads, made=batches, **how)
        pool = Pool()
        for batch in batches if len(batches) > 1 else batches * 8:
            pool.keep(batch)
        pool.place([None])
        pool.build()
        self.schedule = Planned(budget_s, asynchronous=device)
        self.schedule.block = plan
        feed = Feed(loader, host=self.clock)
        self.blocks = Blocks(feed, pool, self.schedule, self.clock, self.clock)
        self.given = 0

    def run(self, arm, *steps, left_s=10.0):
        """Return the block of an arm: each step takes so many seconds, or is called."""
        (arm,) = (one for one in ARMS if one.name == arm)
        return self.taken(self.blocks.run(arm, left_s), *steps)

    def taken(self, running, *steps):
        """Return what ``running`` returns, and count its batches."""
        self.given = 0
        while True:
            try:
                batch = next(running)
            except StopIteration as ended:
                return ended.value
            step = steps[self.given % len(steps)]
            self.given += 1
            if callable(step):
                step(batch)
            else:
                self.time.sleep(step)

    def has_cycles_of_three(self):
        for number in range(9):
            if number % 3 == 2:
                self.blocks.rhythm.stepped()
            self.blocks.rhythm.asked(0.5)

    def waits_elsewhere(self, batch):
        """A step of half a second after a wait of an eighth for another loader."""
        self.blocks.log.waited_elsewhere("other", 0.125)
        self.time.sleep(0.625)

    def is_left(self, batch):
        """A step of half a second in which the loop does something else."""
        self.blocks.interrupted = True
        self.time.sleep(0.5)


def test_what_is_measured_of_each_arm(monkeypatch):
    loop = Loop()
    blocks = loop.blocks
    assert (blocks.patience_s, blocks.cycle) == (5.0, 1)
    assert Loop(budget_s=1.0).blocks.patience_s == 0.5
    monkeypatch.setattr(blocks.feed, "busy", lambda: 0.5)
    segments = (Segment(2.25, 3, waited=0.75),) * 2
    assert loop.run("real", 0.5) == BlockTimes(4.5, 6, segments, (0.5,), busy=0.5)
    assert loop.given == 8
    assert math.isnan(loop.schedule.asked.step_s)
    assert loop.schedule.asked.ready == 0
    monkeypatch.setattr(time, "process_time", lambda: 3 * loop.time.now())
    segments = (Segment(1.5, 3),) * 2
    assert loop.run("synthetic", 0.5) == BlockTimes(3.0, 6, segments, (0.5,))
    assert loop.schedule.asked == Numbers(10.0, 0.75, 0.75, ready=-1)
    assert (loop.given, blocks.step_cores) == (8, 3.0)
    blocks.lead = (Segment(1.0, 2),)
    assert loop.run("synthetic", 0.5).segments == segments
    assert loop.schedule.asked == Numbers(10.0, 0.5, 0.75, ready=-1, steady=True)
    assert loop.run("real", 0.5).segments[:2] == (Segment(1.0, 2), Segment(2.25, 3, waited=0.75))
    assert (blocks.lead, blocks.real_s, blocks.step_s) == ((), 5.5 / 8, 0.5)


def test_what_is_noted_of_a_segment():
    plan = Plan(refill=0, warm_up=1, batches=8, segment=2, most_s=99.0)
    loop = Loop(plan=plan, sizes=(4, 8, 6), batches=5)
    blocks = loop.blocks
    steps = [0.5, 0.5, 0.5, loop.waits_elsewhere, 0.5, 0.5, 0.5, 0.5, loop.is_left]
    took = loop.run("real", *steps)
    assert took.segments == (
        Segment(1.5, 2, 0.5, nbytes=56, new_shape=True),
        Segment(1.625, 2, 0.5, elsewhere=0.125, nbytes=48),
        Segment(1.5, 2, 0.5, nbytes=48, starts_epoch=True),
    )
    assert took.warm_up == ()
    assert (loop.schedule.interrupted, blocks.interrupted, loop.schedule.length) == (True, False, 5)
    assert [len(batch) for batch in blocks.pool.issue("synthetic", 4)] == [4, 8, 6, 4]
    assert blocks.log.given == 9
    assert list(blocks.log.waits) == [0.25] * 7
    assert [one.step for one in blocks.log.timeline()["real"]] == [0.5, 0.5, 0.625, *[0.5] * 4]
    assert loop.run("real", loop.is_left) is None
    assert loop.schedule.asked == Numbers(
        *(10.0, took.per_batch, took.per_batch), ready=-1, pool=4, varied=True, interrupted=True
    )
    loop.run("synthetic", 0.5)
    blocks.pool.build()
    assert len(blocks.pool) == 5  # the first batch of each real block is kept


def test_unmeasured_steps_count_without_waits_for_other_loaders():
    loop = Loop()
    steps = [0.5, loop.waits_elsewhere, *[0.5] * 6]
    for _ in range(2):
        assert loop.run("synthetic", *steps).warm_up == (0.5,)
    steps[1] = loop.is_left
    assert loop.run("synthetic", *steps).warm_up == ()
    for step, is_left in ((loop.is_left, True), (0.5, False)):
        assert loop.taken(loop.blocks.give(torch.zeros(4)), step) is is_left


def test_a_block_begins_with_a_cycle_or_after_two():
    """After two cycles, since none is seen to begin."""
    loop = Loop(plan=Plan(refill=0, warm_up=2, batches=6, segment=3, most_s=99.0, cycle=3))
    loop.has_cycles_of_three()
    assert loop.run("synthetic", 0.5) == BlockTimes(3.0, 6, (Segment(1.5, 3),) * 2)
    assert (loop.given, loop.schedule.asked.cycle, loop.blocks.cycle) == (14, 3, 3)


def test_a_warm_up_ends_early_if_its_steps_become_slow():
    for step_s, warm_up in ((0.5, 3), (3.0, 2)):
        loop = Loop(plan=Plan(refill=0, warm_up=9, batches=9, segment=1, most_s=2.0))
        for _ in range(2):
            assert (loop.run("real", step_s).steps, loop.given) == (1, warm_up + 1)


def test_each_resident_batch_is_written_into_once():
    """Also if a cycle would begin later."""
    loop = Loop()
    loop.has_cycles_of_three()

    def write(batch):
        batch.add_(1)
        loop.time.sleep(0.5)

    def is_restored():
        assert not loop.blocks.pool.written()
        return not any(batch.any() for batch in loop.blocks.pool.issue("synthetic", 8))

    assert loop.run("synthetic", write) is None  # noticed now
    assert (loop.blocks.writes, math.isnan(loop.blocks.step_s), is_restored()) == (True, True, True)
    loop.schedule.block = Plan(0, warm_up=6, batches=9, segment=1, most_s=99.0, writes=True)
    assert loop.run("synthetic", write) == BlockTimes(2.0, 4, (Segment(0.5, 1),) * 4)
    assert (loop.given, loop.schedule.asked.writes, is_restored()) == (8, True, True)
    assert loop.run("real", 0.5).steps == 9
    assert loop.given == 15


def test_what_others_hold_up_and_how_busy_workers_are():
    loop = Loop((1 / 256,), plan=Plan(refill=0, warm_up=0, batches=7, segment=1, most_s=99.0))
    blocks = loop.blocks
    held = [(1.0, 2.0), (1.5, 4.0), (2.0, 4.0), (2.125, 9.0), (2.0, 2.0), (3.0, 2.0)]
    blocks.held_up = iter(held).__next__
    blocks.feed.cpu_s = iter([3.0, 4.75, 5.0, 5.0, 5.0, 6.0]).__next__
    blocks.feed.busy = iter([1.0, 0.5, 0.0, 1.0, 0.5, 0.75]).__next__  # of blocks of 55 ms
    assert (loop.run("real", 1 / 256).held, blocks.real_s) == (0.25, 1 / 128)
    took = loop.run("real", 1 / 256)
    assert (took.held, took.busy) == (0.125, 0.75)
    assert loop.run("synthetic", 1 / 256).held == 0.0


def test_the_device_gets_as_much_work_as_it_had_before():
    loop = Loop(plan=Plan(refill=3, warm_up=1, batches=2, segment=2, most_s=99.0), device=True)

    def step(batch):
        loop.time.sleep(0.25)
        loop.device.launch(1.0)

    loop.device.launch(9.0)
    assert loop.run("real", step).segments == (Segment(2.0, 2, 0.5),)
    assert loop.given == 6
    waits = []
    loop.blocks.feed.wait_until_idle = lambda *seconds: waits.append(seconds)
    loop.run("real", step)
    assert (loop.schedule.asked.lag_s, waits) == (4.0, [(5.0, 1.0)])


@pytest.mark.parametrize(
    ("budget_s", "cycle", "given"),
    [(300.0, 1, 8), (300.0, 2, 16), (12.5, 1, 2), (12.0, 1, 0), (24.0, 2, 0)],
)
def test_steps_that_are_launched_at_once(budget_s, cycle, given):
    """The host takes a quarter of a second to launch an eighth."""
    loop = Loop(budget_s=budget_s, device=True)
    blocks = loop.blocks

    def step(batch):
        for _ in range(2):
            loop.time.sleep(0.125)
            loop.device.launch(0.0625)

    assert loop.taken(blocks.launched(), step) is None  # no step was measured
    blocks.step_s, blocks.cycle = 0.25, cycle
    found = loop.taken(blocks.launched(), step)
    assert found == (Interval(0.125, 0.125, 0.125) if given else None)
    assert loop.given == given
    blocks.writes = True
    assert loop.taken(blocks.launched(), step) is None
    assert loop.given == 0
    host = Loop(budget_s=budget_s)
    host.blocks.step_s = 0.25
    assert host.taken(host.blocks.launched(), 0.25) is None
