"""Backend and Session: what every way of making batches implements.

    Backend (frozen options) ──explain(loader)──> Plan       what will run where, or why it cannot
                             ──open(loader)─────> Session    streams, threads, rings, files
    Session                  ──epoch()──────────> batches    one pass over the loader's sampler
                             ──epoch_ahead()────> the same, to be taken on a thread of ours
                             ──close()                       nothing stays behind

Any ``torch.utils.data.DataLoader`` is a specification: dataset, sampler, collation, workers.
A backend may wrap another one, ``Prefetch(inner=Stock())``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch.utils.data

from dataloaders.batches.tree import Batch
from dataloaders.plan import Plan

__all__ = ["Ahead", "Backend", "Cancelled", "Session", "Specification", "Tunable"]

Specification: TypeAlias = "torch.utils.data.DataLoader[Any]"
"""Any torch DataLoader, ours or not, read as the description of what to load."""


class Cancelled(Exception):
    """What a cancelled `Ahead` raises on the thread that waits in it; no user ever sees it."""


class Ahead(ABC):
    """An epoch's batches, taken ahead of use on another thread than the consumer's.

    Nothing with global state may run in ``next()``: no sampler, no dataset, no collation of the
    user's in this process. Worker queues, file reads and our own gathers may. What has to run on
    the consumer's thread (samplers draw from the process-wide generators) runs in `supply`.
    """

    def __iter__(self) -> Iterator[Batch]:
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """The next batch; on any thread, one at a time.

        Raises:
            StopIteration: the epoch is over.
            Cancelled: `cancel` was called.
        """

    @property
    def in_flight(self) -> int:
        """Batches whose samples were drawn at ``iter()`` and are being made already.

        As many can be taken before the first `supply`.
        """
        return 0

    @property
    def iterator(self) -> object | None:
        """Torch's iterator that makes the batches, for whoever asks it for its workers; or None."""
        return None

    @abstractmethod
    def supply(self, batches: int) -> None:
        """Draw from the sampler for ``batches`` batches more; on the consumer's thread.

        Called with 1 at each hand-over, after the batch was taken, as torch draws one batch's
        samples for each batch that it hands over: so a loop that breaks leaves samplers and
        generators where torch would.

        Raises:
            Exception: the sampler's own, to be raised in place of the batch of this hand-over, as
                torch does; or it is kept and raised by ``next()`` at the batch that it concerns.
        """

    def handed_over(self) -> None:
        """Told of each batch that the consumer gets; on its thread, which may be warned."""
        return

    @abstractmethod
    def cancel(self) -> None:
        """Make a ``next()`` that waits, and every later one, raise `Cancelled` at once.

        On any thread. "At once" is within about 0.1 s.
        """


class Session(ABC):
    """What one backend holds open for one loader, across epochs.

    A session must not hold its loader strongly: the loader owns the session, and a dropped
    loader must end its workers at once, not when the garbage collector finds a cycle.

    Who ends what: nobody calls ``close()`` when a loader is dropped. An iterator outlives its
    loader (``iter(DataLoader(...))`` is common), so an iterator must hold whatever it needs, and
    threads, files and streams must end when the session and its last iterator are gone
    (``weakref.finalize``), at interpreter exit too. ``close()`` is called when the loader turns
    to another backend; a live iterator may then raise, but must not hang. In a forked child
    nothing is called: the child opens a session of its own.
    """

    @abstractmethod
    def epoch(self) -> Iterator[Batch]:
        """An iterator over one epoch. Called on the consumer's thread, once for each ``iter()``.

        The inner loader's own ``iter()`` runs here, on the caller's thread: torch draws its base
        seed and installs its signal handlers there. A second call while an earlier iterator is
        alive gives an independent iterator (with persistent workers: as torch does).
        """

    def epoch_ahead(self) -> Ahead | None:
        """The same epoch as `epoch` gives, for a thread to take; called in place of it.

        None, if its batches run the user's own Python in this process: then only `epoch` will
        do, iterated on the consumer's thread. Nothing may have been drawn or started by then.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """End every thread, process, stream and file of this session. Safe to call twice."""


class Backend(ABC):
    """One way of making a loader's batches; subclasses are frozen dataclasses of its options.

    Attributes:
        name: the name under which the registry knows it.
        delivers: "host" if it leaves batches in host memory (a ``device=`` then adds a copy),
            "device" if it takes the loader's ``device`` itself.
        same_samples: whether it yields torch's own samples in torch's own order (synthetic does
            not).
    """

    name: ClassVar[str]
    delivers: ClassVar[Literal["host", "device"]] = "host"
    same_samples: ClassVar[bool] = True

    @abstractmethod
    def explain(self, loader: Specification) -> Plan:
        """The plan for ``loader``: where each stage will run, or the obstacle. Never raises."""

    def takes_ahead(self, loader: Specification) -> bool:
        """Whether a session for ``loader`` gives an `Ahead`; for plans, so never raises."""
        return False

    def tunable(self, loader: Specification) -> Tunable | None:
        """Which of its own options tuning may choose for ``loader``; never raises.

        None: it has none, or cannot serve the loader. What is tuned are then torch's workers.
        """
        return None

    @abstractmethod
    def open(self, loader: Specification) -> Session:
        """A session for ``loader``.

        Raises:
            BackendUnavailable: if the plan has an obstacle.
        """


@dataclass(frozen=True)
class Tunable:
    """What tuning may choose of a backend's own options for one loader.

    Attributes:
        backend: the backend as it would serve the loader now, with a number in place of "auto".
        values: by option, the numbers that may be worth trying, smallest first; the one that
            ``backend`` has is among them. What matters most comes first.
        workers: whether torch's workers take part, so that their number is to be chosen too.
    """

    backend: Backend
    values: Mapping[str, Sequence[int]]
    workers: bool
