"""Decide from the rates of trials which settings to try and which to choose.

    workers   2   4   8   16      twice as many while that is 3 % faster
              4   8   4   8       in turns, if single trials cannot separate two

Pinning is tried last, both ways.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from dataloaders.batches.tree import Batch
from dataloaders.tuning.result import Trial
from dataloaders.tuning.variant import Settings

WORTH = 0.03
"""The smallest relative gain that is worth a larger setting."""

DEFAULT_PREFETCH = 2

_NOISE = 0.1  # trials of half a second that differ by less may be in the wrong order
_MOST_TRIALS = 3  # of a setting whose rate decides; their median counts
# CPU seconds per second and core, above which no larger setting can be worth it.
_SATURATED = 1 / (1 + WORTH)

Make: TypeAlias = Callable[[Settings, str], Generator[Batch, None, Trial]]
Making: TypeAlias = Generator[Batch, None, None]
Trying: TypeAlias = Generator[Batch, None, bool]


class Spent(Exception):
    """There is no time for a trial."""


@dataclass
class Search:
    """Searches the settings of one loader: exhaust `run`, then read `choice`."""

    given: Settings  # of the loader as it is
    alone: Settings  # without workers: the choice if nothing else was tried
    make: Make  # makes a trial of settings, for a reason
    needed: float = math.inf  # samples per second above which faster loading gains nothing
    most: int = 0  # workers; 0 after workers failed
    fewest: int = 2  # workers to try; with a step, one can work beside it
    prefetch: int = DEFAULT_PREFETCH  # batches a worker, if they fit into shared memory
    shm_cap: Callable[[int], int | None] = lambda prefetch: None  # most workers, by prefetch factor
    pinning: bool = False  # whether there is a device to which batches are copied
    trials: list[Trial] = field(default_factory=list)
    _rates: dict[Settings, list[float]] = field(default_factory=dict)

    @property
    def rates(self) -> dict[Settings, float]:
        """Return samples per second over an epoch, the median of each setting's trials."""
        return {settings: statistics.median(each) for settings, each in self._rates.items()}

    @property
    def choice(self) -> Settings:
        """Return the smallest sufficient setting so far."""
        return self._choose(self.rates)

    @property
    def limited(self) -> bool:
        """Return whether more workers, for which there is no room, may be faster."""
        choice = self.choice
        no_room = self.most < self.fewest or choice.num_workers >= self.most
        return no_room and not self._is_enough(choice)

    def add(self, trial: Trial, *, comparable: bool = True) -> None:
        """Keep ``trial``; if it failed, drop the rates of its settings and try no more workers."""
        self.trials.append(trial)
        if trial.failed is not None:
            self._rates.pop(trial.settings, None)
            self.most = 0
        elif comparable and trial.epoch_samples_per_second is not None:
            self._rates.setdefault(trial.settings, []).append(trial.epoch_samples_per_second)

    def meets(self, settings: Settings) -> bool:
        """Return whether ``settings`` was tried and reaches the needed rate."""
        return self.rates.get(settings, -math.inf) >= self.needed

    def last_trial(self, settings: Settings) -> Trial | None:
        """Return the last trial of ``settings``; None if there was none."""
        return next((one for one in reversed(self.trials) if one.settings == settings), None)

    def run(self) -> Making:
        """Try the loader as it is, double the workers while that pays, then pin the other way."""
        if self.given.num_workers:
            yield from self._try(self.given, "the loader as it is")
        yield from self._double()
        choice = self.choice
        if self.pinning and 0 < choice.num_workers <= self.most:
            # Without workers, pinning only adds a copy to the loop.
            other = replace(choice, pin_memory=not choice.pin_memory)
            yield from self._try(other, "not pinned" if choice.pin_memory else "pinned")
            yield from self._decide_in_turns()

    def _double(self) -> Making:
        before, count, why = self.alone, self.fewest, "where it begins"
        while before.num_workers < count <= self.most:
            settings = self._at(count)
            if not (yield from self._try(settings, why)):
                return
            if before.num_workers or self.meets(settings):
                yield from self._decide_in_turns()
            rates = self.rates
            pays = rates.get(settings, 0.0) >= rates.get(before, 0.0) * (1 + WORTH)
            if self._is_enough(settings) or (before.num_workers and not pays):
                break
            before, count, why = settings, min(2 * count, self.most), "twice as many"
        yield from self._decide_in_turns()

    def _try(self, settings: Settings, why: str, most_trials: int = 1) -> Trying:
        """Make a trial unless there were enough; return whether ``settings`` works."""
        if settings.num_workers <= self.most and len(self._rates.get(settings, ())) < most_trials:
            self.add((yield from self.make(settings, why)))
        return settings in self._rates

    def _decide_in_turns(self) -> Making:
        """Repeat, in turns, trials of settings that may be chosen, until no lucky trial decides.

        A choice that just meets the need is repeated as well.
        """
        while self._rates:
            close = self._contenders()
            again = [one for one in close if len(self._rates[one]) < _MOST_TRIALS]
            again = [one for one in again if one.num_workers <= self.most]
            over = self.rates[close[0]] / self.needed - 1  # -1 without a need
            if not again or (len(close) == 1 and not 0 <= over < _NOISE):
                return
            for settings in again:
                if settings in self._rates:
                    yield from self._try(settings, "again, in turns", _MOST_TRIALS)

    def _contenders(self) -> list[Settings]:
        """Return the choice, and at most two others that may prove better.

        If the choice meets the need, the others are smaller.
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
        """Return the sufficient rate: the needed one, or 97 % of the best."""
        return min(max(rates.values(), default=0.0) * (1 - WORTH), self.needed)

    def _is_enough(self, settings: Settings) -> bool:
        """Return whether nothing larger can gain: it meets the need, or all cores are busy."""
        last = self.last_trial(settings)
        return self.meets(settings) or ((last and last.cpu_share) or 0.0) >= _SATURATED

    def _at(self, workers: int) -> Settings:
        """Return the setting for that many workers with the longest queues that fit."""
        caps = ((depth, self.shm_cap(depth)) for depth in (self.prefetch, DEFAULT_PREFETCH))
        fit = next((depth for depth, cap in caps if cap is None or workers <= cap), 1)
        return Settings(workers, fit, self.alone.pin_memory)
