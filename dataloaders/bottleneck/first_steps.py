"""Run the loop's first steps until they are steady: no block is measured, but every wait is.

step step step … steady     keep a few batches, and notice the devices that the step uses
short first epoch           the check may end here, if the waits of its steps support a verdict
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import suppress

import torch

from dataloaders.batches.tree import Batch, describe, leaves
from dataloaders.bottleneck.blocks import Blocks
from dataloaders.bottleneck.evidence.verdict import HELD_UP, Analysis
from dataloaders.bottleneck.placement import Placement, resident_everywhere
from dataloaders.bottleneck.rhythm import WarmUp
from dataloaders.bottleneck.schedule import WARM_UP_STEPS
from dataloaders.errors import CheckError
from dataloaders.findings import Watch
from dataloaders.measuring.clocks import Clock, clock_of
from dataloaders.measuring.intervals import BlockTimes, Segment, block_of

_BUDGET_SHARE = 0.15
_LONGEST = 3  # times this share, if steps never agree or a cycle is long
_EPOCH_SHARE = 0.3  # of the budget, that a first epoch may take
_MOST_KEPT = 1000
_UNSTEADY = 4  # first steps: slower than the others, or on batches that were ready before
_TAKEN_BEFORE = 2  # batches of an epoch that a script's loop got before it was taken over
_AS_SLOW = 0.5  # of the seconds of a batch of the first epoch


class FirstSteps:
    """Runs the first steps of a loop.

    Attributes:
        placement: what was seen of the step's copies; nothing without an accelerator.
        batch: one batch, described in a line.
        steps, seconds: how many first steps ran, and how long they took.
        segments: these steps one by one, the first 1,000 of them.
    """

    def __init__(
        self,
        blocks: Blocks,
        watch: Watch,
        *,
        clock: Clock | None,
        device: torch.device | None,
        only_epoch: bool,
    ) -> None:
        self.placement = Placement()
        self.batch = ""
        self.steps = 0
        self.seconds = 0.0
        self.segments: list[Segment] = []
        self._computed_s = self._stepped_s = 0.0  # of steps: on all cores, and by the clock
        self._resident: list[Segment] = []  # the last steps of a short first epoch
        self._blocks, self._watch, self._now = blocks, watch, blocks.now
        self._feed, self._pool, self._schedule = blocks.feed, blocks.pool, blocks.schedule
        self._clock = clock
        self._device = device
        self._only_epoch = only_epoch
        self._budget_s = blocks.schedule.budget_s
        self._steady = WarmUp(self._budget_s * _BUDGET_SHARE)

    @property
    def clock(self) -> Clock:
        """Return the clock given, or that of the devices that the step computes on."""
        return self._clock or clock_of(self._devices_in_use())

    @property
    def spent_s(self) -> float:
        """Return the part of the budget that the first steps used, without compilation."""
        return min(self.seconds, self._budget_s * _BUDGET_SHARE)

    @property
    def usual_s(self) -> float:
        """Return the mean seconds of a step and its wait, without compilation."""
        return max(1e-6, (self.seconds - self._steady.excess_s) / self.steps)

    def run(self, analysis: Callable[[], Analysis]) -> Generator[Batch, None, bool]:
        """Yield batches; return whether the first epoch has ended and supports a verdict.

        The clock waits for the device after each step, so that it shows when steps are steady.
        """
        feed, pool, blocks, steady = self._feed, self._pool, self._blocks, self._steady
        held = blocks.held_up()
        last = -1  # batches left in the first epoch when its verdict is computed
        while True:
            if feed.epoch == 0 and feed.left <= last and self.waits_are_lost:
                if (yield from self._end_epoch(last - _TAKEN_BEFORE, held, analysis)):
                    return True
                feed.close()
            begin = self._now()
            host = feed.next()
            if not self.steps:
                last = self._first_batch()
            if pool.wants_more:
                pool.keep(host)
            self.steps += 1  # counted first: a consumer may never come back from its step
            self.batch = self.batch or describe(host)
            given, computed = self._now(), time.process_time()
            blocks.log.waited(given - begin, feed)
            with self._watch.step(self.steps):
                interrupted = yield from self._watched(host)
            self.clock.wait()
            if interrupted:
                continue
            done = self._now()
            blocks.log.step("real", begin, given, done)
            steady.stepped(done - given, done - begin)
            if len(self.segments) < _MOST_KEPT:
                self.segments.append(Segment(done - begin, 1, given - begin))
            self.seconds += done - begin
            if self.steps > _UNSTEADY:
                self._computed_s += time.process_time() - computed
                self._stepped_s += done - given
                blocks.step_cores = self._computed_s / max(1e-9, self._stepped_s)
            if steady.due and self._schedule.agree(float(self._over()))[0]:
                return False

    def _first_batch(self) -> int:
        """Note what the first batch shows of the loader; return how many last batches to keep."""
        feed = self._feed
        self._steady.fewest = 2 * feed.in_flight
        self._schedule.learn(feed.length, feed.in_flight)
        if feed.length and self._schedule.short_epochs:
            self._pool.most_batches = feed.length  # one epoch, its short last batch included
        elif feed.length and self._only_epoch:
            return _TAKEN_BEFORE + (max(4, min(8, feed.length // 8)) if feed.parallel else 0)
        return -1

    def _over(self) -> bool:
        blocks, feed, steady = self._blocks, self._feed, self._steady
        blocks.rhythm.update()
        if not (self._pool.placed and steady.over(blocks.rhythm.cycle, self._pool.wants_more)):
            return False
        late = self.seconds - steady.excess_s > _LONGEST * _BUDGET_SHARE * self._budget_s
        if not (blocks.rhythm.known or late):
            return False
        if not (self._only_epoch and self.waits_are_lost and feed.epoch == 0):
            return True
        # This epoch may be the only one: if the rest of it is short, it is stepped through, too.
        rest_s = feed.left * self.seconds / self.steps
        return rest_s > _EPOCH_SHARE * self._budget_s or self._schedule.short_epochs

    def _watched(self, batch: Batch) -> Generator[Batch, None, bool]:
        """Yield one of the first batches; notice to which devices the step copies it."""
        blocks, pool = self._blocks, self._pool
        if self._device is not None and not pool.placed:
            pool.place(resident_everywhere(batch, self._device))
        if not torch.accelerator.is_available():
            if not pool.placed:
                pool.place([None for _ in leaves(batch)])
            return (yield from blocks.give(batch))
        if self.steps > 2 * WARM_UP_STEPS:
            return (yield from blocks.give(batch))  # seen enough
        # A consumer that fetches ahead copies this batch only after it has asked for the next one.
        self.placement.watch(batch)
        try:
            with self.placement:
                return (yield from blocks.give(batch))
        finally:
            devices = self.placement.devices
            seen = any(device is not None for device in devices)
            if not pool.placed and (seen or self.steps > WARM_UP_STEPS):
                pool.place(devices)

    def _devices_in_use(self) -> list[torch.device]:
        """Return the devices that the step was seen to copy to or compute on."""
        used = {self._pool.device, *self.placement.used}
        on = {device for device in used if device.type not in ("cpu", "meta")}
        if not on and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # The inside of a compiled step is not seen.
            on = {torch.device("cuda", torch.cuda.current_device())}
        return sorted(on, key=str)

    def run_out_epoch(self) -> None:
        """Take the rest of the first epoch without steps, if that is quick.

        A dataset that fills a cache is slow in its first epoch only. If taking the rest is slow,
        the check measures within the first epoch, and the report says so.
        """
        feed = self._feed
        if feed.epoch > 0 or feed.length is None or not feed.running:
            return
        most_s = self._budget_s * _EPOCH_SHARE
        begin, before = self._now(), feed.taken
        with suppress(StopIteration):
            while True:
                feed.take()
                spent = max(1e-9, self._now() - begin)
                rate = (feed.taken - before) / spent
                if spent > 0.1 * most_s and feed.left / rate > most_s - spent:
                    return

    def _end_epoch(
        self, last: int, held: tuple[float, float], analysis: Callable[[], Analysis]
    ) -> Generator[Batch, None, bool]:
        """Yield ``last`` resident batches instead of the epoch's; return whether that is enough.

        It is not enough if other processes held the steps up, or if the next epoch is quicker.
        """
        blocks, now = self._blocks, self._now
        if last:
            self._pool.build()
            self._feed.wait_until_idle(blocks.patience_s, self.usual_s)
            for batch in self._pool.issue("synthetic", last):
                begin = now()
                yield from blocks.give(batch)
                blocks.log.step("synthetic", begin, begin, now())
                self._resident.append(Segment(now() - begin, 1))
            self._pool.restore()
        held_s = min(b - a for a, b in zip(held, blocks.held_up(), strict=True))
        known = analysis()
        if not known.precise or held_s > HELD_UP * self.seconds:
            return False
        if known.verdict == "step-bound":  # unless starting the epoch took long
            waited = sum(one.waited for one in self.segments[:_UNSTEADY])
            return waited <= 0.03 * self.seconds
        return self._as_slow_later()

    def _as_slow_later(self) -> bool:
        """Return whether batches of the next epoch, taken without steps, take about as long."""
        feed, now = self._feed, self._now
        feed.close()
        began, taken = now(), 0
        until = began + _EPOCH_SHARE * self._budget_s
        with suppress(CheckError, StopIteration):  # an iterable that has ended has no next epoch
            while taken < len(self.segments) and now() < until:
                feed.take()
                taken += 1
        first = [one.seconds if feed.parallel else one.waited for one in self.segments]
        return not taken or (now() - began) / taken > _AS_SLOW * statistics.fmean(first)

    @property
    def waits_are_lost(self) -> bool:
        """Whether waits are lost time: there is one process, and no device works meanwhile."""
        return self._schedule.alone and not (self._schedule.asynchronous or self._devices_in_use())

    def steady_block(self) -> BlockTimes | None:
        """Return the steady first steps as a real block; None if their waits are not lost time."""
        if self._pool.varied or self._blocks.log.elsewhere or not self.waits_are_lost:
            return None
        segments = self.segments[1:]
        own = [one.seconds - one.waited for one in segments]
        unlike = [at for at, step_s in enumerate(own) if step_s > 2 * min(own[-3:])]
        segments = segments[max(unlike, default=-1) + 1 :]
        return block_of(segments) if segments else None

    def blocks(self) -> dict[str, BlockTimes]:
        """Return first steps as blocks, for a loop that ended before a block was measured.

        Without workers, waits alone make the gap. With workers, steps on resident batches are
        needed as well.
        """
        real, resident = self.segments[_UNSTEADY:], self._resident[1:]
        if not self._feed.parallel:
            resident = [one._replace(seconds=one.seconds - one.waited, waited=0.0) for one in real]
        if not (real and resident and self.waits_are_lost):
            return {}
        return {"real": block_of(real), "synthetic": block_of(resident)}
