"""Backend and Session: what every way of making batches implements.

    Backend (frozen options) ──explain(loader)──> Plan       what will run where, or why it cannot
                             ──open(loader)─────> Session    streams, threads, rings, files
    Session                  ──epoch()──────────> batches    one pass over the loader's sampler
                             ──close()                       nothing stays behind

Any ``torch.utils.data.DataLoader`` is a specification: dataset, sampler, collation, workers.
A backend may wrap another one, ``Prefetch(inner=Stock())``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, TypeAlias

import torch.utils.data

from dataloaders.batch import Batch
from dataloaders.plan import Plan

__all__ = ["Backend", "Session", "Specification"]

Specification: TypeAlias = "torch.utils.data.DataLoader[Any]"
"""Any torch DataLoader, ours or not, read as the description of what to load."""


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

    @abstractmethod
    def open(self, loader: Specification) -> Session:
        """A session for ``loader``.

        Raises:
            BackendUnavailable: if the plan has an obstacle.
        """
