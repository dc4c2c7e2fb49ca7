"""The check: feed one training loop from different inputs, in short interleaved blocks.

    first steps   real real real …                (a few batches kept; the step's devices noticed)
    round         real │ synthetic │ host │ contended   each: warm-up steps, mark, steps, mark
    round         real │ synthetic │ host │ contended   … until the interval is narrow enough

The check yields batches; the loop that iterates it runs the step after each one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dataloaders.batches.tree import Batch
from dataloaders.bottleneck.arms import Arm
from dataloaders.bottleneck.blocks import Blocks
from dataloaders.bottleneck.causes.causes import Causes
from dataloaders.bottleneck.causes.settings import TriedSettings
from dataloaders.bottleneck.evidence.verdict import HELD_UP, Analysis, analyse
from dataloaders.bottleneck.first_steps import FirstSteps
from dataloaders.bottleneck.outputs.summary import summarise
from dataloaders.bottleneck.report import Report
from dataloaders.bottleneck.resident import Pool
from dataloaders.bottleneck.schedule import Agree, Schedule
from dataloaders.errors import OptionError
from dataloaders.findings import Facts, Watch, findings_of
from dataloaders.measuring.clocks import Clock, HostClock, host_time_of
from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import BlockTimes, Interval
from dataloaders.predicting import Candidate, possible

_CONTENTION_SHARE = 0.03


@dataclass(frozen=True)
class Progress:
    """Says how far a check has come; ``progress`` is called with it between blocks."""

    seconds: float  # spent measuring so far
    budget_s: float  # the most that will be spent, in seconds
    phase: str  # "warm-up", or the arm that was measured last
    rounds: int  # complete ones so far
    interval: Interval | None  # of real / synthetic, from the blocks so far

    def __str__(self) -> str:
        seconds = min(self.seconds, self.budget_s)
        text = f"check  {seconds:.0f} of at most {self.budget_s:.0f} s  {self.phase}"
        if self.rounds:
            text += f"  round {self.rounds}"
        if self.interval is not None:
            text += f"  real/synthetic {self.interval:.2f}"
        return text


class Check:
    """Yields batches to a training loop, and measures its steps; iterate it instead of the loader.

    ``for batch in check: step(batch)`` ends once enough is known; then `report` returns the result.
    The loop may break and iterate again, after a validation for instance: the check goes on, and
    leaves out the step in which that happened. ``report()`` may be called at any time.

    Args:
        loader: a DataLoader, or any object that can be iterated again and again.
        budget_s: the most seconds to measure. The check ends earlier once the interval is narrow.
            If there is no verdict by then, it goes on for up to twice as long where steps are slow
            (more than 0.25 s) or fewer than two rounds are complete.
        device: where the step wants its batches; None: where its first real batch ends up.
        iterate: makes the loader's iterator; None: ``iter(loader)``.
        progress: called with a `Progress` between blocks, never within one.
        clock: times the blocks; None: the clock of the devices that the step computes on.
        predict: whether to go on after the verdict, for up to half of the budget: to measure what
            preparation consists of and predict what changes would gain, or, if the step is the
            bottleneck, to measure the gain of settings that findings name.
        try_candidates: whether to run these changes with the step, too; or a function that returns
            those of them to run.
        cache: path of the dataset's cache for these runs, built if it is missing; None: in a
            temporary folder.
        only_epoch: whether the first epoch may be the only one, as in a script: if it is short and
            its waits support a verdict, no further epoch is begun, except to predict gains beside a
            step of several threads.
        before: returns how many batches the loop that now iterates the check got elsewhere first.
        agree: for several ranks: every rank calls it with its own numbers, at the same points of
            the loop, and gets those of rank 0. None: this process decides alone.

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
        try_candidates: bool | Callable[[Sequence[Candidate]], Sequence[Candidate]] = False,
        cache: str | None = None,
        only_epoch: bool = False,
        before: Callable[[], int] = lambda: 0,
        agree: Agree | None = None,
    ) -> None:
        if not budget_s > 0:
            raise OptionError(f"budget_s={budget_s!r}: must be a positive number of seconds")
        self.finished = False
        self._loader = loader
        self._progress = progress
        self._before = before
        host = host_time_of(clock)
        self._now = host.now
        self._feed = Feed(loader, iterate, host)
        self._schedule = Schedule(
            budget_s,
            workers=self._feed.workers,
            in_flight=self._feed.in_flight,
            asynchronous=clock is not None and not isinstance(clock, HostClock),
            length=self._feed.length,
            agree=agree,
        )
        self._pool = Pool()
        self._blocks = Blocks(self._feed, self._pool, self._schedule, clock or HostClock(), host)
        self._watch = Watch()
        self._first = FirstSteps(
            self._blocks,
            self._watch,
            clock=clock,
            device=None if device is None else torch.device(device),
            only_epoch=only_epoch and not try_candidates,
        )
        self._predict = predict or bool(try_candidates)
        self._trying = possible if try_candidates is True else try_candidates or None
        self._causes = Causes(loader, self._blocks, cache)
        self._settings = TriedSettings(self._blocks, self._watch)
        self._rounds: list[dict[str, BlockTimes]] = []
        self._round_s: deque[float] = deque([0.0], maxlen=3)  # of the last rounds
        self._round: dict[str, BlockTimes] = {}  # the running one
        self._round_began_s = 0.0
        self._cached: tuple[tuple[int, int, int], Analysis] | None = None
        self._launched: Interval | None = None  # seconds of a step that was launched at once
        self._running: Generator[Batch, None, None] | None = None
        self._given_at = 0.0  # when the loop got its last batch
        self._left_after = 0  # batches, when the loop was last left
        self._began_at: float | None = None  # when the budget began, and when measuring ended
        self._ended_at: float | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._running is None:
            self._running = self._run()
        else:
            # What the loop did in between, such as a validation, is neither step nor budget.
            self._blocks.interrupted = True
            if self._began_at is not None:
                self._began_at += self._now() - self._given_at
        return self._batches(self._running)

    def _batches(self, running: Iterator[Batch]) -> Iterator[Batch]:
        # One generator a loop: a loop that breaks closes its own, and not the running check.
        given = self._before()
        try:
            for batch in running:
                self._given_at = self._now()
                given += 1
                yield batch
        finally:
            if given == self._left_after > 1:  # once may be a look at some batches
                self._feed.end_after(given)
            self._left_after = given

    def report(self) -> Report:
        """Return what is known so far; the verdict is "inconclusive" until that is enough."""
        analysis = self._analysis()
        return summarise(
            analysis,
            self._loader,
            self._blocks,
            self._causes,
            launched=self._launched,
            rounds=len(self._rounds),
            finished=self.finished,
            unwatched=self._watch.failed,
            batch=self._first.batch,
            seconds=self._seconds(),
            findings=self._settings.of(findings_of(self._facts(analysis))),
        )

    def failed(self, error: BaseException) -> bool:
        """Return whether the step failed because of a setting that is being tried on it.

        That setting is then left out. The verdict is known by then, so the report is not lost.
        """
        return self._settings.failed(error)

    def _facts(self, analysis: Analysis) -> Facts | None:
        stall = None
        if analysis.stalls:
            least = _CONTENTION_SHARE * analysis.seconds_per_batch["real"].estimate
            stall = analysis.stalls["contention"]
            stall = stall if stall.low > least else None
        return self._watch.facts(
            cycle=self._blocks.cycle,
            varied=self._pool.varied,
            workers=self._feed.workers,
            contention=stall,
        )

    @property
    def wait_s(self) -> float:
        """Return the mean seconds that the loop waited for a batch of the loader."""
        rounds = [one["real"] for one in (*self._rounds, self._round) if "real" in one]
        segments = [one for took in rounds for one in took.segments] or self._first.segments
        return sum(one.waited for one in segments) / max(1, sum(one.steps for one in segments))

    def waited_elsewhere(self, name: str, seconds: float) -> None:
        """Count ``seconds`` of the loop as a wait for another loader, not as part of the step.

        Call it after each ``next()`` of that loader; ``name`` names it in the report.
        """
        self._blocks.log.waited_elsewhere(name, seconds)

    def close(self) -> None:
        """End the loader's running epoch (its workers too, unless they are persistent)."""
        if self._running is not None:
            self._running.close()
        self._feed.close()

    def _run(self) -> Generator[Batch, None, None]:
        rhythm = self._blocks.rhythm  # the hook would keep the check and its loader alive
        hook = register_optimizer_step_post_hook(lambda *_: rhythm.stepped())
        try:
            known = yield from self._first.run(self._analysis)
            self._begin(known)
            while not (known or self._late()):
                spent = len(self._rounds), self._seconds(), max(self._round_s)
                if self._schedule.enough(*spent, self._verdict_stands):
                    break
                yield from self._go_round()
            self.finished = True
            self._feed.close()
            measured = self._rounds or self._round or known
            if measured and self._schedule.alone and self._analysis().evidence is not None:
                yield from self._explain(self._analysis(), stepping=not known)
        finally:
            hook.remove()
            self._ended_at = self._now()

    def _begin(self, known: bool) -> None:
        """Begin to measure after the first steps; compilation does not count towards the budget."""
        blocks, first = self._blocks, self._first
        self._began_at = self._now() - (first.seconds if known else first.spent_s)
        blocks.clock = first.clock
        self._schedule.asynchronous = not isinstance(blocks.clock, HostClock)
        self._pool.build()
        self._show_progress("warm-up")
        if known:
            return
        blocks.real_s = first.usual_s
        block = first.steady_block()
        if not self._schedule.few_steps(blocks.real_s):
            first.run_out_epoch()
        elif block is not None:  # few steps fit into the budget: first steps count as well
            blocks.lead = block.segments
            waited_s = sum(one.waited for one in block.segments) / block.steps
            blocks.step_s = block.per_batch - waited_s
            blocks.real_s = block.per_batch
            blocks.ready = self._feed.ready()
            blocks.patience_s = self._schedule.budget_s / 20
        blocks.log.clear()

    def _explain(self, found: Analysis, *, stepping: bool) -> Iterator[Batch]:
        """Yield the batches for finding out where the time goes and what changes would gain."""
        if self._schedule.asynchronous:
            self._launched = yield from self._blocks.launched()
        if not self._predict:
            return
        step_bound = found.verdict == "step-bound"
        if not step_bound or self._trying:
            yield from self._causes.find(
                found, self._show_progress, trying=self._trying, stepping=stepping
            )
        facts = self._facts(found) if step_bound and stepping else None
        if facts is not None:
            self._show_progress("settings of the step")
            yield from self._settings.find(findings_of(facts), facts)

    def _go_round(self) -> Iterator[Batch]:
        """Yield the blocks of one round that are still missing."""
        blocks = self._blocks
        if not self._round:
            self._round_began_s = self._seconds()
        arms = blocks.arms
        for arm in arms:
            while arm.name not in self._round:
                took = yield from self._block(arm, sum(one.name not in self._round for one in arms))
                if took is not None:
                    self._round[arm.name] = took
                    self._show_progress(arm.name)
                if self._late():
                    return
        self._rounds.append(self._round)
        self._round = {}
        self._round_s.append(self._seconds() - self._round_began_s)
        if len(self._rounds) >= 3:
            spreads = self._spread("synthetic"), self._spread("real")
            longer = self._schedule.adapt(len(arms), *spreads)
            self._round_s.extend([seconds * longer for seconds in self._round_s])

    def _block(self, arm: Arm, missing: int) -> Generator[Batch, None, BlockTimes | None]:
        """Yield one of the round's ``missing`` blocks; return None if it has to run again.

        Rank 0 decides that.
        """
        left_s = self._schedule.left_s(len(self._rounds), self._seconds()) / missing
        ran = yield from self._blocks.run(arm, left_s)
        again = self._schedule.agree(float(ran is None))[0]
        if ran is None and not again:
            return BlockTimes(math.nan, 1)  # rank 0 goes on, and this rank has no figure
        return None if again else ran

    def _spread(self, arm: str) -> float:
        """Return how much an arm's recent blocks differ: standard deviation / mean."""
        took = [one[arm].per_batch for one in self._rounds[-6:] if one[arm].seconds > 0]
        return statistics.stdev(took) / statistics.fmean(took) if len(took) > 1 else 0.0

    def _late(self) -> bool:
        return self._schedule.over(len(self._rounds), self._seconds(), self._verdict_stands)

    def _verdict_stands(self) -> tuple[bool, bool, bool]:
        """Return whether there is a verdict, an undisturbed one, and a precise one."""
        known = self._analysis()
        stands = known.verdict != "inconclusive"
        return stands, stands and known.held <= HELD_UP, known.precise

    def _seconds(self) -> float:
        if self._began_at is None:
            return self._first.spent_s
        return (self._ended_at or self._now()) - self._began_at

    def _show_progress(self, phase: str) -> None:
        if self._progress is not None:
            bound = self._analysis().speedup_bound
            self._progress(
                Progress(self._seconds(), self._schedule.budget_s, phase, len(self._rounds), bound)
            )

    def _analysis(self) -> Analysis:
        """Return the analysis of the blocks so far, computed once after each block."""
        state = (len(self._rounds), len(self._round), self._first.steps)
        if self._cached is None or self._cached[0] != state:
            self._cached = (state, self._analysed())
        return self._cached[1]

    def _analysed(self) -> Analysis:
        rounds = [
            one
            for one in self._rounds
            if not any(math.isnan(took.seconds) for took in one.values())
        ]
        part = {arm: took for arm, took in self._round.items() if not math.isnan(took.seconds)}
        if not rounds and len(part) < 2:
            part = self._first.blocks()
        feed = self._feed
        end_s = statistics.fmean(feed.epoch_ends) if feed.epoch_ends else 0.0
        return analyse(
            rounds,
            part=part,
            asynchronous=self._schedule.asynchronous,
            parallel=feed.parallel,
            ranks=not self._schedule.alone,
            turn=max(1, feed.workers),
            epoch_starts=[start + end_s for start in feed.epoch_starts] if feed.length else (),
            length=feed.length or 1,
            unmeasured=self._blocks.unmeasured,
            lost_s=self._blocks.lost_s,
        )
