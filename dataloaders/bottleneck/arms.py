"""The arms: what the step gets in each, and what an arm's difference to synthetic measures.

    arm         input                                          its difference to synthetic
    synthetic   batches that are resident where the step is
    host        the same in the loader's memory: a copy each   transfer
    contended   resident ones, while the loader's workers run  contention
    real        the loader's batches                           everything; what is left is prep
    cold        the same, their files evicted from memory      fetch, by its difference to real

A further arm of a round is one more entry of `ARMS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from dataloaders.batches.tree import Batch
from dataloaders.bottleneck.resident import Pool
from dataloaders.bottleneck.schedule import Schedule
from dataloaders.measuring.feed import Feed

Verdict: TypeAlias = Literal[
    "input-bound", "transfer-bound", "contention-bound", "step-bound", "inconclusive"
]

Take: TypeAlias = Callable[[], Batch]
"""Returns the next batch for the step."""


class Loop:
    """Holds what arms take their batches from, and the state in which real blocks left it.

    Attributes:
        feed, pool, schedule: the loader's batches, the resident ones, the lengths of loop.
        real_s: seconds of a step on real batches, as last measured.
        ready: batches that were ready when the last real block ended; None if not countable.
        patience_s: the longest wait for workers.
    """

    def __init__(self, feed: Feed, pool: Pool, schedule: Schedule) -> None:
        self.feed: Feed = feed
        self.pool: Pool = pool
        self.schedule = schedule
        self.real_s = math.nan
        self.ready: int | None = 0
        self.patience_s = max(0.5, schedule.budget_s / 6)

    @property
    def asynchronous(self) -> bool:
        """Whether the clock is a device's, which runs behind the host."""
        return self.schedule.asynchronous


class Stall(NamedTuple):
    """Names time that the loop loses to one cause."""

    name: str  # its key in the report
    verdict: Verdict  # where it is the largest
    meaning: str  # in words


@dataclass(frozen=True)
class Arm:
    """Describes one input of the step."""

    name: str  # its key in the report
    meaning: str  # in words
    begin: Callable[[Loop], bool]  # brings the queue into a block's first state; or in vain
    take: Callable[[Loop, int], Take]  # what hands out so many batches, its warm-up included
    stall: Stall | None = None  # what its difference to synthetic; None: nothing, or all
    exists: Callable[[Loop], bool] = lambda loop: True  # whether it says something about this loop


PREP = Stall("prep", "input-bound", "waiting for batches to be made")
TRANSFER = Stall("transfer", "transfer-bound", "waiting for the copy to the device")
CONTENTION = Stall("contention", "contention-bound", "slowed down by the loader's workers")
FETCH = Stall("fetch", "input-bound", "more, where files come from the disk")
LAUNCH = Stall("launch", "step-bound", "within the step: its device waiting to be given work")


def _when_idle(loop: Loop) -> bool:
    return loop.feed.wait_until_idle(loop.patience_s, loop.real_s)


def _slows_the_host(loop: Loop) -> bool:
    # On the host's clock the steps of real blocks, without their waits, are this arm. Workers of
    # a short epoch are soon done, and starting the next one is no contention. Very slow steps are
    # too few for a further arm.
    exists = loop.asynchronous and loop.feed.parallel and loop.feed.countable
    return exists and not (loop.schedule.short_epochs or loop.schedule.few_steps(loop.real_s))


def _begin_contended(loop: Loop) -> bool:
    if not loop.feed.running:
        loop.feed.start()
    return True


def _beside_workers(loop: Loop, count: int) -> Take:
    # Taken on the loop's own thread, as in the real loop: next() runs the loader's sampler.
    issued, drop = iter(loop.pool.issue("synthetic", count)), loop.feed.drop_ready

    def take() -> Batch:
        drop()
        return next(issued)

    return take


def _begin_real(loop: Loop) -> bool:
    # The first block begins with an empty queue.
    return loop.ready is None or loop.feed.bring_to(loop.ready, loop.patience_s)


ARMS = (
    Arm(
        "real",
        "the loop as it is",
        _begin_real,
        lambda loop, count: loop.feed.next,
    ),
    Arm(
        "synthetic",
        "the step alone, on batches that are already there",
        _when_idle,
        lambda loop, count: iter(loop.pool.issue("synthetic", count)).__next__,
    ),
    Arm(
        "host",
        "the same, and the copy to the device",
        _when_idle,
        lambda loop, count: iter(loop.pool.issue("host", count)).__next__,
        TRANSFER,
        lambda loop: loop.pool.transfers,
    ),
    Arm(
        "contended",
        "the step alone, while the loader's workers run",
        _begin_contended,
        _beside_workers,
        CONTENTION,
        _slows_the_host,
    ),
)
"""All arms of a round, in its order: the first one continues where the warm-up ended."""

STALLS = (PREP, *(arm.stall for arm in ARMS if arm.stall is not None))
"""Parts of real minus synthetic, as the report has them; "prep" is what the others leave."""

MEANINGS = {arm.name: arm.meaning for arm in (*ARMS[1:], ARMS[0])}
MEANINGS["cold"] = "the loop as it is, its files not in memory"  # measured once: see causes.py
"""What each input is, in words, in the order of a report."""
