"""The measurement itself: one training loop, fed from different inputs in short interleaved blocks.

    warm-up   real real real …                      (a few batches kept; the step's devices noticed)
    round     real │ synthetic │ host │ contended   each: unmeasured steps, mark, steps, mark
    round     real │ synthetic │ host │ contended   … until the interval is narrow enough

The check is an iterator of batches: whoever iterates it runs the step, between two batches.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dataloaders.batches.tree import Batch, describe, leaves
from dataloaders.bottleneck.advice import Advice
from dataloaders.bottleneck.arms import Arm
from dataloaders.bottleneck.blocks import Blocks
from dataloaders.bottleneck.causes import Causes
from dataloaders.bottleneck.report import Report
from dataloaders.bottleneck.resident import Placement, Pool, resident_everywhere
from dataloaders.bottleneck.schedule import SETTLE_STEPS, Agree, Schedule, WarmUp
from dataloaders.bottleneck.summary import summarise
from dataloaders.bottleneck.verdict import Analysis, analyse
from dataloaders.errors import CheckError, OptionError
from dataloaders.findings import Facts, Finding, Watch, findings_of
from dataloaders.measuring.clocks import Clock, HostClock, clock_of, host_time_of
from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import Interval, Lap, Timed

_LATER_ROUNDS = 5
_FIRST_STEPS = 4
"""Of the warm-up, that are slower than the others, or whose batches were there already."""
_MOST_FIRST_STEPS = 1000
_WARM_UP_SHARE = 0.15
_FIRST_EPOCH_SHARE = 0.2
_TAKEN_BEFORE = 2  # batches of an epoch that a script's loop had before it was taken over
_AS_SLOW = 0.5  # of what the first epoch's batches took
_FEW_STEPS = 20  # in the budget
_HELD_SHARE = 0.03
_CONTENTION_SHARE = 0.03
_LAUNCH_SHARE = 0.05
_LONGEST_WARM_UP = 3
"""Times the share: where steps never agree or an optimizer's cycle is long."""


@dataclass(frozen=True)
class Progress:
    """Says how far a check is; given to ``progress`` between blocks."""

    seconds: float  # spent measuring so far
    budget_s: float  # the most that will be spent, in seconds
    phase: str  # "warm-up", or the arm that was measured last
    rounds: int  # complete ones, so far
    interval: Interval | None  # of real / synthetic, as known so far

    def __str__(self) -> str:
        seconds = min(self.seconds, self.budget_s)
        text = f"check  {seconds:.0f} of at most {self.budget_s:.0f} s  {self.phase}"
        if self.rounds:
            text += f"  round {self.rounds}"
        if self.interval is not None:
            text += f"  real/synthetic {self.interval:.2f}"
        return text


class Check:
    """Yields batches that make a training loop measure itself; iterate it in place of the loader.

    ``for batch in check: step(batch)`` ends when enough is known, then `report` has the result.
    The loop may also break and iterate again (validation in between): the check goes on, and
    only the block under way is measured anew. ``report()`` can be asked at any time.

    Args:
        loader: a DataLoader, or any object that can be iterated again and again.
        budget_s: the most seconds to spend; it ends earlier once the interval is narrow. Up to
            twice as many without a verdict where steps are slow (0.25 s) or not two rounds fit.
        device: where the step wants its batches; None: where its first real batch ends up.
        iterate: makes the loader's iterator, if not ``iter(loader)``.
        progress: called with a `Progress` between blocks, never inside one.
        clock: what blocks are timed with; None: the devices that the step computes on.
        predict: whether to look, once the verdict stands, for what preparation consists of and
            what remedies would gain, some seconds; or, if the step is the bottleneck, to measure
            what settings gain that findings name, for half of the budget more.
        try_candidates: whether to run these remedies with the step, too.
        cache: of the dataset, for them; built if it is missing. None: in a temporary folder.
        only_epoch: whether the first epoch may be the loop's only one, as a script's may: if it is
            short, and what it waited for carries a verdict, no other one is begun.
        agree: with several ranks, called at the same points of the loop by every rank with the
            numbers of its own; returns those of rank 0. None: this process decides alone.

    Raises:
        OptionError: ``budget_s`` is not positive.
        CheckError: while iterating, if the loader yields no batch.
    """

    def __init__(
        self,
        loader: Any,
        *,
        budget_s: float = 30.0,
        device: torch.device | str | None = None,
        iterate: Callable[[], Iterator[Batch]] | None = None,
        progress: Callable[[Progress], None] | None = None,
        clock: Clock | None = None,
        predict: bool = True,
        try_candidates: bool = False,
        cache: str | None = None,
        only_epoch: bool = False,
        agree: Agree | None = None,
    ) -> None:
        if not budget_s > 0:
            raise OptionError(f"budget_s={budget_s!r}: must be a positive number of seconds")
        self.finished = False
        self._loader = loader
        self._budget_s = budget_s
        self._device = None if device is None else torch.device(device)
        self._progress = progress
        self._clock = clock
        self._time = host_time_of(clock)
        self._feed = Feed(loader, iterate, self._time)
        self._pool = Pool()
        self._schedule = Schedule(
            budget_s,
            workers=self._feed.workers,
            in_flight=self._feed.in_flight,
            behind=clock is not None and not isinstance(clock, HostClock),
            length=self._feed.length,
            agree=agree,
        )
        self._blocks = Blocks(
            self._feed, self._pool, self._schedule, clock or HostClock(), self._time
        )
        self._predict = predict or try_candidates
        self._trying = try_candidates
        self._only_epoch = only_epoch and not try_candidates
        self._causes = Causes(loader, self._blocks, budget_s, self._time.now, cache)
        self._watch = Watch()
        self._advice = Advice(self._blocks, self._watch, budget_s, self._time.now)
        self._warm_up_s = budget_s * _WARM_UP_SHARE
        self._warming = WarmUp(self._warm_up_s)
        self._rounds: list[dict[str, Timed]] = []
        self._round_epochs: list[int] = []
        self._round_s: deque[float] = deque([0.0], maxlen=3)  # of the last rounds
        self._spent_s = 0.0
        self._resumed_at: float | None = None
        self._round: dict[str, Timed] = {}
        self._round_began_s = 0.0
        self._blocks_done = 0
        self._known: tuple[tuple[int, int], Analysis | None] | None = None
        self._running: Generator[Batch, None, None] | None = None
        self._placement: Placement | None = None
        self._launched: Interval | None = None  # seconds of a step that was launched at once
        self._cycle = 1
        self._warm = False
        self._warm_steps = 0
        self._warm_s = 0.0
        self._warm_laps: list[Lap] = []
        self._alone_laps: list[Lap] = []  # at the end of a first epoch that is short
        self._batch_text = ""

    def __iter__(self) -> Iterator[Batch]:
        if self._running is not None:
            self._running.close()  # an iterator that was left behind must not end later, under us
        self._running = self._go()
        return self._running

    def report(self) -> Report:
        """Return what is known so far; the verdict is "inconclusive" while too little is."""
        analysis, placement, rounds = self._analysis(), self._placement, len(self._rounds)
        derived = placement is not None and placement.derived and not self._pool.transfers
        return summarise(
            analysis,
            self._loader,
            self._blocks,
            self._causes,
            launched=self._launched,
            rounds=rounds,
            finished=self.finished,
            derived=derived,
            batch=self._batch_text,
            seconds=self._seconds(),
            findings=self._findings(analysis),
        )

    def failed(self, error: BaseException) -> bool:
        """Return whether a setting that is tried around the step made it fail, and leave that out.

        The verdict stands by then: such an error is no reason to end without the report.
        """
        return self._advice.failed(error)

    def _findings(self, analysis: Analysis | None) -> tuple[Finding, ...]:
        return self._advice.of(findings_of(self._facts(analysis)))

    def _facts(self, analysis: Analysis | None) -> Facts | None:
        stall = None
        if analysis is not None and analysis.verdict != "contention-bound":
            stall = analysis.stalls.get("contention")
        real_s = analysis.seconds_per_batch["real"].estimate if analysis and stall else 0.0
        slows = stall is not None and stall.low > _CONTENTION_SHARE * real_s
        return self._watch.facts(
            cycle=self._blocks.cycle,
            varied=self._pool.varied,
            workers=self._feed.workers,
            contention=stall if slows else None,
        )

    @property
    def wait_s(self) -> float:
        """Return the mean seconds that the loop waited for a batch of the loader."""
        rounds = [one["real"] for one in (*self._rounds, self._round) if "real" in one]
        laps = [lap for one in rounds for lap in one.laps] or self._warm_laps
        return sum(lap.waited for lap in laps) / max(1, sum(lap.steps for lap in laps))

    def optimizer_stepped(self) -> None:
        """Note that an optimizer stepped: blocks then consist of whole accumulation cycles.

        A loop that steps with torch's optimizers need not call it.
        """
        self._blocks.rhythm.stepped()

    def waited_elsewhere(self, name: str, seconds: float) -> None:
        """Count ``seconds`` of the loop's own time as waiting for input, not as its step.

        To be called when the loop comes back from ``next()`` of another loader; ``name`` is what
        the report calls that loader.
        """
        self._blocks.waited_elsewhere(name, seconds)

    def close(self) -> None:
        """End the loader's running epoch (its workers too, unless they are persistent)."""
        if self._running is not None:
            self._running.close()
            self._running = None
        self._feed.close()

    def _go(self) -> Generator[Batch, None, None]:
        self._resumed_at = self._time.now()
        done_before = self._blocks_done
        known = False
        hook = register_optimizer_step_post_hook(lambda *_: self.optimizer_stepped())
        try:
            if not self._warm:
                known = yield from self._warm_up()
                self._warm = True
                self._tell("warm-up")
            while not (known or self._late()):
                spent = len(self._rounds), self._seconds(), max(self._round_s)
                if self._schedule.enough(*spent, self._verdict_stands):
                    break
                yield from self._go_round()
            self.finished = True
            self._feed.close()
            measured = self._blocks_done or known
            found = self._analysis() if measured and self._schedule.alone else None
            if found is not None and self._schedule.behind:
                self._launched = yield from self._blocks.launched(_LAUNCH_SHARE * self._budget_s)
            if found is not None and self._predict:
                step_bound = found.verdict == "step-bound"
                if not step_bound or self._trying:
                    self._tell("causes")
                    yield from self._causes.find(found, trying=self._trying, stepping=not known)
                facts = self._facts(found) if step_bound and not known else None
                if facts is not None:
                    yield from self._advice.find(findings_of(facts), facts)
        except GeneratorExit:
            # The consumer's own loop ended first; if no block fitted into it, make them shorter.
            if self._warm and self._blocks_done == done_before and self._blocks.salvaged is None:
                self._schedule.shorten()
            raise
        finally:
            hook.remove()
            self._spent_s = self._seconds()
            self._resumed_at = None

    def _warm_up(self) -> Generator[Batch, None, bool]:
        """Yield first steps: fill the pool, see where batches end up, end epoch 0.

        The device is waited for after each step: what counts here is when steps are steady.
        Returns whether an epoch that ends meanwhile carries a verdict: it may be the only one.
        """
        feed, pool, blocks, warming = self._feed, self._pool, self._blocks, self._warming
        before = blocks.held_up()
        last = -1  # how many of the first epoch are left when it is asked for a verdict
        while True:
            if feed.epoch == 0 and feed.left <= last and self._waits_are_lost:
                if (yield from self._first_epoch(last - _TAKEN_BEFORE, before)):
                    return True
                feed.close()
            begin = self._time.now()
            host = feed.next()
            if not self._warm_steps:  # by now the loader has said how many batches it makes ahead
                warming.fewest = 2 * feed.in_flight
                self._schedule.learn(feed.length, feed.in_flight)
                if self._schedule.whole_epochs and feed.length:
                    pool.most_batches = feed.length  # one epoch, its short last batch included
                elif feed.length and self._only_epoch:
                    alone = max(4, min(8, feed.length // 8)) if feed.parallel else 0
                    last = _TAKEN_BEFORE + alone
            if pool.wants_more:
                pool.keep(host)
            self._warm_steps += 1  # counted first: a consumer may never come back from its step
            self._batch_text = self._batch_text or describe(host)
            given = self._time.now()
            with self._watch.step(self._warm_steps):
                yield from self._watched(host)
            (self._clock or clock_of(self._devices_in_use())).wait()
            done = self._time.now()
            warming.stepped(done - given, done - begin)
            if len(self._warm_laps) < _MOST_FIRST_STEPS:
                self._warm_laps.append(Lap(done - begin, 1, waited=given - begin))
            self._cycle = blocks.rhythm.cycle
            self._warm_s += done - begin
            if not warming.due:
                continue
            blocks.rhythm.update()
            over = warming.over(blocks.rhythm.cycle, pool.wants_more)
            late = self._warm_s - warming.excess_s > _LONGEST_WARM_UP * self._warm_up_s
            over = pool.placed and over and (blocks.rhythm.known or late)
            if over and self._only_epoch and self._waits_are_lost and feed.epoch == 0:
                # A short rest of the epoch, which may be the only one, is stepped through as well.
                rest_s = feed.left * self._warm_s / self._warm_steps
                over = rest_s > _FIRST_EPOCH_SHARE * self._budget_s or self._schedule.whole_epochs
            if self._schedule.agree(float(over))[0]:
                break
        # What compiling took is not the budget's.
        self._resumed_at = self._time.now()
        self._spent_s = min(self._warm_s, self._warm_up_s)
        # The clock of the devices that the step computes on, unless one was given.
        blocks.clock = self._clock or clock_of(self._devices_in_use())
        self._schedule.behind = not isinstance(blocks.clock, HostClock)
        pool.build()
        blocks.real_s = max(1e-6, (self._warm_s - warming.excess_s) / self._warm_steps)
        if self._budget_s < _FEW_STEPS * blocks.real_s:
            self._go_on_from_warm_up()
        else:
            self._run_out_first_epoch()
        return False

    def _go_on_from_warm_up(self) -> None:
        """Let steady first steps be the beginning of the first real block: few steps fit in."""
        blocks, laps = self._blocks, self._warm_laps[1:]
        if self._waits_are_lost and not (self._pool.varied or blocks.elsewhere):
            own = [lap.seconds - lap.waited for lap in laps]
            unlike = [at for at, step_s in enumerate(own) if step_s > 2 * min(own[-3:])]
            blocks.lead = tuple(laps[max(unlike, default=-1) + 1 :])
            blocks.step_s = statistics.fmean(own[-3:])
            blocks.real_s = statistics.fmean(lap.seconds for lap in laps)
            blocks.ready = self._feed.ready()
            blocks.patience_s = self._budget_s / _FEW_STEPS

    def _watched(self, host: Batch) -> Iterator[Batch]:
        """Yield one of the first batches, and see to which devices the step copies and computes."""
        blocks, pool = self._blocks, self._pool
        batch = blocks.delivered(host)
        wanted = self._feed.copies_to or self._device
        if wanted is not None and not pool.placed:
            pool.place(resident_everywhere(host, wanted))
        if not torch.accelerator.is_available():
            if not pool.placed:
                pool.place([None for _ in leaves(host)])
            yield from blocks.give(batch)
            return
        # A consumer that fetches ahead copies this batch after the next one was asked for.
        if self._placement is None:
            self._placement = Placement(batch)
        else:
            self._placement.watch(batch)
        if self._warm_steps > 2 * SETTLE_STEPS:
            yield from blocks.give(batch)  # seen enough
            return
        self._placement.used.update(leaf.device for leaf in leaves(batch))
        try:
            with self._placement:
                yield from blocks.give(batch)
        finally:
            devices = self._placement.devices
            seen = any(device is not None for device in devices)
            if not pool.placed and (seen or self._warm_steps > SETTLE_STEPS):
                pool.place(devices)

    def _devices_in_use(self) -> list[torch.device]:
        """Return the devices that the step copied to or computed on, as far as it was seen."""
        used = {self._pool.device}
        if self._placement is not None:
            used |= self._placement.used
        on = {device for device in used if device.type not in ("cpu", "meta")}
        if not on and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # A compiled step copies and computes unseen.
            on = {torch.device("cuda", torch.cuda.current_device())}
        return sorted(on, key=str)

    def _run_out_first_epoch(self) -> None:
        """Take the rest of epoch 0 without a step, if that is quick: later ones may be faster.

        Datasets that fill a cache are slow once. Where it would take long, the check measures
        inside the first epoch, and the report says so.
        """
        feed = self._feed
        if feed.epoch > 0 or feed.length is None or not feed.running:
            return
        most_s = self._budget_s * _FIRST_EPOCH_SHARE
        begin, before = self._time.now(), feed.taken
        try:
            while True:
                feed.take()
                spent = max(1e-9, self._time.now() - begin)
                rate = (feed.taken - before) / spent
                if spent > 0.1 * most_s and feed.left / rate > most_s - spent:
                    return
        except StopIteration:
            return

    def _go_round(self) -> Iterator[Batch]:
        """Yield the blocks of one round that are still missing."""
        blocks = self._blocks
        if not self._round:
            self._round_began_s = self._seconds()
        arms = blocks.arms
        for arm in arms:
            while arm.name not in self._round:
                took = yield from self._block(arm)
                if took is not None:
                    self._round[arm.name] = took
                    self._blocks_done += 1
                    self._tell(arm.name)
                if self._late():
                    return
        if blocks.cycle > self._cycle:  # blocks before it was known held parts of cycles
            self._rounds.clear()
            self._round_epochs.clear()
        else:
            self._rounds.append(self._round)
            self._round_epochs.append(self._feed.epoch)
        self._cycle = blocks.cycle
        self._round = {}
        self._round_s.append(self._seconds() - self._round_began_s)
        if len(self._rounds) >= 3:
            spreads = self._spread("synthetic"), self._spread("real")
            longer = self._schedule.adapt(len(arms), *spreads)
            self._round_s.extend([seconds * longer for seconds in self._round_s])

    def _block(self, arm: Arm) -> Generator[Batch, None, Timed | None]:
        """Yield one block of ``arm``, or return the one whose consumer left after its last batch.

        Returns None if it has to be run again, on this rank or on the one that decides.
        """
        blocks = self._blocks
        if arm.name == "real" and blocks.salvaged is not None:
            took, blocks.salvaged = blocks.salvaged, None
            return took
        missing = sum(one.name not in self._round for one in blocks.arms)  # they share what is left
        left_s = self._schedule.left_s(len(self._rounds), self._seconds()) / missing
        ran = yield from blocks.run(arm, left_s)
        again = self._schedule.agree(float(ran is None))[0]
        if ran is None and not again:
            return Timed(math.nan, 1)  # this rank goes on with the others, without a figure
        return None if again else ran

    def _spread(self, arm: str) -> float:
        """Return how much an arm's recent blocks differ: standard deviation / mean."""
        took = [one[arm].per_batch for one in self._rounds[-6:] if one[arm].seconds > 0]
        return statistics.stdev(took) / statistics.fmean(took) if len(took) > 1 else 0.0

    def _late(self) -> bool:
        return self._schedule.over(len(self._rounds), self._seconds(), self._verdict_stands)

    def _verdict_stands(self) -> tuple[bool, bool, bool]:
        """Return whether there is a verdict, an undisturbed one, and one that nothing improves."""
        known = self._analysis()
        if known is None or known.verdict == "inconclusive":
            return False, False, False
        return True, known.held <= _HELD_SHARE, known.settled

    def _seconds(self) -> float:
        running = 0.0 if self._resumed_at is None else self._time.now() - self._resumed_at
        return self._spent_s + running

    def _tell(self, phase: str) -> None:
        if self._progress is not None:
            known = self._analysis()
            bound = None if known is None else known.speedup_bound
            self._progress(
                Progress(self._seconds(), self._budget_s, phase, len(self._rounds), bound)
            )

    def _analysis(self) -> Analysis | None:
        """Return what the blocks so far carry; computed once after each."""
        state = (len(self._rounds), len(self._round))
        if self._known is None or self._known[0] != state:
            self._known = (state, self._analysed())
        return self._known[1]

    def _analysed(self) -> Analysis | None:
        rounds = [
            (one, epoch)
            for one, epoch in zip(self._rounds, self._round_epochs, strict=True)
            if not any(math.isnan(took.seconds) for took in one.values())
        ]
        # Rounds of later epochs alone, once there are enough: the first epoch may be a slow one.
        later = [one for one, epoch in rounds if epoch > 0]
        chosen = later if len(later) >= _LATER_ROUNDS else [one for one, _ in rounds]
        part = {arm: took for arm, took in self._round.items() if not math.isnan(took.seconds)}
        if not chosen and len(part) < 2:
            part = self._first_steps()
        feed = self._feed
        starts: list[float] = []
        if feed.length and feed.epoch_starts and not self._schedule.whole_epochs:
            end_s = statistics.fmean(feed.epoch_ends) if feed.epoch_ends else 0.0
            starts = [start + end_s for start in feed.epoch_starts]
        return analyse(
            chosen,
            part=part,
            behind=self._schedule.behind,
            parallel=feed.parallel,
            turn=max(1, feed.workers),
            ranks=not self._schedule.alone,
            epoch_starts=starts,
            batches=feed.length or 1,
        )

    def _first_epoch(self, last: int, before: tuple[float, float]) -> Generator[Batch, None, bool]:
        """Yield ``last`` batches of epoch 0 as resident ones; return whether it tells enough.

        Not if other processes held it up, nor if a later epoch's batches wait for less.
        """
        blocks, now = self._blocks, self._time.now
        if last:
            self._pool.build()
            batch_s = self._warm_s / self._warm_steps
            blocks.early += not self._feed.wait_until_idle(blocks.patience_s, batch_s)
            for batch in self._pool.issue("synthetic", last):
                begin = now()
                yield from blocks.give(batch)
                self._alone_laps.append(Lap(now() - begin, 1))
            self._pool.restore()
        held_s = min(b - a for a, b in zip(before, blocks.held_up(), strict=True))
        self._known = None  # it is of fewer steps
        known = self._analysis()
        if known is None or not known.settled or held_s > _HELD_SHARE * self._warm_s:
            return False
        if known.verdict == "step-bound":  # unless starting the epoch took long
            return sum(lap.waited for lap in self._warm_laps[:_FIRST_STEPS]) <= 0.03 * self._warm_s
        return self._as_slow_later()

    def _as_slow_later(self) -> bool:
        """Return whether the next epoch's batches, without a step, take about as long to make."""
        feed, now, laps = self._feed, self._time.now, self._warm_laps
        feed.close()
        began, taken = now(), 0
        until = began + _FIRST_EPOCH_SHARE * self._budget_s
        with suppress(CheckError, StopIteration):  # an iterable that ends for good has no later one
            while taken < len(laps) and now() < until:
                feed.take()
                taken += 1
        first = [lap.seconds if feed.parallel else lap.waited for lap in laps]
        return not taken or (now() - began) / taken > _AS_SLOW * statistics.fmean(first)

    @property
    def _waits_are_lost(self) -> bool:
        """Whether what a step waits is a part of the gap: on the host's clock, of this process."""
        return self._schedule.alone and not (self._schedule.behind or self._devices_in_use())

    def _first_steps(self) -> dict[str, Timed]:
        """The warm-up's own waits, for a loop that ended before anything else was measured.

        Without workers they are the gap; with workers only beside steps that were made alone.
        """
        laps, alone = self._warm_laps[_FIRST_STEPS:], self._alone_laps[1:]
        if not self._feed.parallel:
            alone = [lap._replace(seconds=lap.seconds - lap.waited, waited=0.0) for lap in laps]
        if not (laps and alone and self._waits_are_lost):
            return {}
        return {
            arm: Timed(sum(lap.seconds for lap in some), len(some), tuple(some))
            for arm, some in (("real", laps), ("synthetic", alone))
        }
