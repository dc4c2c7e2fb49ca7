"""The measurement itself: one training loop, fed from different inputs in short interleaved blocks.

    warm-up   real real real …                      (a few batches kept; their device noticed)
    round     synthetic │ host │ contended │ real   each: unmeasured steps, clock, steps, clock
    round     synthetic │ host │ contended │ real   … until the interval is narrow enough

The check is an iterator of batches: whoever iterates it runs the step, between two batches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dataloaders.batches.tree import Batch, describe, leaves
from dataloaders.bottleneck.blocks import SETTLE_STEPS, Blocks
from dataloaders.bottleneck.feed import Feed
from dataloaders.bottleneck.report import Report
from dataloaders.bottleneck.resident import Placement, Pool, resident_everywhere
from dataloaders.bottleneck.schedule import Agree
from dataloaders.bottleneck.summary import summarise
from dataloaders.bottleneck.verdict import Analysis, analyse
from dataloaders.errors import OptionError
from dataloaders.loader import DataLoader
from dataloaders.measuring.clocks import Clock
from dataloaders.measuring.intervals import Interval, Timed
from dataloaders.seeding.states import random_states_kept
from dataloaders.specification import generators_of

__all__ = ["Check", "Progress", "check_bottleneck"]

_FEWEST_ROUNDS = 5
_WARM_UP_SHARE = 0.15
_FIRST_EPOCH_SHARE = 0.2
_ROUNDS_END_AT = 0.93  # of the budget: a round may take longer than the ones before it


@dataclass(frozen=True)
class Progress:
    """How far a check is; given to ``progress`` between blocks.

    Attributes:
        seconds: spent measuring so far.
        budget_s: the most that will be spent, in seconds.
        phase: "warm-up", or the arm that was measured last.
        rounds: complete rounds so far.
        interval: real / synthetic as known so far, or None.
    """

    seconds: float
    budget_s: float
    phase: str
    rounds: int
    interval: Interval | None


class Check:
    """Batches that make a training loop measure itself; iterate it in place of the loader.

    ``for batch in check: step(batch)`` ends when enough is known, then `report` has the result.
    The loop may also break and iterate again (validation in between): the check goes on, and
    only the block under way is measured anew. ``report()`` can be asked at any time.

    Args:
        loader: a DataLoader, or any object that can be iterated again and again.
        budget_s: the most seconds to spend; it ends earlier once the interval is narrow. Up to
            twice as many where the loop is so slow that not two rounds fit.
        device: where the step wants its batches; None: where its first real batch ends up.
        iterate: makes the loader's iterator, if not ``iter(loader)``.
        progress: called with a `Progress` between blocks, never inside one.
        clock: what blocks are timed with; None: the devices that the step computes on.
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
        agree: Agree | None = None,
    ) -> None:
        if not budget_s > 0:
            raise OptionError(f"budget_s={budget_s!r}: must be a positive number of seconds")
        self.finished = False
        self._loader = loader
        self._budget_s = budget_s
        self._device = None if device is None else torch.device(device)
        self._progress = progress
        self._feed = Feed(loader, iterate)
        self._pool = Pool()
        self._blocks = Blocks(self._feed, self._pool, budget_s)
        if self._blocks.whole_epochs and self._feed.length:
            self._pool.most_batches = self._feed.length  # one epoch, its short last batch included
        self._rounds: list[dict[str, Timed]] = []
        self._round_epochs: list[int] = []
        self._round_s: deque[float] = deque([0.0], maxlen=3)  # of the last rounds
        self._spent_s = 0.0
        self._resumed_at: float | None = None
        self._round: dict[str, Timed] = {}
        self._round_began_s = 0.0
        self._blocks_done = 0
        self._running: Generator[Batch, None, None] | None = None
        self._placement: Placement | None = None
        self._warm = False
        self._warm_steps = 0
        self._warm_s = 0.0
        self._batch_text = ""

    def __iter__(self) -> Iterator[Batch]:
        if self._running is not None:
            self._running.close()  # an iterator that was left behind must not end later, under us
        self._running = self._go()
        return self._running

    def report(self) -> Report:
        """What is known so far; the verdict is "inconclusive" while too little is."""
        analysis = self._analysis() if len(self._rounds) >= 2 else None
        return summarise(
            analysis,
            loader=self._loader,
            feed=self._feed,
            batch=self._batch_text,
            rounds=len(self._rounds),
            seconds=self._seconds(),
            finished=self.finished,
            writes=self._blocks.writes,
        )

    def optimizer_stepped(self) -> None:
        """Note that an optimizer stepped: blocks then consist of whole accumulation cycles.

        To be called from `torch.optim.optimizer.register_optimizer_step_post_hook`.
        """

    def waited_elsewhere(self, name: str, seconds: float) -> None:
        """Count ``seconds`` of the loop's own time as waiting for input, not as its step.

        To be called when the loop comes back from ``next()`` of another loader; ``name`` is what
        the report calls that loader.
        """

    def close(self) -> None:
        """End the loader's running epoch (its workers too, unless they are persistent)."""
        if self._running is not None:
            self._running.close()
            self._running = None
        self._feed.close()

    def _go(self) -> Generator[Batch, None, None]:
        self._resumed_at = time.perf_counter()
        done_before = self._blocks_done
        try:
            if not self._warm:
                yield from self._warm_up()
                self._warm = True
            if math.isnan(self._blocks.step_s):
                yield from self._blocks.first_look(most_s=0.05)
                self._blocks_done += 1
                self._tell("warm-up")
            while not self._enough():
                yield from self._go_round()
            self.finished = True
            self._feed.close()
        except GeneratorExit:
            # The consumer's own loop ended first; if no block fitted into it, make them shorter.
            if self._warm and self._blocks_done == done_before and self._blocks.salvaged is None:
                self._blocks.shorten()
            raise
        finally:
            self._spent_s = self._seconds()
            self._resumed_at = None

    def _warm_up(self) -> Iterator[Batch]:
        """Steps that no figure uses: fill the pool, see where batches end up, end epoch 0."""
        feed, pool = self._feed, self._pool
        most_s = self._budget_s * _WARM_UP_SHARE
        while True:
            begin = time.perf_counter()
            batch = self._blocks.take_real()
            if pool.wants_more:
                pool.keep(batch)
            self._warm_steps += 1  # counted first: a consumer may never come back from its step
            self._batch_text = self._batch_text or describe(batch)
            if pool.placed:
                yield self._blocks.delivered(batch)
            else:
                yield from self._watched(batch)
            self._warm_s += time.perf_counter() - begin
            done, spent = self._warm_steps, self._warm_s
            seen = not pool.wants_more and done >= 2 * feed.in_flight and spent > 0.5
            if pool.placed and (seen or (done >= SETTLE_STEPS and spent > most_s)):
                break
        self._blocks.real_s = spent / done
        self._run_out_first_epoch()

    def _watched(self, batch: Batch) -> Iterator[Batch]:
        """Yield one of the first batches, and see to which device its tensors are copied."""
        wanted = self._feed.copies_to or self._device
        if wanted is not None:
            self._pool.place(resident_everywhere(batch, wanted))
            yield self._blocks.delivered(batch)
            return
        if not torch.accelerator.is_available():
            self._pool.place([None for _ in leaves(batch)])
            yield batch
            return
        # A consumer that fetches ahead copies this batch after the next one was asked for.
        if self._placement is None:
            self._placement = Placement(batch)
        else:
            self._placement.watch(batch)
        try:
            with self._placement:
                yield batch
        finally:
            devices = self._placement.devices
            if any(device is not None for device in devices) or self._warm_steps > SETTLE_STEPS:
                self._pool.place(devices)

    def _run_out_first_epoch(self) -> None:
        """Take the rest of epoch 0 without a step, if that is quick: later ones may be faster.

        Datasets that fill a cache are slow once. Where it would take long, the check measures
        inside the first epoch, and the report says so.
        """
        feed = self._feed
        if feed.epoch > 0 or feed.length is None or not feed.running:
            return
        most_s = self._budget_s * _FIRST_EPOCH_SHARE
        begin, before = time.perf_counter(), feed.taken
        try:
            while True:
                feed.take()
                spent = time.perf_counter() - begin
                rate = (feed.taken - before) / spent
                if spent > 0.1 * most_s and feed.left / rate > most_s - spent:
                    return
        except StopIteration:
            return

    def _go_round(self) -> Iterator[Batch]:
        """The blocks of one round that are still missing."""
        if not self._round:
            self._round_began_s = self._seconds()
        for arm in self._blocks.arms:
            while arm not in self._round:
                if arm == "real" and self._blocks.salvaged is not None:
                    self._round[arm], self._blocks.salvaged = self._blocks.salvaged, None
                    self._blocks_done += 1
                    break
                took = yield from self._blocks.run(arm)
                if took is not None:
                    self._round[arm] = took
                    self._blocks_done += 1
                    self._tell(arm)
                if self._seconds() > self._most_s():
                    return
        self._rounds.append(self._round)
        self._round_epochs.append(self._feed.epoch)
        self._round = {}
        self._round_s.append(self._seconds() - self._round_began_s)
        if len(self._rounds) >= 3:
            longer = self._blocks.adapt(self._spread("synthetic"), self._spread("real"))
            self._round_s.extend([seconds * longer for seconds in self._round_s])

    def _spread(self, arm: str) -> float:
        """How much an arm's recent blocks differ: standard deviation / mean."""
        took = [one[arm].per_batch for one in self._rounds[-6:]]
        return statistics.stdev(took) / statistics.fmean(took)

    def _enough(self) -> bool:
        spent, rounds = self._seconds(), len(self._rounds)
        if rounds >= 2 and spent + max(self._round_s) > _ROUNDS_END_AT * self._budget_s:
            return True
        if spent > self._most_s():
            return True
        return rounds >= _FEWEST_ROUNDS and self._analysis().settled

    def _most_s(self) -> float:
        """Where a round is given up: later only for loops so slow that not two rounds fit."""
        return self._budget_s * (1 if len(self._rounds) >= 2 else 2)

    def _seconds(self) -> float:
        running = 0.0 if self._resumed_at is None else time.perf_counter() - self._resumed_at
        return self._spent_s + running

    def _tell(self, phase: str) -> None:
        if self._progress is not None:
            known = self._analysis().speedup_bound if len(self._rounds) >= 2 else None
            self._progress(
                Progress(self._seconds(), self._budget_s, phase, len(self._rounds), known)
            )

    def _analysis(self) -> Analysis:
        # Rounds of later epochs alone, once there are enough: the first epoch may be a slow one.
        later = [
            one for one, epoch in zip(self._rounds, self._round_epochs, strict=True) if epoch > 0
        ]
        rounds = later if len(later) >= _FEWEST_ROUNDS else self._rounds
        feed = self._feed
        if not feed.length or not feed.epoch_starts or self._blocks.whole_epochs:
            return analyse(rounds)
        end_s = statistics.fmean(feed.epoch_ends) if feed.epoch_ends else 0.0
        starts = [start + end_s for start in feed.epoch_starts]
        return analyse(rounds, epoch_starts=starts, batches=feed.length)


def check_bottleneck(
    loader: Any,
    step: Callable[[Batch], object],
    *,
    budget_s: float = 30.0,
    device: torch.device | str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Whether the input pipeline holds ``step`` back, by how much, and where the time goes.

    Runs ``step(batch)`` on real and on resident batches in short interleaved blocks. The step is
    the user's own and does what it does in training (a model is trained by it); the random
    states of torch, NumPy and ``random``, and the loader's generator, are put back afterwards.

    Args:
        loader: a DataLoader, torch's or ours, or anything that can be iterated again and again.
        step: takes one batch as the loader delivers it; copies it to its device itself, unless
            the loader does.
        budget_s: the most seconds to spend; fewer if the answer is clear earlier, up to twice
            as many if the loop is so slow that not two rounds fit.
        device: where the step wants its batches; None: where its first real batch ends up.
        progress: called with a `Progress` between blocks.

    Raises:
        OptionError: ``budget_s`` is not positive.
        CheckError: the loader yields no batch.
        Exception: whatever the loader or the step raises. After KeyboardInterrupt the report so
            far is the exception's attribute ``report``.
    """
    check = Check(loader, budget_s=budget_s, device=device, progress=progress)
    with random_states_kept(*generators_of(loader)), _epochs_uncounted(loader):
        try:
            for batch in check:
                step(batch)
        except KeyboardInterrupt as interrupt:
            interrupt.report = check.report()  # type: ignore[attr-defined]
            raise
        finally:
            check.close()
    return check.report()


@contextmanager
def _epochs_uncounted(loader: Any) -> Iterator[None]:
    """A loader of ours counts its epochs for ``seed=``: the check's do not count."""
    counted = loader._iterations if isinstance(loader, DataLoader) else 0
    try:
        yield
    finally:
        if isinstance(loader, DataLoader):
            loader._iterations = counted
