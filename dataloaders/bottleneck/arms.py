"""Define the arms: the inputs of the step, and what their difference to synthetic measures.

    arm         input                                          its difference to synthetic
    synthetic   batches resident where the step wants them
    host        the same in the loader's memory, to be copied  transfer
    contended   resident ones, while the loader's workers run  contention
    real        the loader's batches                           all of these, and prep: the rest
    cold        the same, their files evicted from memory      fetch: its difference to real

To add an arm to each round, add an entry to `ARMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from dataloaders.batches.tree import Batch

if TYPE_CHECKING:
    from dataloaders.bottleneck.blocks import Blocks

Verdict: TypeAlias = Literal[
    "input-bound", "transfer-bound", "contention-bound", "step-bound", "inconclusive"
]

Take: TypeAlias = Callable[[], Batch]
"""Returns the next batch for the step."""


class Stall(NamedTuple):
    """Names a cause for which the loop loses time."""

    name: str  # its key in the report
    verdict: Verdict  # if this stall is the largest
    meaning: str  # in words


@dataclass(frozen=True)
class Arm:
    """Describes one input of the step."""

    name: str  # its key in the report
    meaning: str  # in words
    begin: Callable[[Blocks], None]  # prepares the loader's queue
    take: Callable[[Blocks, int], Take]  # given the number of batches, the warm-up's included
    stall: Stall | None = None  # measured by its difference to synthetic; None: no single one
    exists: Callable[[Blocks], bool] = lambda blocks: True  # whether the loop has this arm


PREP = Stall("prep", "input-bound", "waiting for batches to be made")
TRANSFER = Stall("transfer", "transfer-bound", "waiting for the copy to the device")
CONTENTION = Stall("contention", "contention-bound", "slowed down by the loader's workers")
FETCH = Stall("fetch", "input-bound", "more, where files come from the disk")
LAUNCH = Stall("launch", "step-bound", "within the step: its device waiting to be given work")


def _when_idle(blocks: Blocks) -> None:
    blocks.feed.wait_until_idle(blocks.patience_s, blocks.real_s)


def _slows_the_host(blocks: Blocks) -> bool:
    # On the host's clock, the steps of real blocks without their waits take the place of this arm.
    # Workers of a short epoch finish early, and starting the next epoch is not contention. If
    # steps are very slow, there are too few of them for one more arm.
    feed, schedule = blocks.feed, blocks.schedule
    exists = schedule.asynchronous and feed.parallel and feed.countable
    return exists and not (schedule.short_epochs or schedule.few_steps(blocks.real_s))


def _begin_contended(blocks: Blocks) -> None:
    if not blocks.feed.running:
        blocks.feed.start()


def _beside_workers(blocks: Blocks, count: int) -> Take:
    # On the loop's own thread, as in the real loop: next() runs the loader's sampler.
    issued, drop = iter(blocks.pool.issue("synthetic", count)), blocks.feed.drop_ready

    def take() -> Batch:
        drop()
        return next(issued)

    return take


def _begin_real(blocks: Blocks) -> None:
    if blocks.ready is not None:  # the first block begins with an empty queue
        blocks.feed.bring_to(blocks.ready, blocks.patience_s)


ARMS = (
    Arm(
        "real",
        "the loop as it is",
        _begin_real,
        lambda blocks, count: blocks.feed.next,
    ),
    Arm(
        "synthetic",
        "the step alone, on batches that are already there",
        _when_idle,
        lambda blocks, count: iter(blocks.pool.issue("synthetic", count)).__next__,
    ),
    Arm(
        "host",
        "the same, and the copy to the device",
        _when_idle,
        lambda blocks, count: iter(blocks.pool.issue("host", count)).__next__,
        TRANSFER,
        lambda blocks: blocks.pool.transfers,
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
"""The arms of a round, in its order; the first one continues after the first steps."""

STALLS = (PREP, *(arm.stall for arm in ARMS if arm.stall is not None))
"""The parts of real minus synthetic, in the report's order; "prep" is what the others leave."""

MEANINGS = {arm.name: arm.meaning for arm in (*ARMS[1:], ARMS[0])}
MEANINGS["cold"] = "the loop as it is, its files not in memory"  # measured once, by causes/cold.py
"""Each arm in words, in the report's order."""
