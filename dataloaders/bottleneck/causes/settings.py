"""Measure the gain of settings that findings name: run the step as it is and with each, in turns.

round     plain │ autocast │ matmul-precision …     blocks of the step alone
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace

from dataloaders.batches.tree import Batch
from dataloaders.bottleneck.arms import ARMS
from dataloaders.bottleneck.blocks import Blocks
from dataloaders.bottleneck.schedule import WARM_UP_STEPS
from dataloaders.errors import last_line
from dataloaders.findings import TOGGLES, Facts, Finding, Watch
from dataloaders.measuring.intervals import BlockTimes, Interval, mean_of

_SHARE = 0.5
_FEWEST_ROUNDS, _MOST_ROUNDS = 4, 9


class TriedSettings:
    """Holds the gains of settings of the step; empty until `find`."""

    def __init__(self, blocks: Blocks, watch: Watch) -> None:
        self._blocks = blocks
        self._watch = watch
        self._gains: dict[str, Interval] = {}
        self._tried: str | None = None  # the setting under which the step runs now
        self._untried: dict[str, str] = {}  # settings that could not be measured, and why

    def failed(self, error: BaseException) -> bool:
        """Return whether the step failed under a setting that is being tried; leave it out."""
        if self._tried is None or not isinstance(error, Exception):
            return False
        self._untried[self._tried] = f"; not measured: {last_line(error)}"
        return True

    def of(self, found: Sequence[Finding]) -> tuple[Finding, ...]:
        """Return the findings with the gain of their setting, or why it was not measured."""
        return tuple(
            replace(
                one,
                gain=self._gains.get(one.name, one.gain),
                message=one.message + self._untried.get(one.name, ""),
            )
            for one in found
        )

    def find(self, found: Sequence[Finding], facts: Facts) -> Iterator[Batch]:
        """Yield blocks of the step alone: as it is, and with each setting that a finding names."""
        wanted = {one.name for one in found} - self._gains.keys() - self._untried.keys()
        names = [name for name in TOGGLES if name in wanted]
        most_s = _SHARE * self._blocks.schedule.budget_s
        block_s = (WARM_UP_STEPS + 1) * self._blocks.cycle * self._blocks.step_s
        if names and _FEWEST_ROUNDS * (1 + len(names)) * block_s > most_s:
            self._untried.update(dict.fromkeys(names, "; not measured: that needs a larger budget"))
            return
        rounds: list[dict[str | None, float]] = []
        now = self._blocks.now
        until = now() + most_s
        while names and (
            len(rounds) < _FEWEST_ROUNDS or (len(rounds) < _MOST_ROUNDS and now() <= until)
        ):
            rounds.append({})
            for name in (None, *names):
                ran = yield from self._block(name, facts, max(0.1, until - now()))
                if ran is not None:
                    rounds[-1][name] = ran.per_batch
        for name in names:  # without the first round, which chose kernels
            saved = [one[None] - one[name] for one in rounds[1:] if one.keys() >= {None, name}]
            if len(saved) > 1 and name not in self._untried:
                self._gains[name] = mean_of(saved)

    def _block(
        self, name: str | None, facts: Facts, left_s: float
    ) -> Generator[Batch, None, BlockTimes | None]:
        """Yield a block of the step alone, under setting ``name``; None: as it is."""
        # Under another name, so that the timeline does not show these steps as synthetic.
        (arm,) = (replace(arm, name="advised") for arm in ARMS if arm.name == "synthetic")
        block = self._blocks.run(arm, left_s)
        self._tried = name
        with ExitStack() as stack:
            stack.callback(block.close)
            stack.callback(setattr, self, "_tried", None)
            try:
                toggle = TOGGLES[name](facts, self._watch) if name else nullcontext(nullcontext)
                around_step = stack.enter_context(toggle)
            except Exception as error:  # such as no memory for rearranged weights
                self.failed(error)
            while name not in self._untried:
                try:
                    batch = next(block)
                except StopIteration as end:
                    took: BlockTimes | None = end.value
                    return took
                with around_step():
                    yield batch
        return None
