"""Decide which settings are tried and which is chosen, on the rates of trials alone.

    workers   2   4   8   16      twice as many while that is 3 % faster
              4   8   4   8       in turns, where single trials cannot tell two apart

Then, in the same way, the prefetch factor where batches differ in time; last, pinning both ways.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from dataloaders.batches.tree import Batch
from dataloaders.tuning.result import Trial
from dataloaders.tuning.variant import Settings

WORTH = 0.03
"""The smallest relative gain that is worth a larger setting."""

DEFAULT_PREFETCH = 2

_NOISE = 0.1  # two trials of half a second that differ by less may have come out the other way
_LOOKS = 3  # trials of a setting whose rate decides; their median counts
# CPU seconds per second and core from which the idle rest is not worth a larger setting.
_SATURATED = 1 / (1 + WORTH)
# Batches come in the order of their indices, so workers wait for the slowest one. A simulated queue
# of 16 workers reaches 0.90 of their rate with 2 batches each where the deviation of a batch's time
# is 0.3 of the mean, 0.80 where it is 0.5, and 0.97 and 0.94 with 8.
_UNEVEN = 0.3
_PREFETCH = (2, 4, 8)

Make: TypeAlias = Callable[[Settings, str], Generator[Batch, None, Trial]]
Making: TypeAlias = Generator[Batch, None, None]
Trying: TypeAlias = Generator[Batch, None, bool]


class Spent(Exception):
    """Raised by what makes trials when there is no time for another one."""


@dataclass
class Search:
    """Searches one loader's settings: exhaust `run`, then ask for the `choice`."""

    given: Settings  # the loader as it is
    alone: Settings  # without workers, which suffices where nothing else was tried
    make: Make  # makes a trial of settings, for a reason
    needed: float = math.inf  # samples per second from which faster loading is of no use
    most: int = 0  # workers; whoever makes the trials lowers it when one does not fit
    fewest: int = 2  # workers worth a trial: 2 without a step, beside which one could work
    variation: float = 0.0  # deviation of the time of a batch over its mean
    shm_cap: Callable[[int], int | None] = lambda prefetch: None  # workers for a prefetch factor
    pinning: bool = False  # whether there is a device to which pinned batches may be copied faster
    trials: list[Trial] = field(default_factory=list)
    _rates: dict[Settings, list[float]] = field(default_factory=dict)

    @property
    def rates(self) -> dict[Settings, float]:
        """Samples per second over an epoch, the median of each setting's trials."""
        return {settings: statistics.median(each) for settings, each in self._rates.items()}

    @property
    def choice(self) -> Settings:
        """The smallest setting by now that suffices."""
        return self._choose(self.rates)

    @property
    def limited(self) -> bool:
        """Whether more workers than there is room for may be faster."""
        choice = self.choice
        no_room = self.most < self.fewest or choice.num_workers >= self.most
        return no_room and not self._is_enough(choice)

    def add(self, trial: Trial, *, comparable: bool = True) -> None:
        """Keep ``trial``; if it failed, earlier rates of its settings count no more."""
        self.trials.append(trial)
        if trial.failed is not None:
            self._rates.pop(trial.settings, None)
        elif comparable and trial.epoch_samples_per_second is not None:
            self._rates.setdefault(trial.settings, []).append(trial.epoch_samples_per_second)

    def meets(self, settings: Settings) -> bool:
        """Return whether ``settings`` was tried and gives what is needed."""
        return self.rates.get(settings, 0.0) >= self.needed

    def last_trial(self, settings: Settings) -> Trial | None:
        """Return the last trial of ``settings``; None if there was none."""
        return next((one for one in reversed(self.trials) if one.settings == settings), None)

    def run(self) -> Making:
        """Double one number after the other."""
        if self.given.num_workers:
            yield from self._try(self.given, "the loader as it is")
        if self.fewest <= self.most:
            yield from self._climb(self.fewest, lambda: range(self.fewest, self.most + 1), self._at)
        # Where cores are busy, no worker waits for room in its queue.
        choice = self.choice
        if self.variation > _UNEVEN and choice.num_workers and not self._is_enough(choice):
            yield from self._climb(
                choice.prefetch_factor or 0,
                lambda: self._queues(choice.num_workers),
                lambda depth: replace(choice, prefetch_factor=depth),
                " batches ahead",
            )
        choice = self.choice
        if self.pinning and 0 < choice.num_workers <= self.most:
            # Without workers pinning is a copy more in the loop itself.
            other = replace(choice, pin_memory=not choice.pin_memory)
            yield from self._try(other, "not pinned" if choice.pin_memory else "pinned")
            yield from self._settle()

    def _climb(
        self,
        now: int,
        values: Callable[[], Sequence[int]],
        at: Callable[[int], Settings],
        what: str = "",
    ) -> Making:
        """Double ``now`` while that pays.

        ``values`` are those that there are, smallest first; trials may make them fewer.
        """
        if not (yield from self._try(at(now), f"where it begins{what and ' with'}{what}")):
            return
        if self.meets(at(now)):
            yield from self._settle()
        while values() and not self._is_enough(at(now)):
            more = next((value for value in values() if value >= 2 * now), values()[-1])
            if more <= now:
                break
            if not (yield from self._try(at(more), f"twice as many{what}")):
                if more in values():
                    break
                continue  # there is no room for so many: the most that there is room for
            yield from self._settle()
            rates = self.rates
            if rates.get(at(more), 0.0) < rates.get(at(now), 0.0) * (1 + WORTH):
                break
            now = more
        yield from self._settle()

    def _try(self, settings: Settings, why: str, looks: int = 1) -> Trying:
        """Make a trial unless there were ``looks``; return whether ``settings`` can be used."""
        if settings.num_workers <= self.most and len(self._rates.get(settings, ())) < looks:
            self.add((yield from self.make(settings, why)))
        return settings in self._rates

    def _settle(self) -> Making:
        """Try in turns those that may be chosen, and a choice that just meets the need.

        One lucky trial must not decide.
        """
        while self._rates:
            close = self._contenders()
            again = [one for one in close if len(self._rates[one]) < _LOOKS]
            again = [one for one in again if one.num_workers <= self.most]
            over = self.rates[close[0]] / self.needed - 1  # -1 without a need
            if not again or (len(close) == 1 and not 0 <= over < _NOISE):
                return
            for settings in again:
                if settings in self._rates:
                    yield from self._try(settings, "again, in turns", _LOOKS)

    def _contenders(self) -> list[Settings]:
        """Return the choice and at most two others that may be chosen if all are tried again.

        Once the choice meets the need, those are smaller ones only.
        """
        rates = self.rates
        least, choice = self._enough(rates), self._choose(rates)
        near = [
            settings
            for settings, rate in rates.items()
            if rate > least * (1 - _NOISE)
            and not (self.meets(choice) and self._order(settings) > self._order(choice))
        ]
        return sorted(near, key=lambda one: (one != choice, -rates[one]))[:3]

    def _choose(self, rates: Mapping[Settings, float]) -> Settings:
        least = self._enough(rates)
        enough = (settings for settings, rate in rates.items() if rate >= least)
        return min(enough, key=self._order, default=self.alone)

    def _order(self, settings: Settings) -> tuple[int, ...]:
        pins = settings.pin_memory != self.given.pin_memory
        return (pins, settings.num_workers, settings.prefetch_factor or 0)

    def _enough(self, rates: Mapping[Settings, float]) -> float:
        """Return the rate that suffices: what is needed, or within 3 % of the best."""
        return min(max(rates.values(), default=0.0) * (1 - WORTH), self.needed)

    def _is_enough(self, settings: Settings) -> bool:
        """Return whether nothing larger can help: the need is met, or all cores are busy."""
        last = self.last_trial(settings)
        return self.meets(settings) or ((last and last.cpu_share) or 0.0) >= _SATURATED

    def _at(self, workers: int) -> Settings:
        depth = DEFAULT_PREFETCH if DEFAULT_PREFETCH in self._queues(workers) else 1
        return Settings(workers, depth, self.alone.pin_memory)

    def _queues(self, workers: int) -> Sequence[int]:
        """Return the prefetch factors with which so many workers fit into shared memory."""
        caps = {depth: self.shm_cap(depth) for depth in _PREFETCH}
        return [depth for depth, cap in caps.items() if cap is None or workers <= cap]
