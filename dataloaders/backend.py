"""Define Backend and Session, the interface of every way of making batches.

    Backend (frozen options) ──explain(loader)──> Plan       what will run where, or why it cannot
                             ──open(loader)─────> Session    streams, threads, rings, files
    Session                  ──epoch()──────────> batches    one pass over the loader's sampler
                             ──epoch_ahead()────> the same, for a background thread to take
                             ──close()                       release everything

Any ``torch.utils.data.DataLoader`` is a specification: dataset, sampler, collation, workers. A
backend may wrap another one, as in ``Prefetch(inner=Stock())``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.utils.data

from dataloaders.batches.tree import Batch
from dataloaders.errors import OptionError
from dataloaders.plan import Plan

__all__ = [
    "Ahead",
    "Backend",
    "Cancelled",
    "Remainder",
    "Session",
    "Specification",
    "check_images",
]

Specification: TypeAlias = "torch.utils.data.DataLoader[Any]"
"""Any torch DataLoader, read as a description of what to load."""


class Cancelled(Exception):
    """Raised on the thread that waits in a cancelled `Ahead`; users never see it."""


class Ahead(ABC):
    """The batches of one epoch, which a background thread takes ahead of use.

    ``next()`` runs nothing with global state: no sampler, dataset or user collation in this
    process. It may read worker queues and files, and make batches by this package's own code.

    Attributes:
        iterator: torch's iterator that makes the batches, from which the workers can be found; or
            None.
    """

    iterator: Any = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """Return the next batch. Any thread may call this, one at a time.

        Raises:
            StopIteration: the epoch is over.
            Cancelled: `cancel` was called.
        """

    @property
    def in_flight(self) -> int:
        """The number of batches that are already being made because ``iter()`` drew their samples.

        This many batches can be taken before the first `supply`.
        """
        return 0

    @abstractmethod
    def supply(self, batches: int) -> None:
        """Draw from the sampler for ``batches`` more batches, on the consumer's thread.

        The consumer calls this with 1 at each hand-over, after it took the batch. Torch draws at
        the same moments, so a loop that breaks leaves samplers and generators as torch would.

        Raises:
            Exception: the sampler's own, raised in place of this hand-over's batch, as torch does;
                or it is kept, and raised from ``next()`` at the batch that it concerns.
        """

    def handed_over(self) -> None:
        """Note that the consumer received a batch. Called on its thread, which may warn."""
        return

    @abstractmethod
    def cancel(self) -> None:
        """Make a waiting ``next()``, and every later one, raise `Cancelled` within about 0.1 s.

        Any thread may call this.
        """


class Remainder(ABC):
    """The part of a loader's work that prefetch does itself, ahead of use.

    The inner backend makes batches without it. One object serves one loader.

    Attributes:
        description: one sentence for the plan.
    """

    description: str = ""

    def changes(self, loader: Specification) -> dict[str, Any]:
        """Return the attributes of ``loader`` to replace for the next epoch."""
        return {}

    @abstractmethod
    def apply(self, batch: Batch, move: Callable[[Batch], Batch]) -> Batch:
        """Return the whole batch on the device; on the prefetch thread, on its current stream.

        Runs none of the user's code.

        Args:
            batch: what the loader made with `changes`.
            move: copies the host tensors of a batch to the device, if there is one.
        """

    def received(self, batch: Batch) -> Batch:
        """Return what the loop gets in place of ``batch``; on the loop's thread."""
        return batch


class Session(ABC):
    """What one backend holds open for one loader, across epochs.

    A session must not hold its loader strongly: a dropped loader must end its workers at once, not
    when the garbage collector finds a cycle.

    Nobody calls ``close()`` when a loader is dropped. An iterator may outlive its loader
    (``iter(DataLoader(...))`` is common), so it holds whatever it needs, and threads, files and
    streams end when the session and its last iterator are gone (``weakref.finalize``), also at
    interpreter exit. ``close()`` is called when the loader switches to another backend; a live
    iterator may then raise, but must not hang. A forked child opens a session of its own.
    """

    @abstractmethod
    def epoch(self) -> Iterator[Batch]:
        """Return an iterator over one epoch. Called once for each ``iter()``, on its thread.

        The inner loader's own ``iter()`` runs here, on the caller's thread, because torch draws its
        base seed and installs its signal handlers there. A second call while an earlier iterator is
        alive returns an independent iterator (with persistent workers: as torch does).
        """

    def epoch_ahead(self) -> Ahead | None:
        """Return the batches that `epoch` would return, for a background thread to take; or None.

        Called in place of `epoch`. None means that the batches run the user's own Python in this
        process, so that only `epoch`, iterated on the consumer's thread, can be used. In that case
        nothing has been drawn or started.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """End every thread, process, stream and file of this session. May be called twice."""


class Backend(ABC):
    """One way of making a loader's batches; subclasses are frozen dataclasses of its options.

    Attributes:
        name: the name in the registry.
        delivers: "host" if it leaves batches in host memory (``device=`` then adds a copy),
            "device" if it delivers on the loader's ``device`` itself.
    """

    name: ClassVar[str]
    delivers: ClassVar[Literal["host", "device"]] = "host"

    @abstractmethod
    def explain(self, loader: Specification) -> Plan:
        """Return the plan for ``loader``: where each stage runs, or the obstacle. Never raises."""

    def takes_ahead(self, loader: Specification) -> bool:
        """Whether a session for ``loader`` returns an `Ahead`. Never raises: plans ask."""
        return False

    @abstractmethod
    def open(self, loader: Specification) -> Session:
        """Open a session for ``loader``.

        Raises:
            BackendUnavailable: if the plan has an obstacle.
        """


def check_images(options: Any) -> None:
    """Check the options ``dtype`` and ``memory_format`` of a backend that makes images.

    Raises:
        OptionError: one of them has a value that it cannot take.
    """
    name, dtype, memory_format = type(options).__name__, options.dtype, options.memory_format
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise OptionError(f"{name}(dtype={dtype!r}): must be a float dtype such as torch.bfloat16")
    known = (torch.preserve_format, torch.contiguous_format, torch.channels_last)
    if memory_format not in known:
        raise OptionError(
            f"{name}(memory_format={memory_format!r}): must be one of {', '.join(map(str, known))}"
        )
