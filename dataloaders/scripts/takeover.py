"""A running program's loops over its loaders: all pass by here, one is handed to a measurement.

    for batch in loader:           torch's or our DataLoader.__iter__, replaced in this process
        │
        ├── not the one ──> the loader's own iterator, untouched
        └── the one     ──> measure(loader, iterate), whose batches the program's loop gets instead,
                            past the end of the epoch, until it has enough: StopScript

The one is the first loader that looks like training: gradients are on when its first batch is
asked for, it has no length or at least `SHORTEST` batches, and a second batch is asked for (a
single ``next(iter(loader))`` is a look at the data). Or it is the one whose number was given.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.utils.data

from dataloaders.batches.tree import Batch, map_tensors
from dataloaders.loader import CopiedBatches, DataLoader
from dataloaders.scripts.target import StopScript
from dataloaders.specification import batches_in

__all__ = ["SHORTEST", "Measure", "Seen", "Takeover", "replaced_iter"]

SHORTEST = 4
"""Batches that an epoch must have for its loader to be taken over unasked."""

Loader: TypeAlias = "torch.utils.data.DataLoader[Any]"
Iterate: TypeAlias = Callable[[], Iterator[Batch]]
"""Starts a new epoch of the real loader, by its own ``__iter__``."""

Measure: TypeAlias = Callable[[Loader, Iterate], Iterable[Batch]]
"""What the chosen loop iterates instead; exhausted when it has measured enough. It may be
iterated again after the program broke its loop."""

Original: TypeAlias = Callable[[Any], Iterator[Batch]]


@dataclass
class Seen:
    """A loader that the program iterated.

    Attributes:
        number: 1 for the first loader that the program iterated, and so on.
        description: class, dataset, length and workers, in a few words.
        length: batches in an epoch; None if it has no length.
        why_not: why it was not taken over; None for the one that was.
    """

    number: int
    description: str
    length: int | None
    why_not: str | None = "another loader was taken over before it"


class Takeover:
    """While entered, watches every loop over a DataLoader and hands one loader to ``measure``.

    Args:
        measure: see `Measure`.
        number: take the loader of this number, whatever it is; None takes the first that looks
            like training.

    Attributes:
        seen: every loader iterated so far, in order.
        taken: the one handed to ``measure``, or None.
        steps: batches that the program's loop was given by ``measure``.
        beyond: batches that it was given past the end of an epoch, in the longest epoch.
    """

    def __init__(self, measure: Measure, number: int | None = None) -> None:
        self.seen: list[Seen] = []
        self.taken: Seen | None = None
        self.steps = 0
        self.beyond = 0
        self._measure = measure
        self._number = number
        self._stream: Iterable[Batch] = ()
        self._loaders: list[weakref.ref[Loader]] = []
        self._patches = replaced_iter(self._iterate)

    def __enter__(self) -> Takeover:
        self._patches.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.__exit__(None, None, None)

    def consider(self, seen: Seen) -> bool:
        """Whether ``seen`` may be taken over; asked when its first batch is asked for."""
        if self.taken is not None:
            return False
        if self._number is not None:
            if seen.number != self._number:
                seen.why_not = f"--loader {self._number} was asked for"
                return False
        elif not torch.is_grad_enabled():
            seen.why_not = "gradients were off: it does not look like training"
            return False
        elif seen.length is not None and seen.length < SHORTEST:
            seen.why_not = f"an epoch has fewer than {SHORTEST} batches"
            return False
        seen.why_not = "only one batch was asked for"
        return True

    def take(self, seen: Seen, loader: Loader, original: Original, begun: Begun) -> None:
        """Hand ``loader`` to the measurement; ``begun`` is its first epoch."""
        # Batches that the loader itself copies to a device have host batches behind them, which
        # the check wants to see: there the epoch begins anew.
        first = [] if isinstance(begun.batches, CopiedBatches) else [begun]

        def iterate() -> Iterator[Batch]:
            return first.pop() if first else original(loader)

        self.taken = seen
        seen.why_not = None
        self._stream = self._measure(loader, iterate)

    def stream(self, already: int) -> Iterator[Batch]:
        """The measurement's batches for one loop of the program.

        ``already`` batches were given to that loop before.
        """
        assert self.taken is not None
        return _Measured(self, iter(self._stream), self.taken.length, already)

    def _iterate(self, loader: Loader, original: Original) -> Iterator[Batch]:
        seen = self._find(loader)
        if self.taken is not None:
            return self.stream(already=0) if seen is self.taken else original(loader)
        return _Watched(self, seen, loader, original, original(loader))

    def _find(self, loader: Loader) -> Seen:
        for reference, seen in zip(self._loaders, self.seen, strict=True):
            if reference() is loader:
                return seen
        seen = Seen(len(self.seen) + 1, _describe(loader), batches_in(loader))
        self.seen.append(seen)
        self._loaders.append(weakref.ref(loader))
        return seen


@contextmanager
def replaced_iter(iterate: Callable[[Loader, Original], Iterator[Batch]]) -> Iterator[None]:
    """Inside: ``iter()`` of torch's DataLoader and of ours calls ``iterate(loader, original)``.

    Subclasses, and frameworks that call ``loader.__iter__()``, arrive there too. What
    ``iterate`` itself iterates, and a process forked meanwhile (a worker), get the originals.
    """
    process = os.getpid()
    inside = threading.local()

    def replacement(original: Original) -> Original:
        def __iter__(self: Loader) -> Iterator[Batch]:
            if os.getpid() != process or getattr(inside, "active", False):
                return original(self)
            inside.active = True
            try:
                return iterate(self, original)
            finally:
                inside.active = False

        return __iter__

    classes: list[Any] = [torch.utils.data.DataLoader, DataLoader]
    originals = [cls.__dict__["__iter__"] for cls in classes]
    for cls, original in zip(classes, originals, strict=True):
        cls.__iter__ = replacement(original)
    try:
        yield
    finally:
        for cls, original in zip(classes, originals, strict=True):
            cls.__iter__ = original


class _Watched:
    """One epoch of a loader that may be the one: decided at its first and second batch."""

    def __init__(
        self,
        takeover: Takeover,
        seen: Seen,
        loader: Loader,
        original: Original,
        batches: Iterator[Batch],
    ) -> None:
        self._takeover: Takeover | None = takeover  # None once it is decided
        self._seen = seen
        self._loader = loader
        self._original = original
        self._batches = batches
        self._first: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._takeover is None:
            return next(self._batches)
        if self._first:
            self._decide(self._takeover)
            return next(self._batches)
        if not self._takeover.consider(self._seen):
            self._takeover = None
            return next(self._batches)
        batch = next(self._batches)
        # In new containers: the loop may pop from its own before the measurement gets this one.
        self._first.append(map_tensors(batch, lambda leaf: leaf))
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def _decide(self, takeover: Takeover) -> None:
        self._takeover = None
        begun = Begun(self._first.pop(), self._batches)
        if takeover.taken is not None:
            return  # another loader was quicker: this one goes on as it is
        takeover.take(self._seen, self._loader, self._original, begun)
        self._batches = takeover.stream(already=1)


class Begun:
    """An epoch whose first batch was taken already, from its beginning."""

    def __init__(self, first: Batch, batches: Iterator[Batch]) -> None:
        self._first = [first]
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._first.pop() if self._first else next(self.batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)  # the check reads the state of torch's queues


class _Measured:
    """The measurement's batches, as one epoch of the program's loop."""

    def __init__(
        self, takeover: Takeover, batches: Iterator[Batch], length: int | None, already: int
    ) -> None:
        self._takeover = takeover
        self._batches = batches
        self._length = length
        self._handed = already

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise StopScript("measured enough") from None
        self._handed += 1
        self._takeover.steps += 1
        if self._length is not None and self._handed > self._length:
            self._takeover.beyond = max(self._takeover.beyond, self._handed - self._length)
        return batch

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this loader has no length")
        return self._length


def _describe(loader: Loader) -> str:
    length = batches_in(loader)
    batches = "no length" if length is None else f"{length} batches"
    size = "" if loader.batch_size is None else f" of {loader.batch_size}"
    workers = f"num_workers={loader.num_workers}"
    return f"{type(loader).__name__} of {type(loader.dataset).__name__}, {batches}{size}, {workers}"
