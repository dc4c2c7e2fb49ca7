"""What settings would gain that findings name: each is tried around the step, in turn with none.

round     plain │ autocast │ matmul-precision …     blocks of the step alone
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from dataloaders.batches.tree import Batch
from dataloaders.bottleneck.arms import ARMS
from dataloaders.bottleneck.blocks import Blocks
from dataloaders.errors import last_line
from dataloaders.findings import Facts, Finding
from dataloaders.findings.toggles import TOGGLES
from dataloaders.measuring.intervals import Interval, Timed, mean_of

_SHARE = 0.5
_FEWEST_ROUNDS, _MOST_ROUNDS = 4, 9


class Advice:
    """Holds what settings gain, for a check with ``budget_s`` seconds; nothing until tried."""

    def __init__(self, blocks: Blocks, budget_s: float, now: Callable[[], float]) -> None:
        self._blocks = blocks
        self._budget_s = budget_s
        self._now = now
        self._gains: dict[str, Interval] = {}
        self._tried: str | None = None  # the setting under which the step runs now
        self._untried: dict[str, str] = {}  # those under which it fails, and why

    def failed(self, error: BaseException) -> bool:
        """Return whether a setting that is tried made the step fail, and leave that out."""
        if self._tried is None or not isinstance(error, Exception):
            return False
        self._untried[self._tried] = f"; not measured: {last_line(error)}"
        return True

    def of(self, found: Sequence[Finding]) -> tuple[Finding, ...]:
        """Return findings with what their settings gain, or why that is not known."""
        return tuple(
            replace(
                one,
                gain=self._gains.get(one.name, one.gain),
                message=one.message + self._untried.get(one.name, ""),
                anyway=one.anyway or one.name in self._untried,  # it was asked for
            )
            for one in found
        )

    def find(self, names: Sequence[str], facts: Facts) -> Iterator[Batch]:
        """Yield blocks of the step alone, as it is and with each of the settings."""
        rounds: list[dict[str | None, float]] = []
        until = self._now() + _SHARE * self._budget_s
        while len(rounds) < _MOST_ROUNDS and (len(rounds) < _FEWEST_ROUNDS or self._now() <= until):
            rounds.append({})
            for name in (None, *names):
                ran = yield from self._block(name, facts, max(0.1, until - self._now()))
                if ran is not None:
                    rounds[-1][name] = ran.per_batch
        for name in names:  # the first round chose kernels
            saved = [one[None] - one[name] for one in rounds[1:] if one.keys() >= {None, name}]
            if len(saved) > 1 and name not in self._untried:
                self._gains[name] = mean_of(saved)

    def _block(
        self, name: str | None, facts: Facts, left_s: float
    ) -> Generator[Batch, None, Timed | None]:
        """Yield a block of the step alone, each step under setting ``name``; None: as it is."""
        # By another name: its steps are none of those that the timeline shows as synthetic.
        (arm,) = (replace(arm, name="advised") for arm in ARMS if arm.name == "synthetic")
        block = self._blocks.run(arm, left_s)
        self._tried = name
        try:
            while name not in self._untried:
                batch = next(block)
                with TOGGLES[name](facts) if name else nullcontext():
                    yield batch
        except StopIteration as end:
            took: Timed | None = end.value
            return took
        finally:
            self._tried = None
            block.close()
        return None
