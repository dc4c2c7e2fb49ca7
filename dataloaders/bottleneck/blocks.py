"""The arms, as blocks of steps: unmeasured steps first, then the clock around a run of steps.

    alone("synthetic")  resident batches; the workers have filled their queues and are idle
    alone("host")       the same batches in the loader's memory; the step (or we) copies them
    contended()         resident batches, while the loader runs and its batches are dropped
    real()              the loader's batches

Each yields batches to whoever runs the step and returns what it took, or None if the block was
spoilt (the epoch ended inside it, the step wrote into a resident batch) and must be run again.
The device is synchronised where a clock is read and nowhere else.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

from dataloaders.batches.tree import Batch, to_device
from dataloaders.bottleneck.feed import Feed, Takers
from dataloaders.bottleneck.resident import Pool
from dataloaders.measuring.intervals import Timed

__all__ = ["Block", "Blocks", "synchronise"]

Block: TypeAlias = Generator[Batch, None, "Timed | None"]
"""Yields batches to the step; returns what it took, or None if the block was spoilt."""

SETTLE_STEPS = 2  # a consumer that fetches one batch ahead (Lightning, Accelerate) is covered

_FEWEST_STEPS = 4
_MOST_STEPS = 20_000
_SPREAD_OF_A_STEADY_STEP = 0.03
_SLOW_STEP_S = 0.25  # from here on every step is an observation of its own


class Blocks:
    """Runs blocks of one loop; knows how long a step takes and in which state the queue was.

    Attributes:
        step_s: seconds of a step on resident batches, as last measured.
        real_s: seconds of a step on real batches, as last measured.
        real_share: how many times longer real blocks are than the others: more where what they
            take differs more from block to block (bursts).
        writes: whether the step writes into its batch.
        salvaged: the real block of a whole epoch whose consumer left after its last batch.
    """

    def __init__(self, feed: Feed, pool: Pool, budget_s: float) -> None:
        self.step_s = math.nan
        self.real_s = math.nan
        self.real_share = 1.0
        self.writes = False
        self.salvaged: Timed | None = None
        self._feed = feed
        self._pool = pool
        self._block_s = min(0.5, max(0.1, budget_s / 90))
        self._longest_s = max(self._block_s, budget_s / 12)
        self._patience_s = max(0.5, budget_s / 6)
        self._level: int | None = 0
        self._cut_short = False
        self._most_settling = _MOST_STEPS
        self._random = random.Random(0)  # of our own: the process-wide one is the user's

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that say something about this loader and step, in the order of a round."""
        host = ("host",) if self._pool.transfers else ()
        contended = ("contended",) if self._feed.workers and self._feed.tells else ()
        if self._pool.varied and not self.writes:
            return ("real", "synthetic", *host, *contended)  # on the batches of that real block
        return ("synthetic", *host, *contended, "real")

    @property
    def whole_epochs(self) -> bool:
        """Whether an epoch is too short for a steady state, so that whole epochs are measured."""
        length, in_flight = self._feed.length, self._feed.in_flight
        return length is not None and length < 2 * (2 * in_flight + max(_FEWEST_STEPS, in_flight))

    def run(self, arm: str) -> Block:
        """One block of ``arm``."""
        if arm == "real":
            return self._real_epochs() if self.whole_epochs else self._real()
        return self._contended() if arm == "contended" else self._alone(arm)

    def adapt(self, spread: float, real_spread: float) -> float:
        """Choose how long blocks are, from the spread of recent ones (standard deviation / mean).

        A step that repeats itself every so many batches (a checkpoint, a log line) needs blocks
        that hold whole repetitions; so do loaders with rare bursts, in real blocks alone: time is
        best given to each arm in proportion to its spread (Neyman 1934). Returns how many times
        longer a round will be.
        """
        others = len(self.arms) - 1
        before = self._block_s * (others + self.real_share)
        if spread > _SPREAD_OF_A_STEADY_STEP:
            self._block_s = max(self._block_s, min(self._longest_s / 3, 2 * self._block_s))
        wanted = self.real_share * real_spread / max(spread, _SPREAD_OF_A_STEADY_STEP)
        self.real_share = max(1.0, min(wanted, self._longest_s / self._block_s))
        return self._block_s * (others + self.real_share) / before

    def shorten(self) -> None:
        """Make the next blocks half as long: the consumer's own loop ended before one was done."""
        self._cut_short = True
        self._block_s = max(0.001, self._block_s / 2)
        self._longest_s = self._block_s
        self._most_settling = max(1, min(self._most_settling, 2 * self._feed.in_flight) // 2)

    def first_look(self, most_s: float) -> Iterator[Batch]:
        """Steps on resident batches that show how long a step takes, and whether it writes."""
        most_s = min(most_s, self._block_s)  # short enough for a consumer whose loops are short
        seconds, done = 0.0, 0
        while done < SETTLE_STEPS or seconds < most_s:
            issued = self._pool.issue("synthetic", SETTLE_STEPS + done)  # twice as many each time
            synchronise()
            begin = time.perf_counter()
            for batch in issued:
                yield batch
                done += 1
                if seconds + time.perf_counter() - begin > most_s and done >= SETTLE_STEPS:
                    break
            synchronise()
            seconds += time.perf_counter() - begin
        self.step_s = seconds / done
        self._notice_writes()

    def take_real(self) -> Batch:
        """The next real batch where the loop would get it, of the next epoch if one is over."""
        feed = self._feed
        if feed.running:
            try:
                return feed.take()
            except StopIteration:
                pass  # the next epoch begins below
        return feed.start()

    def delivered(self, batch: Batch) -> Batch:
        """``batch`` from the feed as the loader hands it over: copied, if the loader copies."""
        to = self._feed.copies_to
        return batch if to is None else to_device(batch, to)

    def _alone(self, arm: str) -> Block:
        feed, pool = self._feed, self._pool
        feed.wait_until_idle(self._patience_s, self.real_s)
        steps = self._steps(self.step_s)
        if (self.whole_epochs or pool.varied) and not self._cut_short:
            steps = len(pool) * math.ceil(steps / len(pool))  # each batch has its share
        if self.writes:
            return (yield from self._alone_restored(arm, steps))
        issued = pool.issue(arm, SETTLE_STEPS + steps)
        copies = feed.copies_to if arm == "host" else None
        for batch in issued[:SETTLE_STEPS]:
            yield batch if copies is None else to_device(batch, copies)
        synchronise()
        begin = time.perf_counter()
        if copies is None:
            yield from issued[SETTLE_STEPS:]
        else:
            for batch in issued[SETTLE_STEPS:]:
                yield to_device(batch, copies)
        synchronise()
        took = Timed(time.perf_counter() - begin, steps)
        if self._notice_writes():
            return None
        if arm == "synthetic":
            self.step_s = took.per_batch
        return took

    def _alone_restored(self, arm: str, steps: int) -> Block:
        """`_alone` for a step that writes: each batch once, then all restored, off the clock."""
        pool, seconds, done = self._pool, 0.0, 0
        copies = self._feed.copies_to if arm == "host" else None
        for turn in range(1 + math.ceil(steps / len(pool))):
            issued = pool.issue(arm, len(pool))
            synchronise()
            begin = time.perf_counter()
            for batch in issued:
                yield batch if copies is None else to_device(batch, copies)
            synchronise()
            if turn:
                seconds += time.perf_counter() - begin
                done += len(issued)
            pool.restore()
        return Timed(seconds, done)

    def _contended(self) -> Block:
        feed, pool = self._feed, self._pool
        steps = self._steps(self.step_s)
        if self.writes:
            steps = min(steps, len(pool))
        seconds, done, spoilt = 0.0, 0, 0
        # Short epochs are started over and over, which may take far longer than the steps.
        deadline = time.perf_counter() + 4 * self._block_s
        while done < steps and not (done and time.perf_counter() > deadline):
            if not feed.running or feed.left <= SETTLE_STEPS + min(steps - done, 8):
                feed.start()
            turn = int(min(steps - done, max(1, feed.left - SETTLE_STEPS - 1)))
            issued = pool.issue("synthetic", SETTLE_STEPS + turn)
            with _taking(feed) as takers:
                for batch in issued[:SETTLE_STEPS]:
                    takers.step()
                    yield batch
                synchronise()
                begin = time.perf_counter()
                for batch in issued[SETTLE_STEPS:]:
                    takers.step()
                    yield batch
                synchronise()
                spent = time.perf_counter() - begin
            if self.writes:
                pool.restore()
            if takers.exhausted and spoilt < 3:
                spoilt += 1  # for a part of the block nothing ran beside the step
                continue
            seconds += spent
            done += turn
        return Timed(seconds, done)

    def _real(self) -> Block:
        feed, pool = self._feed, self._pool
        settle, steps = self._settle(), self._real_steps()
        if feed.length is not None:
            steps = max(1, min(steps, feed.length // 2 - settle))
        # Go on from the level at which the last block stopped; the first begins empty.
        if self._level is not None:
            feed.bring_to(self._level, self._patience_s)
        # Steps that depend on the batch's shape are compared on the very batches of this block:
        # held here, copied once the clock stands, resident in the blocks that follow.
        holds = pool.varied and not self.writes
        if holds:
            steps = min(steps, pool.room)
        held: list[Batch] = []
        done, epoch = 0, feed.epoch
        while done < settle:
            batch = self.take_real()
            if feed.epoch != epoch:
                if self.whole_epochs:  # its length is known by now: too short to settle in
                    return None
                epoch, done = feed.epoch, 0
            yield self.delivered(batch)
            done += 1
        iterator, copies, left = feed.iterator(), feed.copies_to, steps
        ended = False
        synchronise()
        begin = time.perf_counter()
        try:
            while left:
                try:
                    batch = next(iterator)
                except StopIteration:
                    ended = True
                    break
                left -= 1
                if holds:
                    held.append(batch)
                yield batch if copies is None else to_device(batch, copies)
        finally:
            feed.count(steps - left)
        if ended:
            feed.ended()
            return None
        synchronise()
        took = Timed(time.perf_counter() - begin, steps)
        self.real_s = took.per_batch
        self._level = feed.ready()
        if held:
            pool.refresh(held)
        return took

    def _real_epochs(self) -> Block:
        """Whole epochs, each from its ``iter()`` to its end."""
        feed = self._feed
        length = feed.length or 1
        epochs = 1 if self._cut_short else math.ceil(self._real_steps() / length)
        # Persistent workers finish an abandoned epoch's batches before they begin the next.
        feed.wait_until_idle(self._patience_s, self.real_s)
        feed.close()
        done = 0
        synchronise()
        begin = time.perf_counter()
        for _ in range(epochs):
            batch = feed.start()
            while True:
                done += 1
                if self._cut_short and done == length:
                    # A consumer that counts batches never asks for more than these: this is the
                    # last that the clock is read, and the last step counts as an ordinary one.
                    synchronise()
                    self.salvaged = Timed(time.perf_counter() - begin + self.step_s, done)
                yield self.delivered(batch)
                self.salvaged = None
                if done >= 2 * length * epochs:
                    break  # it has far more batches than its length says
                try:
                    batch = feed.take()
                except StopIteration:
                    break
        synchronise()
        took = Timed(time.perf_counter() - begin, done)
        self.real_s = took.per_batch
        return took

    def _steps(self, seconds_per_step: float) -> int:
        fewest = 1 if seconds_per_step > _SLOW_STEP_S or self._cut_short else _FEWEST_STEPS
        wanted = math.ceil(self._varied() * self._block_s / max(seconds_per_step, 1e-7))
        return max(fewest, min(_MOST_STEPS, wanted))

    def _varied(self) -> float:
        """A factor that differs from block to block: a loop that repeats itself every so many
        batches must not meet every block of an arm in the same place.
        """
        return self._random.uniform(0.5, 1.5)

    def _real_steps(self) -> int:
        """Measured steps of a real block: whole turns of the workers, who deliver in turns."""
        feed = self._feed
        steps = self._steps(self.real_s / self.real_share)
        if feed.workers and self.real_s <= _SLOW_STEP_S and not self._cut_short:
            steps = max(steps, feed.in_flight)
        turn = max(1, feed.workers)
        return turn * math.ceil(steps / turn)

    def _settle(self) -> int:
        """Unmeasured real steps: twice what can be in flight, so that the queue finds its state.

        A queue that ended the last block empty, before a loader much slower than the step, has
        no state to find: there one turn of the workers is enough.
        """
        feed = self._feed
        if not feed.workers:
            return 1 if self.real_s > _SLOW_STEP_S else SETTLE_STEPS + self._random.randrange(3)
        slow = self.real_s > max(_SLOW_STEP_S, 1.5 * self.step_s)
        if slow and feed.tells and self._level == 0:
            return feed.workers + 1
        settle = 2 * feed.in_flight + self._random.randrange(1 + feed.workers)
        return min(self._most_settling, settle)

    def _notice_writes(self) -> bool:
        """Whether the step wrote into resident batches; if so they are restored."""
        if not self._pool.written():
            return False
        self.writes = True
        self._pool.restore()
        return True


def synchronise() -> None:
    """Wait for every device that is in use: the edge of a block."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):  # else it has nothing to wait for, nor a context
                torch.cuda.synchronize(index)
    elif torch.accelerator.is_available():
        torch.accelerator.synchronize()


@contextmanager
def _taking(feed: Feed) -> Iterator[Takers]:
    takers = Takers(feed)
    try:
        yield takers
    finally:
        takers.stop()
