"""Decide from numbers how long blocks are and when enough is known.

    Numbers of the loop so far ──> Schedule ──> Plan: how long the next block is

Nothing here uses a clock, a loader or a step. All ranks must run the same number of steps, so they
all decide from the numbers of rank 0 (`Agree`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Agree: TypeAlias = Callable[[list[float]], list[float]]
"""Every rank calls it at the same points with its own numbers; it returns those of rank 0."""

WARM_UP_STEPS = 2  # enough for a loop that fetches one batch ahead (Lightning, Accelerate)

_FEWEST_STEPS = 4
_MOST_STEPS = 20_000
_MOST_TIMES_LONGER = 4  # than the last block of its arm
_SPREAD_OF_A_STEADY_STEP = 0.03
_SLOW_STEP_S = 0.25  # slower steps are each an observation of its own
_FEW_STEPS = 20  # in the budget
_SLOW_BATCH_S = 0.1  # slower batches need few warm-up steps, if the queue is at its level
_DEVICE_WARM_UP_S = 0.2  # an idle GPU lowers its clocks and needs this long to raise them
_MOST_REFILL_S = 0.5
_COPIES_COST = 1.02
_SEGMENT_S = 0.002
_EPOCH_SHARE = 0.1  # of the budget: longer epochs are not measured whole
_FEWEST_ROUNDS = 5
_STANDS_FROM = 0.5  # of the budget
_ROUNDS_END_AT = 0.93  # of the budget: half of a further round has to fit in


class Numbers(NamedTuple):
    """Holds the numbers that decisions depend on."""

    left_s: float  # until the budget ends
    step_s: float  # of a step on resident batches, as last measured
    real_s: float  # the same on real batches
    cycle: float = 1  # batches of an accumulation cycle
    ready: float = -1  # batches, at the end of the last real block; -1 if not known
    lag_s: float = 0  # of the device's work, left when the last real block ended
    pool: float = 8  # resident batches
    writes: float = 0  # 1 if the step writes into its batch
    varied: float = 0  # 1 if batches differ in shape
    ahead: float = 0  # batches that the loader itself makes or copies to a device ahead of use
    steady: float = 0  # 1 if real steps ran until now
    interrupted: float = 0  # 1 if the loop sometimes does other things, as between its epochs


@dataclass(frozen=True)
class Plan:
    """Describes one block, in batches."""

    refill: int  # resident batches first, to give the device as much work as it had left before
    warm_up: int  # before the first mark
    batches: int  # of the measured part: whole segments
    segment: int  # between two marks: whole cycles
    most_s: float  # of the host, after which the block ends early
    cycle: int = 1  # of accumulation
    writes: bool = False  # whether batches have to be restored within the block


class Schedule:
    """Decides how long blocks are and when enough is known."""

    def __init__(
        self,
        budget_s: float,
        *,
        workers: int = 0,
        in_flight: int = 1,
        asynchronous: bool = False,
        length: int | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.budget_s = budget_s
        self.workers, self.in_flight = workers, in_flight  # of the loader
        self.asynchronous = asynchronous  # whether the clock is a device's
        self.length = length  # batches of an epoch, or None
        self._agree, self.alone = agree, agree is None
        # As long with 15 s as with more: what is rare is seen only by those who look long enough.
        self._block_s = min(1 / 3, max(0.1, budget_s / 45))
        self._longest_s = max(self._block_s, budget_s / 12)
        self._real_share = 1.0
        self.interrupted = False  # whether the loop ever did something else than step
        self._slow = False
        self._least_s = 0.0  # that a block of slow steps takes
        self._last: dict[str, int] = {}
        self._random = random.Random(0)  # of our own: the process-wide one is the user's

    @property
    def short_epochs(self) -> bool:
        """Whether an epoch is too short for the loader's queue to reach a steady state."""
        fewest = 2 * (2 * self.in_flight + max(_FEWEST_STEPS, self.in_flight))
        return self.length is not None and self.length < fewest

    def few_steps(self, step_s: float) -> bool:
        """Whether so few steps of ``step_s`` seconds fit into the budget that each one counts."""
        return self.budget_s < _FEW_STEPS * step_s

    def learn(self, length: int | None, in_flight: int) -> None:
        """Note the loader's batches in an epoch, None if not known, and in flight."""
        known = math.inf if length is None else float(length)
        known, ahead = self.agree(known, float(in_flight))
        self.length = None if known == math.inf else int(known)
        self.in_flight = int(ahead)

    def agree(self, *numbers: float) -> list[float]:
        """Return rank 0's ``numbers``; every rank has to call this at the same points."""
        return list(numbers) if self._agree is None else self._agree(list(numbers))

    def plan(self, arm: str, numbers: Numbers) -> Plan:
        """Return the next block of ``arm``, the same on every rank."""
        n = Numbers(*self.agree(*numbers))
        cycle, real = max(1, int(n.cycle)), arm == "real"
        batch_s = max(1e-7, n.real_s if real else n.step_s)
        self._slow = n.step_s > _SLOW_STEP_S
        self._least_s = 2 * max(n.real_s, n.step_s)
        batches = self._batches(real, batch_s / (self._real_share if real else 1.0), n)
        most = _MOST_TIMES_LONGER * self._last.get(arm, batches)
        whole = math.floor if batches >= most else math.ceil
        batches = min(batches, most)
        period, epoch = cycle, self.length
        whole_epochs = real and self.short_epochs and not n.interrupted
        if whole_epochs and epoch and epoch * batch_s <= _EPOCH_SHARE * self.budget_s:
            period = math.lcm(cycle, epoch)  # so that each segment contains starts of epochs
        per_mark = min(math.ceil(_SEGMENT_S / (batch_s * period)), batches // (4 * period))
        segment = period * max(1, 1 if n.varied else per_mark)  # if shapes vary: of one shape
        warm_up = self._warm_up_queue(n) if real else self._warm_up_device(n)
        if batch_s > _SLOW_STEP_S:
            # Few rounds fit in: a block measures about as many steps as its warm-up has.
            fit = int(self.budget_s / 2 / batch_s) - warm_up  # so that each arm gets steps
            wanted = max(batches, 2 * min(self.workers, 4) + WARM_UP_STEPS)
            batches = max(_FEWEST_STEPS, min(wanted, fit))
            room = int(n.left_s / batch_s)
            if warm_up + batches > room:
                least = 1 if real or self.asynchronous else 0
                warm_up = min(warm_up, max(least, room - 2))
                batches = max(1, room - warm_up)
                if real and n.real_s > 1.05 * n.step_s:  # whole turns of the workers
                    batches += -batches % max(1, self.workers)
        batches = segment * max(1, whole(batches / segment))
        warm_up = cycle * math.ceil(warm_up / cycle)
        refill = self._refill(n) if real and self.asynchronous else 0
        self._last[arm] = batches
        planned = (warm_up + batches + refill) * max(n.real_s, n.step_s)
        return Plan(
            refill=refill,
            warm_up=warm_up,
            batches=batches,
            segment=segment,
            most_s=min(max(1.0, 4 * planned), max(0.1, n.left_s)),
            cycle=cycle,
            writes=bool(n.writes),
        )

    def late(self, segment: int, spent_s: float, most_s: float) -> bool:
        """Return whether a block that has taken ``spent_s`` seconds ends after this segment.

        Several ranks agree on that after 1, 2, 4, 8, … segments only.
        """
        if self._agree is None:
            return spent_s > most_s
        return segment & (segment - 1) == 0 and self._agree([spent_s])[0] > most_s

    def adapt(self, arms: int, spread: float, real_spread: float) -> float:
        """Choose how long blocks are, from the spread of recent ones (standard deviation / mean).

        A step that repeats itself every so many batches needs blocks that hold whole repetitions,
        and a loader with rare slow batches needs longer real blocks: each arm's share of the time
        is best in proportion to its spread (Neyman 1934). Returns how many times longer a round
        will be.
        """
        spread, real_spread = self.agree(spread, real_spread)
        others = arms - 1
        before = self._block_s * (others + self._real_share)
        if spread > _SPREAD_OF_A_STEADY_STEP:
            self._block_s = max(self._block_s, min(self._longest_s / 3, 2 * self._block_s))
        wanted = self._real_share * real_spread / max(spread, _SPREAD_OF_A_STEADY_STEP)
        self._real_share = max(1.0, min(wanted, self._longest_s / self._block_s))
        return self._block_s * (others + self._real_share) / before

    def enough(
        self, rounds: int, spent_s: float, round_s: float, known: Callable[[], Sequence[bool]]
    ) -> bool:
        """Return whether measuring ends after ``rounds`` rounds and ``spent_s`` seconds.

        ``round_s``: seconds of the longest of the last rounds. ``known()`` says whether there is a
        verdict, one that no other process disturbed, and one that is precise.
        """
        spent_s, round_s = self.agree(spent_s, round_s)
        ahead_s = 0.0 if self._slow else round_s  # each slow step counts, also in part of a round
        if rounds >= 2 and self._past(spent_s + ahead_s / 2, _ROUNDS_END_AT, rounds, known):
            return True
        if rounds and self._slow and self.left_s(rounds, spent_s) < self._least_s:
            return True
        fewest = 3 if round_s > self.budget_s / 10 else _FEWEST_ROUNDS
        # After half of the budget a verdict is enough, and the interval need not be narrow.
        long = rounds >= _FEWEST_ROUNDS and spent_s + ahead_s > _STANDS_FROM * self.budget_s
        return rounds >= fewest and bool(self.agree(float(known()[1 if long else 2]))[0])

    def over(self, rounds: int, spent_s: float, known: Callable[[], Sequence[bool]]) -> bool:
        """Return whether to give up the running round after ``spent_s`` seconds."""
        return self._past(self.agree(spent_s)[0], 1.0, rounds, known)

    def left_s(self, rounds: int, spent_s: float) -> float:
        """Return the seconds until a block has to end."""
        return self.budget_s * (2 if self._may_double(rounds) else 1) - spent_s

    def _past(
        self, spent_s: float, share: float, rounds: int, known: Callable[[], Sequence[bool]]
    ) -> bool:
        """Return whether ``share`` of the budget, or of the doubled one if it counts, is spent."""
        if spent_s <= share * self.budget_s:
            return False
        if not self._may_double(rounds) or spent_s > share * 2 * self.budget_s:
            return True
        return bool(self.agree(float(known()[0]))[0])

    def _may_double(self, rounds: int) -> bool:
        """Return whether few steps fit into the budget, so that it may be doubled."""
        return rounds < 2 or self._slow

    def _batches(self, real: bool, batch_s: float, n: Numbers) -> int:
        # A random factor, so that blocks of an arm begin at different places of a loop that repeats
        # itself every so many batches.
        wanted = math.ceil(self._random.uniform(0.5, 1.5) * self._block_s / batch_s)
        batches = max(_FEWEST_STEPS, min(_MOST_STEPS, wanted))
        if real:
            if (self.workers or n.ahead) and n.real_s <= _SLOW_STEP_S:
                batches = max(batches, self.in_flight)
            turn = max(1, self.workers)  # workers deliver in turns
        else:
            turn = int(n.pool) if self.short_epochs or n.varied else 1  # equally often each batch
        return turn * math.ceil(batches / turn)

    def _refill(self, n: Numbers) -> int:
        """Return how many resident steps give the device as much work as it had left before."""
        # If the loader copies ahead but too slowly, the device waits for copies: work is left, but
        # the device does not run it.
        waits_for_copies = n.ahead and n.real_s > _COPIES_COST * n.step_s
        if n.writes or n.step_s <= 0 or waits_for_copies:
            return 0
        return min(round(n.lag_s / n.step_s), max(4, math.ceil(_MOST_REFILL_S / n.step_s)))

    def _warm_up_device(self, n: Numbers) -> int:
        """Return how many steps on resident batches go unmeasured before a block."""
        return max(WARM_UP_STEPS, self.asynchronous * _steps_for(_DEVICE_WARM_UP_S, n.step_s))

    def _warm_up_queue(self, n: Numbers) -> int:
        """Return how many real steps go unmeasured before a block.

        Twice as many as batches can be in flight, so that the queue reaches its steady state. If
        batches take long, fewer: the queue is brought to the level at which the last block ended.
        """
        if n.steady:
            return 0
        if not (self.workers or n.ahead):
            slow = n.real_s > _SLOW_STEP_S
            warm_up = 1 if slow else WARM_UP_STEPS + self._random.randrange(3)
        elif n.real_s > _SLOW_BATCH_S and n.ready >= 0:
            warm_up = self.workers + 1
        else:
            in_flight = min(self.in_flight, self.length or self.in_flight)
            warm_up = 2 * in_flight + self._random.randrange(1 + self.workers)
        if self.asynchronous:
            warm_up = max(warm_up, _steps_for(_DEVICE_WARM_UP_S, n.real_s))
        return warm_up


def _steps_for(seconds: float, step_s: float) -> int:
    return min(4096, math.ceil(seconds / max(1e-6, step_s)))
