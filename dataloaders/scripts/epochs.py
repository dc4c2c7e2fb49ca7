"""One epoch as the program's loop iterates it: watched, and from where it is taken over, measured.

program ──> Loop ──┬── the loader's own iterator: batches are watched, or just passed on
                   └── takeover.next_measured() ──> measurement ──> the loader's own, a new epoch
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from dataloaders.batches.tree import Batch
from dataloaders.scripts.loops import Loader, Original, passing

if TYPE_CHECKING:
    from dataloaders.scripts.takeover import Seen, Takeover

__all__ = ["Loop"]


class Loop:
    """Iterates one epoch for the program's loop: the loader's own batches, or the measurement's.

    Attributes:
        seen, loader: what it iterates.
        trains: whether gradients were on when its first batch was asked for.
        given: batches that it was given.
        steps_before: steps of optimizers before its last batch was asked for.
        asked_at: when that was, by the clock.
    """

    def __init__(
        self,
        takeover: Takeover,
        seen: Seen,
        loader: Loader,
        original: Original,
        batches: Iterator[Batch] | None,
    ) -> None:
        self.seen = seen
        self.loader = loader
        self.trains = True
        self.given = 0
        self.steps_before = 0
        self.asked_at = 0.0
        self._takeover = takeover
        self._original = original
        self._batches = batches  # None: the measurement's
        self._watched = batches is not None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        takeover = self._takeover
        if self._watched and self.given and takeover.is_the_one(self):
            self._become_measured()
        self.steps_before = takeover.optimizers.steps
        self.asked_at = time.monotonic()
        with passing():  # loaders that a dataset iterates are its own business
            batch = takeover.next_measured(self) if self._batches is None else self._next_own()
        self.given += 1
        return batch

    def __len__(self) -> int:
        if self._batches is not None:
            return len(self._batches)  # type: ignore[arg-type]
        if self.seen.length is None:
            raise TypeError("this loader has no length")
        return self.seen.length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches" or self._batches is None:
            raise AttributeError(name)
        return getattr(self._batches, name)

    def stand_aside(self) -> None:
        """Give the loader's own batches from now on, whatever happens."""
        self._watched = False

    def _next_own(self) -> Batch:
        assert self._batches is not None
        takeover = self._takeover
        if not self.given:
            self.trains = torch.is_grad_enabled()
            self._watched = self._watched and takeover.may_be_the_one(self)
        batch = next(self._batches)
        if takeover.taken not in (None, self.seen) and self.trains:
            takeover.waited_for(self, time.monotonic() - self.asked_at)
        return batch

    def _become_measured(self) -> None:
        # The measurement begins an epoch of its own, after this one's workers have ended.
        self._batches, self._watched = None, False
        self._takeover.take(self, self._original)
