"""One block of an arm: batches for whoever runs the step, and marks of the clock between them.

    begin ── refill ── settle ── to a cycle's start ── mark  lap  mark  lap  mark ── wait
    queue    device    the arm's own steady state      └── seconds, waits in next() ──┘

Nothing waits for the device before or within the measured part: a loop that waits cannot hide
loading behind the device's work, as training does.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from dataloaders.batches.tree import Batch, leaves, nbytes, to_device
from dataloaders.bottleneck.arms import ARMS, Arm, Take
from dataloaders.bottleneck.resident import Pool
from dataloaders.bottleneck.schedule import SETTLE_STEPS, Numbers, Plan, Rhythm, Schedule
from dataloaders.measuring.clocks import Clock, HostTime
from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import Interval, Lap, Step, Timed, mean_of

if TYPE_CHECKING:
    import torch

Block: TypeAlias = Generator[Batch, None, "Timed | None"]
"""Yields batches to the step; returns what it took, or None if the block must be run again."""

_MOST_SPOILT = 3
_LOOKED_AT_S = 0.02  # looking at the queues takes some microseconds
_MOST_WAITS = 100_000
_SLOWEST = 4
_LAUNCHES, _DELAY = 8, 1.5  # launched at once; of the time that a step takes

_KEPT_STEPS = 100  # of each arm, for the timeline


class Blocks:
    """Runs the blocks of one loop."""

    def __init__(
        self, feed: Feed, pool: Pool, schedule: Schedule, clock: Clock, host: HostTime
    ) -> None:
        self.feed: Feed = feed
        self.pool: Pool = pool
        self.clock = clock
        self.rhythm = Rhythm()
        self.step_s = math.nan  # of a step on resident batches, as last measured
        self.real_s = math.nan  # the same on real ones
        # Batches that were ready when the last real block ended, and how far the device was behind.
        self.ready: int | None = 0
        self.lag_s = 0.0
        self.lead: tuple[
            Lap, ...
        ] = ()  # real steps until now, which the next real block goes on with
        self.patience_s = max(0.5, schedule.budget_s / 6)  # the longest wait for workers
        self.early = 0  # blocks that began before the loader's queue was in their arm's state
        self.elsewhere: dict[str, float] = {}  # seconds of waiting for other loaders, by name
        self.given = 0  # batches handed to the step
        self.cycle = 1  # batches of an accumulation cycle, as the last block had it
        self.writes = False  # whether the step writes into its batch
        self.step_cores = 1.0  # that this process computes on during a step
        # What single batches of real blocks were waited for, and (seconds, keys) of the longest.
        self.waits: deque[float] = deque(maxlen=_MOST_WAITS)
        self.slowest: list[tuple[float, Any]] = []
        # The real block of a whole epoch whose consumer left after its last batch.
        self.salvaged: Timed | None = None
        self._schedule = schedule
        self._now = host.now
        self.held_up = getattr(host, "held_up", HostTime().held_up)
        self._held_s = 0.0  # by other processes, in the block under way
        self._busy: list[float] = []  # shares of workers at work in it
        self._elsewhere_s = 0.0
        self._gaps: list[float] = []  # of unmeasured steps of the block under way
        self._copied_at = -math.inf
        # When each of the last steps asked for its batch, got it, had it copied, and was done.
        self._steps: dict[str, deque[tuple[float, float, float, float]]] = {
            arm.name: deque(maxlen=_KEPT_STEPS) for arm in ARMS
        }
        self._shapes: set[tuple[torch.Size, ...]] = set()

    @property
    def behind(self) -> bool:
        """Whether the clock is a device's, which runs behind the host."""
        return self._schedule.behind

    @property
    def arms(self) -> list[Arm]:
        """Return the arms that say something about this loop, in the order of a round."""
        return [arm for arm in ARMS if arm.exists(self)]

    def timeline(self) -> dict[str, tuple[Step, ...]]:
        """Return the last measured steps of each arm; the first one of all begins at 0."""
        kept = {arm: list(steps) for arm, steps in self._steps.items() if steps}
        zero = min((steps[0][0] for steps in kept.values()), default=0.0)
        timeline: dict[str, tuple[Step, ...]] = {}
        for arm, steps in kept.items():
            rows = []
            for begin, given, copied, done in steps:
                waited = 0.0 if arm == "host" else given - begin  # there it is the copy
                copied = max(given, copied)
                seconds = (begin - zero, waited, copied - begin - waited, done - copied)
                rows.append(Step(*(round(each, 6) for each in seconds)))
            timeline[arm] = tuple(rows)
        return timeline

    def waited_elsewhere(self, name: str, seconds: float) -> None:
        """Count ``seconds`` of waiting for another loader."""
        self.elsewhere[name] = self.elsewhere.get(name, 0.0) + seconds
        self._elsewhere_s += seconds

    def _waited(self, seconds: float, keys: Any) -> None:
        self.waits.append(seconds)
        full = len(self.slowest) == _SLOWEST
        if keys is not None and not (full and seconds <= self.slowest[-1][0]):
            entries = [*self.slowest, (seconds, keys)]
            self.slowest = sorted(entries, key=lambda entry: -entry[0])[:_SLOWEST]

    def give(self, batch: Batch) -> Iterator[Batch]:
        """Yield one unmeasured batch to the step."""
        if self.pool.varied:
            self._is_fresh(batch)
        self.given += 1
        given, elsewhere = self._now(), self._elsewhere_s
        yield batch
        gap = self._now() - given
        self.rhythm.asked(gap)
        self._gaps.append(gap - (self._elsewhere_s - elsewhere))

    def run(self, arm: Arm, left_s: float) -> Block:
        """Yield the batches of one block of ``arm``."""
        self._schedule.learn(self.feed.length, self.feed.in_flight)
        if arm.name == "real" and self._schedule.whole_epochs:
            return (yield from self._epochs(arm, left_s))
        self.rhythm.update()
        plan = self._schedule.plan(arm, self._numbers(left_s))
        self.cycle = plan.cycle
        self._gaps.clear()
        self._held_s = 0.0
        self._busy.clear()
        began = self._now()
        laps: list[Lap] = []
        if arm.name == "real":
            laps, self.lead = [*self.lead], ()
        spoilt = 0
        missing = plan.batches
        while True:
            part = yield from self._part(arm, plan, missing, began)
            if plan.writes:
                self.pool.restore()
            elif self.pool.written():
                self.writes = True
                self.pool.restore()
                return None
            if part is None:
                spoilt += 1
                if spoilt == _MOST_SPOILT or arm.name == "real":
                    return None
                continue
            laps += part
            missing -= sum(lap.steps for lap in part)
            spent_s = self._now() - began
            ends_here = not plan.writes and arm.most is None
            if missing <= 0 or ends_here or self._schedule.late(1, spent_s, plan.most_s):
                break
        alike = plan.cycle == 1 and not (self.behind or self.writes or self.pool.varied)
        took = Timed(
            sum(lap.seconds for lap in laps),
            sum(lap.steps for lap in laps),
            tuple(laps),
            tuple(self._gaps[1:]) if alike else (),  # the first one comes out of another arm
            self._held_s,
            statistics.fmean(self._busy) if self._busy else 1.0,
        )
        if arm.name == "real":
            self.real_s = took.per_batch
            self.ready = self.feed.ready()
        elif arm.name == "synthetic":
            self.step_s = took.per_batch
        return took

    def launched(self, most_s: float) -> Generator[Batch, None, Interval | None]:
        """Yield steps that the device begins once they are launched; return what one takes it.

        The device is made to wait first, for longer than the host needs: so no gap in which it
        waits for the host is counted. None where the clock cannot do that, or the step writes into
        its batch.
        """
        delay = getattr(self.clock, "delay", None)
        if delay is None or self.writes or math.isnan(self.step_s):
            return None
        took: list[float] = []
        until = self._now() + most_s
        while len(took) < _LAUNCHES and (len(took) < 2 or self._now() < until):
            self.clock.wait()
            delay(_DELAY * self.step_s * self.cycle)
            first = self.clock.mark()
            for batch in self.pool.issue("synthetic", self.cycle):
                yield from self.give(batch)
            last = self.clock.mark()
            self.clock.wait()
            took.append(self.clock.seconds(first, last) / self.cycle)
        return mean_of(took)

    def take_real(self) -> Batch:
        """Return the loader's next batch, of the next epoch if one is over."""
        return self.delivered(self.feed.next())

    def delivered(self, batch: Batch) -> Batch:
        """Return ``batch`` as the loader hands it over: copied, if the loader copies."""
        to = self.feed.copies_to
        if to is None:
            return batch
        copied = to_device(batch, to)
        self._copied_at = self._now()
        return copied

    def _part(
        self, arm: Arm, plan: Plan, batches: int, began: float
    ) -> Generator[Batch, None, list[Lap] | None]:
        """Yield batches and return measured laps, up to where the arm has to begin again.

        Returns None if they are spoilt: an epoch ended within them.
        """
        settle = plan.settle
        if plan.writes and arm.name != "real":
            settle = min(settle, len(self.pool) // 2)  # each batch is written into once
            batches = min(batches, len(self.pool) - settle)
        self.early += not arm.begin(self)
        if plan.refill:
            self.clock.wait()
            for batch in self.pool.issue("synthetic", plan.refill):
                yield from self.give(batch)
        if arm.most is not None:
            settle = int(min(settle, max(0, arm.most(self) - 1)))
            batches = int(min(batches, max(1, arm.most(self) - settle)))
        lap = min(plan.lap, batches)
        align = 0 if plan.writes else 2 * plan.lap
        take = arm.take(self, settle + align + batches)
        try:
            yield from self._settle(arm, take, settle, plan, began)
            for _ in range(align):
                if self.rhythm.aligned:
                    break
                yield from self.give(take())
        except StopIteration:
            return None
        return (yield from self._measured(arm, take, plan, batches // lap, lap, began))

    def _settle(
        self, arm: Arm, take: Take, count: int, plan: Plan, began: float
    ) -> Iterator[Batch]:
        keeps = arm.name == "real" and self.pool.varied and not self.writes
        for number in range(1, count + 1):
            if keeps:
                # Copied here, off the clock: a block that held pinned batches would make the
                # loader pin new memory for each one.
                host = self.feed.next()
                self.pool.record(host)
                batch = self.delivered(host)
            else:
                batch = take()
            yield from self.give(batch)
            if number >= SETTLE_STEPS and self._schedule.late(
                number, self._now() - began, plan.most_s
            ):
                return

    def _measured(
        self, arm: Arm, take: Take, plan: Plan, count: int, per_lap: int, began: float
    ) -> Generator[Batch, None, list[Lap] | None]:
        feed, now, mark, asked = self.feed, self._now, self.clock.mark, self.rhythm.asked
        kept = self._steps.get(arm.name, deque[tuple[float, float, float, float]](maxlen=0))
        real, varied = arm.name == "real", self.pool.varied
        if real:
            take = feed.take
        copies = real and feed.copies_to is not None
        ended = False
        before, used, looked = self.held_up(), feed.cpu_s(), -math.inf
        started, computed = now(), time.process_time()
        marks = [mark()]
        facts: list[tuple[float, float, int, bool]] = []
        try:
            for lap in range(1, count + 1):
                waited, elsewhere, size, fresh = 0.0, self._elsewhere_s, 0, False
                if real and now() > looked + _LOOKED_AT_S:
                    looked = now()
                    self._busy.append(feed.busy())
                for _ in range(per_lap):
                    begin = now()
                    try:
                        batch = take()
                    except StopIteration:
                        if not real:
                            return None
                        ended = True
                        if self._schedule.alone:
                            return None
                        # Other ranks go on: so does this one, with its next epoch.
                        batch = feed.next()
                    given = now()
                    waited += given - begin
                    if real:
                        self._waited(given - begin, feed.keys)
                    if varied:
                        size += nbytes(batch)
                        fresh = self._is_fresh(batch) or fresh
                    yield self.delivered(batch) if copies else batch
                    done = now()
                    asked(done - given)
                    kept.append((begin, given, self._copied_at, done))
                marks.append(mark())
                facts.append((waited, self._elsewhere_s - elsewhere, size, fresh))
                if lap < count and self._schedule.late(lap, now() - began, plan.most_s):
                    break
        finally:
            self.given += per_lap * len(facts)
        if arm.name == "synthetic" and now() > started:
            self.step_cores = (time.process_time() - computed) / (now() - started)
        waited, others = (b - a for a, b in zip(before, self.held_up(), strict=True))
        self._held_s += max(0.0, min(waited, others - (feed.cpu_s() - used)))
        begin = now()
        self.clock.wait()
        lag_s = now() - begin
        if real:
            self.lag_s = lag_s
        if ended:
            return None
        steps = per_lap * max(1, len(facts))
        if self.behind and lag_s >= sum(fact[1] for fact in facts) / steps:
            # The device had work to do all the while: waits for other loaders were hidden.
            facts = [(waited, 0.0, size, fresh) for waited, _, size, fresh in facts]
        seconds = self.clock.seconds
        return [
            Lap(seconds(first, last), per_lap, *fact)
            for first, last, fact in zip(marks, marks[1:], facts, strict=False)
        ]

    def _epochs(self, arm: Arm, left_s: float) -> Block:
        """Yield whole epochs, each timed from its ``iter()`` to its end.

        One that takes too long is cut. Its steps are laps then, the first of which has that share
        of what starting the epoch took that its steps are of the whole epoch.
        """
        feed, now, schedule, mark = self.feed, self._now, self._schedule, self.clock.mark
        self.rhythm.update()
        plan = schedule.plan(arm, self._numbers(left_s))
        length = schedule.length or 1
        most = 2 * length if schedule.alone else length  # of an epoch that its length says wrongly
        missing, late = 1 if schedule.cut_short else plan.batches, False
        began = now()
        # Persistent workers finish an abandoned epoch's batches before they begin the next.
        self.early += not feed.wait_until_idle(self.patience_s, self.real_s)
        spans: list[tuple[Any, Any, Lap]] = []
        while missing > 0 and not late:
            feed.close()
            marks, laps = [mark()], list[Lap]()
            begin, take = now(), feed.start
            while not late and len(laps) < most:
                try:
                    batch = take()
                except StopIteration:
                    if schedule.alone or len(laps) >= length:
                        break
                    batch = feed.start()  # other ranks' epochs are longer
                given, elsewhere = now(), self._elsewhere_s
                if laps:  # what starting an epoch takes is no batch's own
                    self._waited(given - begin, feed.keys)
                take = feed.take
                if schedule.cut_short and len(laps) == length - 1:
                    # A consumer that counts batches never asks for more than these: this is the
                    # last that the clock is read, and the last step counts as an ordinary one.
                    self.clock.wait()
                    seconds = self.clock.seconds(marks[0], mark()) + self.step_s
                    waited = sum(lap.waited for lap in laps) + given - begin
                    self.salvaged = Timed(seconds, length, (Lap(seconds, length, waited),))
                yield self.delivered(batch)
                self.salvaged = None
                done = now()
                self.rhythm.asked(done - given)
                self._steps["real"].append((begin, given, self._copied_at, done))
                marks.append(mark())
                laps.append(Lap(0.0, 1, given - begin, self._elsewhere_s - elsewhere))
                late = len(laps) < length and schedule.late(len(laps), done - began, plan.most_s)
                begin = done
            missing -= length
            if late:
                start_s = laps[0].waited * (1 - len(laps) / length)
                laps[0] = laps[0]._replace(seconds=-start_s, waited=laps[0].waited - start_s)
                spans += zip(marks, marks[1:], laps, strict=False)
            else:
                waited = sum(lap.waited for lap in laps) + now() - begin
                others = sum(lap.elsewhere for lap in laps)
                spans.append((marks[0], mark(), Lap(0.0, len(laps), waited, others)))
        self.clock.wait()
        timed = tuple(
            lap._replace(seconds=lap.seconds + self.clock.seconds(first, last))
            for first, last, lap in spans
        )
        took = Timed(sum(lap.seconds for lap in timed), sum(lap.steps for lap in timed), timed)
        self.real_s = took.per_batch
        return took

    def _numbers(self, left_s: float) -> Numbers:
        step_s = self.real_s if math.isnan(self.step_s) else self.step_s
        return Numbers(
            left_s=left_s,
            step_s=step_s,
            real_s=self.real_s,
            cycle=self.rhythm.cycle,
            ready=-1 if self.ready is None else self.ready,
            left=self.feed.left,
            lag_s=self.lag_s,
            pool=len(self.pool),
            writes=self.writes,
            varied=self.pool.varied,
            ahead=self.feed.ahead,
            steady=bool(self.lead),
        )

    def _is_fresh(self, batch: Batch) -> bool:
        shapes = tuple(leaf.shape for leaf in leaves(batch))
        if shapes in self._shapes:
            return False
        self._shapes.add(shapes)
        return True
