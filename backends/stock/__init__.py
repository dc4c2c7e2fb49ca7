"""Torch's own iterator: the reference that every other backend must equal.

dataset in memory, default collation ──> iterators.py  torch's iterators, fetching by gathers
                                            gather.py  a batch of rows by one index_select
                                            order.py   torch's samplers as index tensors
everything else ───────────────────────> torch's own iterator, untouched
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch.utils.data
from torch.utils.data.dataloader import _BaseDataLoaderIter

import dataloaders.loader
from dataloaders.backend import Backend, Session, Specification
from dataloaders.batch import Batch
from dataloaders.plan import Plan
from dataloaders.seeding import Seeding
from dataloaders.specification import iterates_itself

from .describe import describe
from .iterators import gathering_iterator, obstacle

__all__ = ["Stock"]


@dataclass(frozen=True)
class Stock(Backend):
    """torch's own workers, queues and pinning; in-memory datasets by one gather a batch.

    Attributes:
        gather: whether a dataset of plain tensors in memory (TensorDataset, Subsets of it,
            StackDataset, a bare tensor or array) under torch's default collation is fetched by
            one indexed gather a batch. The batches and all generator states are torch's, to the
            bit, either way; False is for comparing the two.
    """

    name: ClassVar[str] = "stock"
    gather: bool = True

    def explain(self, loader: Specification) -> Plan:
        """Every stage, the process it runs in, and whether batches are gathered."""
        try:
            own = _iterates_itself(loader)
            return describe(loader, self.name, None if own else self._obstacle(loader), own=own)
        except Exception as error:  # a loader may hold anything; explaining it must not fail
            note = f"this loader could not be read ({type(error).__name__}: {error}); torch may run"
            return Plan(self.name, notes=(note,))

    def open(self, loader: Specification) -> Session:
        """torch's iteration over ``loader``."""
        return _StockSession(loader, self)

    def _obstacle(self, loader: Specification) -> str | None:
        return obstacle(loader) if self.gather else "gather=False"


class _StockSession(Session):
    def __init__(self, loader: Specification, backend: Stock) -> None:
        self._loader = weakref.ref(loader)
        self._backend = backend
        self._seeding: Seeding | None = None

    def epoch(self) -> Iterator[Batch]:
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the loader of this session is gone: keep it while iterating")
        if _iterates_itself(loader):
            return iter(loader)
        gathers = self._backend._obstacle(loader) is None
        specification = self._view(loader, gathers)
        if loader.persistent_workers and loader.num_workers > 0:
            # Kept where torch keeps it: Lightning and others shut down ``loader._iterator``.
            if loader._iterator is None:
                loader._iterator = _iterator(specification, gathers)
            else:
                loader._iterator._reset(specification)
            return loader._iterator
        return _iterator(specification, gathers)

    def close(self) -> None:
        loader = self._loader()
        if loader is not None and not _iterates_itself(loader):
            loader._iterator = None  # torch ends persistent workers when their iterator goes

    def _view(self, loader: Specification, gathers: bool) -> Specification:
        """What is iterated: the loader; with ``seed=``, its seeded view."""
        if getattr(loader, "seed", None) is None:
            return loader
        if self._seeding is None:
            self._seeding = Seeding()
        # Gathering runs no code of the user's: only the order has to be seeded.
        return self._seeding.view(loader, samples=not gathers)


def _iterator(loader: Specification, gathers: bool) -> _BaseDataLoaderIter:
    return gathering_iterator(loader) if gathers else loader._get_iterator()


def _iterates_itself(loader: Specification) -> bool:
    """Whether a class that is not ours overrides torch's iteration: then it must be used.

    Never for our own DataLoader and its subclasses, whose ``__iter__`` is what called us.
    """
    kind = type(loader)
    return not issubclass(kind, dataloaders.loader.DataLoader) and iterates_itself(kind)
