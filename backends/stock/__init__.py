"""Iterate with torch's own iterator: the reference that every other backend must equal.

dataset in memory, default collation ──> iterators.py  torch's iterators, fetching by gathers
                                            gather.py  a batch of rows by one index_select
                                            order.py   torch's samplers as index tensors
everything else ───────────────────────> torch's own iterator
taken ahead by a thread (prefetch) ────> ahead/         torch's worker iterator, or the gather;
                                                        samplers stay on the loop's thread
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch.utils.data
from torch.utils.data.dataloader import _BaseDataLoaderIter

import dataloaders.loader
from dataloaders.backend import Ahead, Backend, Session, Specification
from dataloaders.batches.collation import collates_as_torch
from dataloaders.batches.tree import Batch
from dataloaders.batches.whole import WholeBatches
from dataloaders.plan import Plan
from dataloaders.seeding.seeded import Seeding
from dataloaders.specification import iterates_itself

from .ahead.gather import GatherEpoch
from .ahead.workers import AheadWorkers, WorkersEpoch
from .describe import describe
from .iterators import gathering_iterator, gathering_view, obstacle

__all__ = ["Stock"]


@dataclass(frozen=True)
class Stock(Backend):
    """Torch's own workers, queues and pinning; in-memory datasets by one gather a batch.

    Attributes:
        gather: whether a dataset of plain tensors in memory (TensorDataset, Subsets of it,
            StackDataset, a bare tensor or array) with torch's default collation is fetched by one
            indexed gather a batch. Batches and generator states equal torch's to the bit either
            way; False is for comparing the two.
        view: called with the loader, under ``seed=`` with its seeded view, and returns what is
            iterated in its place, with the same samplers: ``backend="dali"`` records so.
    """

    name: ClassVar[str] = "stock"
    gather: bool = True
    view: Callable[[Specification], Specification] | None = None

    def explain(self, loader: Specification) -> Plan:
        """Return every stage, the process it runs in, and whether batches are gathered."""
        try:
            own = _iterates_itself(loader)
            obstacle = None if own else self._obstacle(loader)
            return describe(loader, self.name, obstacle, own=own)
        except Exception as error:  # a loader may hold anything; explaining it must not fail
            note = f"this loader could not be read ({type(error).__name__}: {error}); torch may run"
            return Plan(self.name, notes=(note,))

    def takes_ahead(self, loader: Specification) -> bool:
        """Whether no user code makes batches in this process: workers do, or this package."""
        try:
            ours = isinstance(loader.collate_fn, WholeBatches) and collates_as_torch()
            gathers = self._obstacle(loader) is None
            return _is_torchs(loader) and (loader.num_workers > 0 or ours or gathers)
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
        if _iterates_itself(loader):
            return iter(loader)
        if isinstance(loader._iterator, AheadWorkers):
            loader._iterator = None  # its workers serve a thread: this loop gets torch's own
        gathers = self._backend._obstacle(loader) is None
        specification = self._view(loader, gathers)
        if not (loader.persistent_workers and loader.num_workers > 0):
            return self._iterator(specification, gathers)
        # Kept where torch keeps it: Lightning and others shut down ``loader._iterator``.
        if loader._iterator is None:
            loader._iterator = self._iterator(specification, gathers)
        else:
            loader._iterator._reset(specification)
        return loader._iterator

    def epoch_ahead(self) -> Ahead | None:
        loader = self._present()
        if not self._backend.takes_ahead(loader):
            return None
        gathers = self._backend._obstacle(loader) is None
        if loader.num_workers == 0:
            return GatherEpoch(self._iterator(self._view(loader, gathers), gathers))
        workers = loader._iterator if loader.persistent_workers else None
        if workers is not None and not isinstance(workers, AheadWorkers):
            return None  # workers that somebody else started
        specification = self._view(loader, gathers)
        if workers is not None:
            workers.begin(specification)
            return WorkersEpoch(workers)
        view = gathering_view(specification) if gathers else self._changed(specification)
        workers = AheadWorkers(view)  # not by torch's method, which would repeat its warnings
        if loader.persistent_workers:
            loader._iterator = workers
        return WorkersEpoch(workers)

    def close(self) -> None:
        loader = self._loader()
        if loader is not None and not _iterates_itself(loader):
            loader._iterator = None  # torch ends persistent workers when their iterator goes

    def _present(self) -> Specification:
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the loader of this session is gone: keep it while iterating")
        return loader

    def _view(self, loader: Specification, gathers: bool) -> Specification:
        """Return what is iterated: the loader, or with ``seed=`` its seeded view."""
        if getattr(loader, "seed", None) is None:
            return loader
        if self._seeding is None:
            self._seeding = Seeding()
        # Gathering runs no user code: only the order has to be seeded.
        return self._seeding.view(loader, samples=not gathers)

    def _iterator(self, loader: Specification, gathers: bool) -> _BaseDataLoaderIter:
        if gathers:
            return gathering_iterator(loader)
        return self._changed(loader)._get_iterator()

    def _changed(self, loader: Specification) -> Specification:
        return loader if self._backend.view is None else self._backend.view(loader)


def _iterates_itself(loader: Specification) -> bool:
    """Whether somebody else's class overrides torch's iteration, which must then be used.

    Never True for this package's DataLoader and its subclasses, whose ``__iter__`` is the caller.
    """
    kind = type(loader)
    return not issubclass(kind, dataloaders.loader.DataLoader) and iterates_itself(kind)


def _is_torchs(loader: Specification) -> bool:
    """Whether torch's own code makes the iterator of ``loader``."""
    own = type(loader)._get_iterator is not torch.utils.data.DataLoader._get_iterator
    return not own and not _iterates_itself(loader)
