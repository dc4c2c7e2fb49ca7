"""Iterate a loader over a cache in place of its dataset; make batches at once if that is proved.

    sampler ──> rows ──> Batches ──> the batch                  proved equal to torch's
                            └─None─> samples ──> default_collate
    any other loader ──> cached[row], one by one, by stock ──> floats made at once, if proved

Dataset and functions are compared at each ``iter()``, because torch would read them again:

    dataset.transform = gentler        another object          ┐
    dataset.transform[0].size = 64     options of torchvision's│ the cache is opened again
    dataset.append(sample)             another length          │
    loader.collate_fn = other          another function        ┘
    mine.strength = 2                  the same object, which runs live: nothing to do
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from dataloaders import registry
from dataloaders.backend import Ahead, Session, Specification
from dataloaders.batches.tree import Batch
from dataloaders.batches.whole import RowNumbers, ShowsDataset
from dataloaders.cache import CachedDataset
from dataloaders.cache.sample.cut import equal_state
from dataloaders.cache.sample.sample import Classes, namedtuples_in
from dataloaders.errors import CacheError
from dataloaders.replaying.tail import DeviceTail
from dataloaders.specification import show_workers, state_of, view_of
from dataloaders.transforms.find import find_chains

from .batches import Batches, finishes_floats, proved
from .floats import finishing

if TYPE_CHECKING:
    from . import H5

__all__ = ["H5Session"]


class H5Session(Session):
    """Iterates ``loader`` over its cache, which is opened again when the dataset has changed.

    Args:
        options: open the cache, or build it.
        loader: the loader; the session does not keep it alive.
    """

    def __init__(self, options: H5, loader: Specification) -> None:
        self._options = options
        self._loader = weakref.ref(loader)
        self._dataset: Any = None
        self._snapshot: tuple[Any, list[Any]] = None, []
        self._view: Specification | None = None
        self._changed: dict[str, Any] = {}
        self._batches: Batches | None = None
        self._inner: Session | None = None

    def epoch(self) -> Iterator[Batch]:
        """Iterate the loader once."""
        iterator = self._opened().epoch()
        self._begin(iterator)
        return iterator

    def epoch_ahead(self) -> Ahead | None:
        """Iterate the loader once, for a thread that runs ahead."""
        if self._loader() is None:
            return None
        ahead = self._opened().epoch_ahead()
        if ahead is not None:
            self._begin(ahead.iterator)
        return ahead

    def close(self) -> None:
        """End the threads and the inner session."""
        if self._inner is not None:
            self._inner.close()
        if self._batches is not None:
            self._batches.close()
        self._inner = self._view = self._batches = self._dataset = None
        show_workers(self._loader(), None)

    def _begin(self, iterator: Any) -> None:
        if self._batches is not None:
            # Torch draws this seed at iter() anyway, so nothing more is drawn.
            self._batches.begin(int(iterator._base_seed))
        show_workers(self._loader(), self._view)

    def _opened(self) -> Session:
        loader = self._loader()
        if loader is None:
            raise RuntimeError("the loader of this session is gone: keep it while iterating")
        now, kept = _snapshot(loader)
        # As in torch, persistent workers keep what they started with.
        stay = loader.persistent_workers and loader.num_workers > 0
        is_other = self._dataset is not loader.dataset or (not stay and self._snapshot[0] != now)
        if self._inner is None or is_other:
            self.close()
            cached = self._options.cached(loader)
            if len(cached) != len(loader.dataset):  # type: ignore[arg-type]
                raise CacheError(
                    f"{cached.path} left out {len(cached.failed)} samples, so its rows have other "
                    "numbers than the dataset's; use CachedDataset as the dataset"
                )
            if cached is not loader.dataset:
                cached.namedtuples = _namedtuples(cached, loader)
            self._dataset, self._snapshot = loader.dataset, (now, kept)
            self._inner = self._over(cached, loader)
        elif self._view is not None:  # take over the epoch, and what the user has changed
            self._view.__dict__.update(state_of(loader), **self._changed)
        return self._inner

    def _over(self, cached: CachedDataset, loader: Specification) -> Session:
        """Return stock's session of ``loader`` with ``cached`` in the place of its dataset."""
        view = None
        self._changed = {"dataset": cached}
        if loader.collate_fn is default_collate and loader.batch_sampler is not None:
            batches = proved(cached, self._options.threads, self._options.puts_off)
            if isinstance(batches, Batches):
                self._batches = batches
                init = ShowsDataset(loader.worker_init_fn)
                self._changed = {
                    "dataset": RowNumbers(cached),
                    "collate_fn": batches,
                    "worker_init_fn": init,
                }
            elif finishes_floats(cached):
                view = DeviceTail.recorded if self._options.puts_off else finishing
        self._view = view_of(loader, **self._changed)
        return registry.load("stock")(view=view).open(self._view)  # type: ignore[call-arg]


def _snapshot(loader: Specification) -> tuple[Any, list[Any]]:
    """Return what shows a change of the dataset, without reading a sample, or of the functions.

    The first has the ids of the second, the transforms and functions, which have to be kept: the
    id of a dead object may be given to another one.
    """
    dataset: Any = loader.dataset
    members = [member for found in find_chains(dataset) for member in found.members]
    kept = [member.transform for member in members] + [loader.collate_fn, loader.worker_init_fn]
    if isinstance(dataset, CachedDataset):
        kept.append(dataset.transform)
    states = [equal_state(each.transform) for each in members if each.torchvision is not None]
    return (len(dataset), states, list(map(id, kept))), kept


def _namedtuples(cached: CachedDataset, loader: Specification) -> Classes:
    """Return the loaded namedtuple classes with the names and fields that the file has.

    Of several that are alike, the one from the dataset's module is returned.
    """
    wanted = namedtuples_in(cached.index.structure)
    found: Classes = {}
    kinds: list[Any] = [tuple]
    for kind in kinds:
        kinds += kind.__subclasses__()
        key = kind.__name__, getattr(kind, "_fields", ())
        # Classes of cache.sample.sample were made because the dataset's were not known.
        is_better = key not in found or kind.__module__ == type(loader.dataset).__module__
        if key in wanted and kind.__module__ != "dataloaders.cache.sample.sample" and is_better:
            found[key] = kind
    return found
