"""Decide which settings are tried and which is chosen, on rates alone: no clock, no loader.

    workers   0   2   4   8   16        twice as many while that is 3 % faster
                        6               what lies between, where it may do
                        6   8   6   8   in turns, where single trials cannot tell two apart

`Search.run` yields the trial that it asks for and is sent the `Trial` that was made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias, TypeVar

from dataloaders.measuring.intervals import Interval
from dataloaders.tuning.result import Trial
from dataloaders.tuning.variant import Settings

__all__ = [
    "DEFAULT_PREFETCH",
    "WORTH",
    "Ask",
    "Asks",
    "ComputingStep",
    "Need",
    "Search",
    "choose",
    "contenders",
]

T = TypeVar("T")

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
_DEEPER = (8, 4)


class Ask(NamedTuple):
    """A trial to be made.

    Attributes:
        settings: what is to be tried.
        why: why.
        copied: whether each batch is to be copied to the device, where there is no step.
    """

    settings: Settings
    why: str
    copied: bool = False


Asks: TypeAlias = Generator[Ask, Trial, T]


@dataclass(frozen=True)
class Need:
    """The rate from which faster loading is of no use.

    Attributes:
        samples_per_second: what is needed; None if faster is always better.
        from_step: whether a step was measured; else the user gave the rate.
    """

    samples_per_second: Interval | None = None
    from_step: bool = False

    @property
    def rate(self) -> float:
        """Samples per second that suffice; infinite if faster is always better."""
        if self.samples_per_second is None:
            return math.inf
        # A step's rate is measured, and the loop around it costs something too; a rate that the
        # user gives is meant.
        return self.samples_per_second.estimate * (1 - WORTH if self.from_step else 1)

    def __str__(self) -> str:
        if self.samples_per_second is None:
            return ""
        who = "the step takes" if self.from_step else "needed are"
        return f"{who} {self.samples_per_second.estimate:,.0f} samples/s"


def choose(rates: Mapping[Settings, float], need: Need, fallback: Settings) -> Settings:
    """Return the smallest setting that suffices; ``fallback`` if there is none."""
    least = _enough(rates, need)
    return min((s for s, r in rates.items() if r >= least), key=lambda s: s.size, default=fallback)


def contenders(rates: Mapping[Settings, float], need: Need) -> list[Settings]:
    """Return the choice and at most two others that may be chosen if all are tried again.

    Once the choice meets the need, those are smaller ones only. ``rates`` must not be empty.
    """
    least = _enough(rates, need)
    choice = choose(rates, need, max(rates, key=rates.__getitem__))
    met = rates[choice] >= need.rate
    near = [
        settings
        for settings, rate in rates.items()
        if rate > least * (1 - _NOISE) and not (met and settings.size > choice.size)
    ]
    near.sort(key=lambda settings: (settings != choice, -rates[settings]))
    return near[:3]


@dataclass
class Search:
    """Searches one loader's settings: `run` it, then ask for its `choice`.

    Attributes:
        given: the loader as it is.
        alone: its setting without workers, which suffices where nothing else was tried.
        need: what suffices.
        most: the most workers; whoever makes the trials lowers it when one does not fit.
        fewest: the fewest workers worth a trial: 2 without a step, beside which one could work.
        cores: usable ones.
        variation: deviation of the time of a batch over its mean.
        shm_cap: for a prefetch factor, the most workers that shared memory holds; None: any.
        options: by name, the numbers of the backend's options that may be tried.
        pinning: whether there is a device to which pinned batches may be copied faster.
        step: a step that computes on the cores that the workers need, or None.
        trials: all that were made, in order.
        pin_memory: what was chosen, and ``pin_gain``, how much faster that is.
    """

    given: Settings
    alone: Settings
    need: Need = field(default_factory=Need)
    most: int = 0
    fewest: int = 2
    cores: int = 1
    variation: float = 0.0
    shm_cap: Callable[[int], int | None] = lambda prefetch: None
    options: Mapping[str, Sequence[int]] = field(default_factory=dict)
    pinning: bool = False
    step: ComputingStep | None = None
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pin_memory, self.pin_gain = self.alone.pin_memory, 1.0
        self._rates: dict[Settings, list[float]] = {}

    @property
    def rates(self) -> dict[Settings, float]:
        """Samples per second over an epoch, the median of each setting's trials."""
        return {settings: statistics.median(each) for settings, each in self._rates.items()}

    @property
    def choice(self) -> Settings:
        """The best by now, its pinning left as it was for all trials."""
        return choose(self.rates, self.need, self.alone)

    @property
    def choice_for_auto(self) -> Settings:
        """The best by now that leaves the step's threads as they are."""
        kept = {one: rate for one, rate in self.rates.items() if one.step_threads is None}
        return choose(kept, self.need, self.alone)

    @property
    def limited(self) -> bool:
        """Whether more workers than there is room for may be faster."""
        choice = self.choice_for_auto
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
        return self.rates.get(settings, 0.0) >= self.need.rate

    def last_trial(self, settings: Settings) -> Trial | None:
        """Return the last trial of ``settings``; None if there was none."""
        return next((one for one in reversed(self.trials) if one.settings == settings), None)

    def run(self, *, workers: bool = True) -> Asks[None]:
        """Ask for one trial after the other; without ``workers`` for the backend's options only."""
        if workers:
            if self.given.num_workers:
                yield from self._try(self.given, "the loader as it is")
            yield from self._search_workers()
            yield from self._search_prefetch()
            yield from self._search_step_threads()
        if not self._rates and self.options:
            # In this process a trial of its options would open the dataset.
            yield from self._try(self._at(1), "the backend's options are tried with a worker")
        if self._rates:
            for name, values in self.options.items():
                yield from self._search_option(name, values)
        yield from self._search_pinning()

    def _search_workers(self) -> Asks[None]:
        first = min(self.fewest, self.most)
        if first >= self.fewest:
            yield from self._walk(first, lambda: range(self.fewest, self.most + 1), self._at)

    def _search_prefetch(self) -> Asks[None]:
        choice = self.choice
        if choice.num_workers == 0 or self.variation <= _UNEVEN or self._is_enough(choice):
            return  # where cores are busy, no worker waits for room in its queue
        for prefetch in _DEEPER:
            cap = self.shm_cap(prefetch)
            if cap is None or choice.num_workers <= cap:
                deeper = replace(choice, prefetch_factor=prefetch)
                yield from self._try(deeper, "batches differ in time: a longer queue evens it out")
                yield from self._settle()
                return

    def _search_step_threads(self) -> Asks[None]:
        """Try fewer threads for the step.

        The threads of one computation wait for each other, and spin meanwhile: one of them whose
        core a worker has taken keeps all of them waiting.
        """
        best = self.choice
        if self.step is None or self.meets(best) or not self.most:
            return
        count = best.num_workers or max(1, min(self.most, self.cores, self.step.workers_to_keep_up))
        left = self.cores - math.ceil(count * self.step.cores_per_worker)
        fewer = max(1, min(self.step.threads - 1, left))
        base = best if best.num_workers else self._at(count)

        def at(workers: int) -> Settings:
            return replace(base, num_workers=workers, step_threads=fewer)

        why = "fewer threads for the step leave cores to the workers"
        if (yield from self._try(at(count), why)) and self.rates[at(count)] >= self.rates[best]:
            yield from self._walk(count, lambda: range(1, self.most + 1), at)

    def _search_option(self, name: str, values: Sequence[int]) -> Asks[None]:
        choice = self.choice
        now = choice.numbers[name]
        yield from self._walk(
            now, lambda: values, lambda value: choice.with_option(name, value), f" {name}"
        )

    def _search_pinning(self) -> Asks[None]:
        """Try the choice pinned and not pinned, each batch copied to the device."""
        choice = self.choice
        if not self.pinning or not 0 < choice.num_workers <= self.most:
            return  # without workers pinning is a copy more in the loop itself
        other = not choice.pin_memory
        rates: dict[bool, list[float]] = {choice.pin_memory: [], other: []}
        for _ in range(2):
            for pinned, each in rates.items():
                why = "pinned, with the copy to the device" if pinned else "the same, not pinned"
                trial = yield Ask(replace(choice, pin_memory=pinned), why, copied=True)
                if trial.samples_per_second is None or trial.failed is not None:
                    return
                self.trials.append(trial)
                each.append(trial.samples_per_second.estimate)
        gain = statistics.mean(rates[other]) / statistics.mean(rates[choice.pin_memory])
        if gain >= 1 + WORTH:
            self.pin_memory, self.pin_gain = other, gain

    def _walk(
        self,
        now: int,
        values: Callable[[], Sequence[int]],
        at: Callable[[int], Settings],
        what: str = "",
    ) -> Asks[None]:
        """Double ``now`` while that pays, else halve it while that suffices; then try between.

        ``values`` are those that there are, smallest first; trials may make them fewer.
        """
        if not (yield from self._try(at(now), "where it begins" + (what and f" with{what}"))):
            return
        if self.meets(at(now)):
            yield from self._settle()
        below = above = 0  # the neighbours of `now` that were tried
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
            if rates.get(at(more), -1.0) < rates.get(at(now), 0.0) * (1 + WORTH):
                above = more
                break
            below, now = now, more
        while values() and not below:
            less = max((value for value in values() if 2 * value <= now), default=values()[0])
            if less >= now or not (yield from self._try(at(less), f"half as many{what}")):
                break
            yield from self._settle()
            if self.rates.get(at(less), -1.0) < _enough(self.rates, self.need):
                below = less
                break
            above, now = 0, less
        for low, high in ((below, now), (now, above)):
            between = [value for value in values() if low < value < high]
            if not low or not between:
                continue
            value = between[len(between) // 2]
            lower, higher = (self.rates.get(at(each), 0.0) for each in (low, high))
            # More of them do not make each of them faster.
            may_do = lower * value / low >= _enough(self.rates, self.need)
            if may_do and higher >= lower * (1 - _NOISE):
                yield from self._try(at(value), f"between {low} and {high}{what}")
        yield from self._settle()

    def _try(self, settings: Settings, why: str, looks: int = 1) -> Asks[bool]:
        """Ask for a trial unless there were ``looks``; return whether ``settings`` can be used."""
        fits = settings.num_workers <= self.most
        if fits and len(self._rates.get(settings, ())) < looks:
            self.add((yield Ask(settings, why)))
        return settings in self._rates

    def _settle(self) -> Asks[None]:
        """Try in turns those that may be chosen, and a choice that just meets the need.

        One lucky trial must not decide.
        """
        while self._rates:
            close = contenders(self.rates, self.need)
            again = [
                one
                for one in close
                if len(self._rates[one]) < _LOOKS and one.num_workers <= self.most
            ]
            over = self.rates[close[0]] / self.need.rate - 1  # -1 without a need
            if not again or (len(close) == 1 and not 0 <= over < _NOISE):
                return
            for settings in again:
                if settings in self._rates:
                    yield from self._try(settings, "again, in turns", _LOOKS)

    def _at(self, workers: int) -> Settings:
        cap = self.shm_cap(DEFAULT_PREFETCH)
        prefetch = DEFAULT_PREFETCH if cap is None or workers <= cap else 1
        return Settings(workers, prefetch, self.alone.pin_memory, self.alone.backend)

    def _is_enough(self, settings: Settings) -> bool:
        """Return whether nothing larger can help: the need is met, or all cores are busy."""
        last = self.last_trial(settings)
        return self.meets(settings) or ((last and last.cpu_share) or 0.0) >= _SATURATED


@dataclass(frozen=True)
class ComputingStep:
    """A step that computes on the CPU with torch's threads.

    Attributes:
        threads: how many it has.
        workers_to_keep_up: how many make a batch in the time of a step.
        cores_per_worker: CPU seconds per second of a worker that does not wait for its queue.
    """

    threads: int
    workers_to_keep_up: int
    cores_per_worker: float


def _enough(rates: Mapping[Settings, float], need: Need) -> float:
    """Return the rate from which a setting suffices: what is needed, or within 3 % of the best."""
    return min(max(rates.values(), default=0.0) * (1 - WORTH), need.rate)
