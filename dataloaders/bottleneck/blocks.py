"""Run one block of an arm: yield batches to the loop that runs the step, and mark the clock.

    queue ── warm-up ── to a cycle's start ── mark  segment  mark  segment  mark ── wait
    device   the arm's own steady state            └── seconds, waits in next() ──┘

Nothing waits for the device before or within the measured part: a loop that waits could not load
while the device works, as training does. Real blocks go through the loader's epochs one after the
other, as training does.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Generator, Iterator
from typing import Any, TypeAlias

import torch

from dataloaders.batches.tree import Batch, leaves, nbytes
from dataloaders.bottleneck.arms import ARMS, Arm, Take
from dataloaders.bottleneck.resident import Pool
from dataloaders.bottleneck.rhythm import Rhythm
from dataloaders.bottleneck.schedule import WARM_UP_STEPS, Numbers, Plan, Schedule
from dataloaders.bottleneck.steps import StepLog
from dataloaders.measuring.clocks import Clock, HostTime
from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import BlockTimes, Interval, Segment, block_of, mean_of

Block: TypeAlias = Generator[Batch, None, BlockTimes | None]
"""Yields batches to the step; returns what it took, or None if the block must be run again."""

_QUEUES_EVERY_S = 0.02  # asking how full the queues are takes some microseconds
_LAUNCH_SHARE = 0.1  # of the budget
_LONGEST = 0.3  # of the budget: no block is planned to take as long, unless each step does
_LAUNCHES, _DELAY = 8, 1.5  # steps launched at once; the delay, in steps


class Blocks:
    """Runs the blocks of one loop.

    Attributes:
        feed, pool, schedule: the loader's batches, the resident ones, the lengths of blocks.
        real_s, step_s: seconds of a step on real and on resident batches, in the last block.
        ready: batches that were ready when the last real block ended; None if not countable.
        patience_s: the longest wait for workers.
        log: what single steps took.
        cycle: batches of an accumulation cycle, in the last block.
        writes: whether the step writes into its batch.
        step_cores: cores that this process keeps busy during a step.
        lead: real steps with which the next real block begins.
        unmeasured: real steps before the first marks.
        lost_s: seconds that training would have waited for slow batches, at least, where no real
            block measured it.
        now: returns the host's time in seconds.
        interrupted: whether the loop did something else since its last batch.
    """

    def __init__(
        self, feed: Feed, pool: Pool, schedule: Schedule, clock: Clock, host: HostTime
    ) -> None:
        self.feed: Feed = feed
        self.pool: Pool = pool
        self.schedule = schedule
        self.clock = clock
        self.log, self.rhythm = StepLog(), Rhythm()
        self.real_s = self.step_s = math.nan
        self.ready: int | None = 0
        self.patience_s = max(0.5, schedule.budget_s / 6)
        self.cycle = 1
        self.writes = self.interrupted = False
        self.step_cores = 1.0
        self.lead: tuple[Segment, ...] = ()
        self.unmeasured, self.lost_s = 0, 0.0
        self.now = host.now
        self.held_up = host.held_up
        self._lag_s = 0.0  # of the device's work, left when the last real block ended
        self._warm_up: list[float] = []  # seconds of unmeasured steps of the running block
        self._shapes: set[tuple[torch.Size, ...]] = set()

    @property
    def arms(self) -> list[Arm]:
        """Return the arms that this loop has, in the order of a round."""
        return [arm for arm in ARMS if arm.exists(self)]

    def give(self, batch: Batch) -> Generator[Batch, None, bool]:
        """Yield one batch that is not measured; return whether the loop was interrupted."""
        if self.pool.varied:
            self._is_new_shape(batch)
        self.log.given += 1
        given, elsewhere = self.now(), self.log.elsewhere_s
        yield batch
        step_s = self.now() - given
        interrupted = self._interruption(step_s)
        if not interrupted:
            self._warm_up.append(step_s - (self.log.elsewhere_s - elsewhere))
        return interrupted

    def run(self, arm: Arm, left_s: float) -> Block:
        """Yield the batches of one block of ``arm``."""
        self.schedule.learn(self.feed.length, self.feed.in_flight)
        self.rhythm.update()
        plan = self.schedule.plan(arm.name, self._numbers(left_s))
        self.cycle = plan.cycle
        self._warm_up.clear()
        began, (warm_up, batches) = self.now(), (plan.warm_up, plan.batches)
        if plan.writes and arm.name != "real":  # each batch is written into once, then restored
            warm_up = min(warm_up, len(self.pool) // 2)
            batches = min(batches, len(self.pool) - warm_up)
        if plan.refill:
            # Before the queue is brought to its level, since workers go on during these steps.
            idle = self.now()
            self.feed.wait_until_idle(self.patience_s, self.real_s)
            self._waited(self.now() - idle)
            self.clock.wait()
            for batch in self.pool.issue("synthetic", plan.refill):
                yield from self.give(batch)
        begin, real = self.now(), arm.name == "real"
        arm.begin(self)
        if not real:  # bringing the queue to a level takes as long as it takes
            self._waited(self.now() - begin)
        align = 0 if plan.writes else 2 * plan.cycle
        take, given = arm.take(self, warm_up + align + batches), self.log.given

        def unmeasured() -> Batch:
            asked = self.now()
            batch = take()
            self._waited(self.now() - asked - self._lag_s)
            return batch

        yield from self._warmed_up(arm, unmeasured, warm_up, plan, began)
        for _ in range(align):
            if self.rhythm.aligned:
                break
            yield from self.give(unmeasured())
        self.unmeasured += (self.log.given - given) * real
        lead = self.lead if real else ()
        took = yield from self._measured(arm, take, plan, batches, began, lead)
        if not plan.writes and self.pool.written():
            self.writes = True
            self.pool.restore()
            return None
        if plan.writes:
            self.pool.restore()
        if took is None:
            return None
        if real:
            self.real_s, self.lead = took.per_batch, ()
            self.ready = self.feed.ready()
        elif arm.name == "synthetic":
            self.step_s = took.per_batch
        return took

    def launched(self) -> Generator[Batch, None, Interval | None]:
        """Yield steps that run on the device once all of them are launched; return their seconds.

        The device is delayed first, for longer than the host needs, so that it never waits for the
        host. Returns None if the clock cannot delay it, if the step writes into its batch, or if
        two steps would take a tenth of the budget.
        """
        delay = getattr(self.clock, "delay", None)
        if delay is None or self.writes or math.isnan(self.step_s):
            return None
        delay_s = _DELAY * self.step_s * self.cycle
        turn_s = delay_s + self.step_s * self.cycle
        count = min(_LAUNCHES, int(_LAUNCH_SHARE * self.schedule.budget_s / turn_s))
        took: list[float] = []
        for _ in range(count if count > 1 else 0):
            self.clock.wait()
            delay(delay_s)
            first = self.clock.mark()
            for batch in self.pool.issue("synthetic", self.cycle):
                yield from self.give(batch)
            last = self.clock.mark()
            self.clock.wait()
            took.append(self.clock.seconds(first, last) / self.cycle)
        return mean_of(took) if took else None

    def _warmed_up(
        self, arm: Arm, take: Take, count: int, plan: Plan, began: float
    ) -> Iterator[Batch]:
        keeps = arm.name == "real" and self.pool.varied and not self.writes
        for number in range(1, count + 1):
            batch = take()
            if keeps:
                # Copied outside the measured part. If a block held pinned batches, the loader would
                # have to pin new memory for each one.
                self.pool.record(batch)
            yield from self.give(batch)
            if number >= WARM_UP_STEPS and self.schedule.late(
                number, self.now() - began, plan.most_s
            ):
                return

    def _measured(
        self,
        arm: Arm,
        take: Take,
        plan: Plan,
        batches: int,
        began: float,
        lead: tuple[Segment, ...],
    ) -> Block:
        """Yield ``batches`` in segments; return ``lead`` and the segments without interruption."""
        steps = min(plan.segment, batches)
        count = batches // steps
        feed, log, now, mark = self.feed, self.log, self.now, self.clock.mark
        real, varied = arm.name == "real", self.pool.varied
        before, used, asked_queues = self.held_up(), feed.cpu_s(), -math.inf
        started, computed = now(), time.process_time()
        busy, marks = list[float](), [mark()]
        facts: list[tuple[Any, ...] | None] = []  # None: the loop was interrupted in this segment
        most_s = _LONGEST * self.schedule.budget_s if self.schedule.alone else math.inf
        for number in range(1, count + 1):
            waited, elsewhere, size, epoch = 0.0, log.elsewhere_s, 0, feed.epoch
            new_shape = interrupted = False
            if real and now() > asked_queues + _QUEUES_EVERY_S:
                asked_queues = now()
                busy.append(feed.busy())
            for taken in range(1, steps + 1):
                begin = now()
                batch = take()
                given = now()
                waited += given - begin
                if real:
                    log.waited(given - begin, feed)
                else:
                    self._waited(given - begin - self._lag_s)
                if varied:
                    size += nbytes(batch)
                    new_shape = self._is_new_shape(batch) or new_shape
                log.given += 1
                yield batch
                done = now()
                if self._interruption(done - given):
                    interrupted = True
                else:
                    log.step(arm.name, begin, given, done)
                if done - started > most_s and taken % plan.cycle == 0:
                    break  # steps became far slower: this segment alone would exceed the budget
            marks.append(mark())
            fact = (taken, waited, log.elsewhere_s - elsewhere, size, new_shape, feed.epoch > epoch)
            facts.append(None if interrupted else fact)
            if number < count and self.schedule.late(number, now() - began, plan.most_s):
                break
        if arm.name == "synthetic" and now() > started:
            self.step_cores = (time.process_time() - computed) / (now() - started)
        held, others = (b - a for a, b in zip(before, self.held_up(), strict=True))
        held = max(0.0, min(held, others - (feed.cpu_s() - used)))
        begin = now()
        self.clock.wait()
        lag_s = now() - begin
        if real:
            self._lag_s = lag_s
        kept = [
            Segment(self.clock.seconds(first, last), *fact)
            for (first, last), fact in zip(itertools.pairwise(marks), facts, strict=True)
            if fact is not None
        ]
        if not kept:
            return None
        waits = sum(one.elsewhere for one in kept) / sum(one.steps for one in kept)
        asynchronous = self.schedule.asynchronous
        if asynchronous and lag_s >= waits:
            # The device always had work, which hid the waits for other loaders.
            kept = [one._replace(elsewhere=0.0) for one in kept]
        alike = plan.cycle == 1 and not (asynchronous or self.writes or varied)
        warm_up = tuple(self._warm_up[1:]) if alike else ()  # the first follows another arm
        busy_share = statistics.fmean(busy) if busy else 1.0
        return block_of([*lead, *kept], warm_up=warm_up, held=held, busy=busy_share)

    def _waited(self, seconds: float) -> None:
        """Note an unmeasured wait for the loader, without what a device's work hides of it.

        If the step is the limit, the batches in flight are made within as many steps. What takes
        longer is a slow batch, for which training would have waited as well.
        """
        feed, step_s = self.feed, self.real_s if math.isnan(self.step_s) else self.step_s
        if feed.countable and feed.taken > feed.in_flight:  # not while workers start
            self.lost_s += max(0.0, seconds - feed.in_flight * step_s)

    def _interruption(self, step_s: float) -> bool:
        """Note a step of ``step_s`` seconds; return whether the loop did something else in it."""
        interrupted, self.interrupted = self.interrupted, False
        if interrupted:
            self.schedule.interrupted = True
        self.rhythm.asked(0.0 if interrupted else step_s)
        return interrupted

    def _numbers(self, left_s: float) -> Numbers:
        step_s = self.real_s if math.isnan(self.step_s) else self.step_s
        return Numbers(
            left_s=left_s,
            step_s=step_s,
            real_s=self.real_s,
            cycle=self.rhythm.cycle,
            ready=-1 if self.ready is None else self.ready,
            lag_s=self._lag_s,
            pool=len(self.pool),
            writes=self.writes,
            varied=self.pool.varied,
            ahead=self.feed.ahead,
            steady=bool(self.lead),
            interrupted=self.schedule.interrupted,
        )

    def _is_new_shape(self, batch: Batch) -> bool:
        shapes = tuple(leaf.shape for leaf in leaves(batch))
        if shapes in self._shapes:
            return False
        self._shapes.add(shapes)
        return True
