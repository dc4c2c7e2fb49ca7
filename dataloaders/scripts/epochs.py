"""One epoch each: as the program's loop iterates it, and as the measurement iterates the loader.

program ──> Loop ──┬── the loader's own iterator: batches are watched, or just passed on
                   └── takeover.next_measured() ──> measurement ──> Epoch ──> the loader's own
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from dataloaders.batches.tree import Batch, map_tensors
from dataloaders.loader import CopiedBatches
from dataloaders.scripts.loops import Loader, Original, passing

if TYPE_CHECKING:
    from dataloaders.scripts.takeover import Seen, Takeover

__all__ = ["Epoch", "Loop"]

_MOST_KEPT = 4


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
        self._kept: list[Batch] | None = []

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
        if self._watched and self._kept is not None:
            if len(self._kept) < _MOST_KEPT:
                # In new containers: the loop may pop from its own before the measurement does.
                self._kept.append(map_tensors(batch, lambda leaf: leaf))
            else:
                self._kept = None
        return batch

    def _become_measured(self) -> None:
        batches, kept = self._batches, self._kept
        self._batches, self._kept, self._watched = None, None, False
        begun = None
        # Batches that the loader itself copies to a device have host batches under them, which
        # the check wants to see: there the epoch begins anew.
        if batches is not None and kept is not None and not isinstance(batches, CopiedBatches):
            begun = Epoch(self._takeover, kept, batches)
        del batches  # an epoch that nobody goes on with ends before the next one begins
        self._takeover.take(self, self._original, begun)


class Epoch:
    """Iterates one epoch of the loader taken, from its first batch on, for the measurement.

    Args:
        takeover: what takes the waits for its batches.
        first: batches that the program's loop had before, given again.
        batches: the others.
    """

    def __init__(self, takeover: Takeover, first: list[Batch], batches: Iterator[Batch]) -> None:
        self._takeover = takeover
        self._first = first
        self._steps = -1
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._first:
            return self._first.pop(0)
        takeover = self._takeover
        begin = time.perf_counter()
        batch = next(self.batches)
        # Not where the check takes batches for itself: without a step, or on a thread of its own.
        if self._steps != takeover.steps and takeover.thread is threading.current_thread():
            takeover.waits.append(time.perf_counter() - begin)
        self._steps = takeover.steps
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)  # the check reads the state of torch's queues
