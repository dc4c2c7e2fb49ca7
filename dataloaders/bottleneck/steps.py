"""Log single steps on the host's clock: waits for batches, the longest ones, a timeline."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, NamedTuple

from dataloaders.measuring.feed import Feed
from dataloaders.measuring.intervals import Step

_MOST_WAITS = 100_000
_LONGEST = 4
_IN_TIMELINE = 100  # steps of each arm


class LongWait(NamedTuple):
    """Holds a long wait and the loader's batch that the loop waited for."""

    seconds: float
    epoch: int  # counted by the check, from 0
    batch: int  # of that epoch, from 0
    keys: Any  # indices that the sampler drew for it; None if not known


class StepLog:
    """Keeps the times of single steps.

    Attributes:
        waits: seconds in ``next()`` of the loader, of real steps.
        longest: the longest of these, in descending order.
        elsewhere: seconds of waiting for other loaders, by name.
        elsewhere_s: the sum of these.
        given: how many batches the step got.
    """

    def __init__(self) -> None:
        self.waits: deque[float] = deque(maxlen=_MOST_WAITS)
        self.longest: list[LongWait] = []
        self.elsewhere: dict[str, float] = {}
        self.elsewhere_s = 0.0
        self.given = 0
        self._steps: defaultdict[str, deque[tuple[float, float, float]]]
        self._steps = defaultdict(lambda: deque(maxlen=_IN_TIMELINE))

    def waited(self, seconds: float, feed: Feed) -> None:
        """Note the seconds that the loop waited for the batch that ``feed`` delivered last.

        The first batch of an epoch is left out, since the wait for it includes the epoch's start.
        """
        if feed.taken == 1:
            return
        self.waits.append(seconds)
        if len(self.longest) < _LONGEST or seconds > self.longest[-1].seconds:
            wait = LongWait(seconds, feed.epoch, feed.taken - 1, feed.keys)
            self.longest = sorted([*self.longest, wait], key=lambda one: -one.seconds)[:_LONGEST]

    def waited_elsewhere(self, name: str, seconds: float) -> None:
        """Note ``seconds`` of waiting for another loader."""
        self.elsewhere[name] = self.elsewhere.get(name, 0.0) + seconds
        self.elsewhere_s += seconds

    def step(self, arm: str, begin: float, given: float, done: float) -> None:
        """Note when the loop asked for a batch, got it, and finished its step."""
        self._steps[arm].append((begin, given, done))

    def clear(self) -> None:
        """Forget single steps, but not the waits for other loaders."""
        self.waits.clear()
        self.longest.clear()
        self._steps.clear()

    def timeline(self) -> dict[str, tuple[Step, ...]]:
        """Return the last steps of each arm; the first of all steps begins at 0."""
        zero = min((steps[0][0] for steps in self._steps.values()), default=0.0)
        timeline: dict[str, tuple[Step, ...]] = {}
        for arm, steps in self._steps.items():
            seconds = ((begin - zero, given - begin, done - given) for begin, given, done in steps)
            timeline[arm] = tuple(Step(*(round(each, 6) for each in one)) for one in seconds)
        return timeline
