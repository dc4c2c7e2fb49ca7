"""Iterate with torch's own iterators: the reference that every other backend must equal.

dataset in memory, default collation ──> gather.py         a batch of rows by one index_select
everything else ───────────────────────> torch's own iterator
taken ahead by a thread (prefetch) ────> workers_ahead.py  torch's worker iterator; or
                                         gather_ahead.py   the gather on the thread itself;
                                                           samplers stay on the loop's thread
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from dataloaders.backend import Ahead, Backend, Session, Specification
from dataloaders.batches.collation import collates_as_torch
from dataloaders.batches.tree import Batch
from dataloaders.batches.whole import WholeBatches
from dataloaders.errors import OptionError
from dataloaders.plan import Plan
from dataloaders.seeding.seeded import Seeding
from dataloaders.specification import other_iteration, own_iteration

from .describe import describe
from .gather import gathering_view, obstacle
from .gather_ahead import GatherEpoch
from .workers_ahead import AheadWorkers, WorkersEpoch

__all__ = ["Stock"]


@dataclass(frozen=True)
class Stock(Backend):
    """Torch's own workers, queues and pinning; in-memory datasets by one gather a batch.

    Attributes:
        gather: whether a dataset of plain tensors in memory (TensorDataset, Subsets of it,
            StackDataset, a bare tensor) with torch's default collation is fetched by one indexed
            gather a batch. Batches and generator states equal torch's to the bit either way; False
            is for comparing the two.
        view: called with the loader (under ``seed=`` with its seeded view); returns what is
            iterated instead, with the same samplers. ``backend="dali"`` records that way.
    """

    name: ClassVar[str] = "stock"
    gather: bool = True
    view: Callable[[Specification], Specification] | None = None

    def explain(self, loader: Specification) -> Plan:
        """Return every stage, the process it runs in, and whether batches are gathered."""
        try:
            own = own_iteration(loader)
            not_gathered = None if own is not None else self._obstacle(loader)
            return describe(own or loader, self.name, not_gathered, own=own is not None)
        except Exception as error:  # a loader may hold anything; explaining it must not fail
            note = f"this loader could not be read ({type(error).__name__}: {error}); torch may run"
            return Plan(self.name, notes=(note,))

    def takes_ahead(self, loader: Specification) -> bool:
        """Whether no user code makes batches in this process: workers do, or this package."""
        try:
            if other_iteration(loader) is not None:
                return False
            whole = isinstance(loader.collate_fn, WholeBatches) and collates_as_torch()
            return loader.num_workers > 0 or whole or self._obstacle(loader) is None
        except Exception:  # a loader may hold anything
            return False

    def open(self, loader: Specification) -> Session:
        """Open a session that iterates ``loader`` as torch does."""
        return _StockSession(loader, self)

    def _obstacle(self, loader: Specification) -> str | None:
        return obstacle(loader) if self.gather else "gather=False"


class _StockSession(Session):
    def __init__(self, loader: Specification, backend: Stock) -> None:
        self._loader = weakref.ref(loader)
        self._backend = backend
        self._seeding: Seeding | None = None

    def epoch(self) -> Iterator[Batch]:
        loader = self._present()
        own = own_iteration(loader)
        if own is not None:
            return iter(own)
        if isinstance(loader._iterator, AheadWorkers):
            loader._iterator = None  # its workers serve a thread: this loop gets torch's own
        gathers = self._backend._obstacle(loader) is None
        seeded = self._seeded(loader, gathers)
        if not (loader.persistent_workers and loader.num_workers > 0):
            return self._view(seeded, gathers)._get_iterator()
        # Kept where torch keeps it: Lightning and others shut down ``loader._iterator``.
        if loader._iterator is None:
            loader._iterator = self._view(seeded, gathers)._get_iterator()
        else:
            loader._iterator._reset(seeded)
        return loader._iterator

    def epoch_ahead(self) -> Ahead | None:
        loader = self._present()
        if not self._backend.takes_ahead(loader):
            return None
        gathers = self._backend._obstacle(loader) is None
        seeded = self._seeded(loader, gathers)
        if loader.num_workers == 0:
            return GatherEpoch(self._view(seeded, gathers)._get_iterator())
        workers = loader._iterator if loader.persistent_workers else None
        if workers is not None:
            if not isinstance(workers, AheadWorkers):
                return None  # workers that somebody else started
            workers.begin(seeded)
            return WorkersEpoch(workers)
        # Not made by torch's method, which would repeat its warnings.
        workers = AheadWorkers(self._view(seeded, gathers))
        if loader.persistent_workers:
            loader._iterator = workers
        return WorkersEpoch(workers)

    def close(self) -> None:
        loader = self._loader()
        if loader is not None and own_iteration(loader) is None:
            loader._iterator = None  # torch ends persistent workers when their iterator goes

    def _present(self) -> Specification:
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the loader of this session is gone: keep it while iterating")
        return loader

    def _seeded(self, loader: Specification, gathers: bool) -> Specification:
        """Return the loader, or with ``seed=`` its seeded view for the next epoch."""
        seed = getattr(loader, "seed", None)
        if seed is None:
            return loader
        if (other := other_iteration(loader)) is not None:
            raise OptionError(f"seed={seed}: {other}, which seed= cannot reach")
        if self._seeding is None:
            self._seeding = Seeding()
            loader._iterator = None  # workers that were started without a seed
        # Gathering runs no user code: only the order has to be seeded.
        return self._seeding.view(loader, int(seed), samples=not gathers)

    def _view(self, seeded: Specification, gathers: bool) -> Specification:
        """Return the loader that torch's iterator is made from."""
        if gathers:
            return gathering_view(seeded)
        return seeded if self._backend.view is None else self._backend.view(seeded)
