"""Build torch's own two iterators with the gather in the place where they fetch a batch.

num_workers = 0    torch's single-process iterator; indices as tensors, fetched by the gather
num_workers > 0    torch's multi-process iterator over a view of the loader, whose dataset returns
                   indices and whose collate_fn gathers

The iterators are instances of torch's own classes, never of subclasses. Only their fetcher, their
index sampler or the view of the loader that they read differ. Everything else stays torch's: seeds,
pinning, queues, worker start and shutdown, warnings.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data
from torch.utils.data import BatchSampler, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from dataloaders.backend import Specification
from dataloaders.batches.collation import collates_as_torch
from dataloaders.batches.tree import Batch
from dataloaders.batches.whole import RowNumbers, ShowsDataset
from dataloaders.specification import view_of

from . import gather
from .order import index_batches

_TorchLoader = torch.utils.data.DataLoader


def obstacle(loader: Specification) -> str | None:
    """Say in a few words why the batches of ``loader`` are not gathered; None if they are."""
    if loader._dataset_kind != torch.utils.data._DatasetKind.Map:
        return "an iterable dataset has no indices"
    if loader.batch_sampler is None:
        return "batch_size=None: the dataset makes its own batches"
    if loader.collate_fn is not default_collate:
        return "collate_fn is not torch's default_collate"
    if _changes_iteration(type(loader)):
        return f"{type(loader).__name__} changes torch's iteration"
    if not collates_as_torch():
        return "default_collate_fn_map was changed"
    return gather.obstacle(loader.dataset)


def _changes_iteration(kind: type[Specification]) -> bool:
    return (
        kind._get_iterator is not _TorchLoader._get_iterator
        or kind._index_sampler is not _TorchLoader._index_sampler
        or kind._auto_collation is not _TorchLoader._auto_collation
    )


def gathering_iterator(loader: Specification) -> _BaseDataLoaderIter:
    """Return torch's iterator over ``loader``, which has no `obstacle`, fetching by gathers."""
    if loader.num_workers > 0:
        return gathering_view(loader)._get_iterator()
    iterator = loader._get_iterator()
    assert isinstance(iterator, _SingleProcessDataLoaderIter)
    batches: Any = loader.batch_sampler
    known = type(batches) is BatchSampler
    if known:  # torch's iterator over it was not started: it has drawn nothing
        iterator._sampler_iter = index_batches(batches)
    iterator._dataset_fetcher = _GatheringFetcher(loader, index_is_ours=known)
    return iterator


def gathering_view(loader: Specification) -> Specification:
    """Return a view of ``loader``, which has no `obstacle`, whose workers gather."""
    return view_of(
        loader,
        dataset=RowNumbers(loader.dataset),
        collate_fn=_GatheringFetcher(loader, index_is_ours=False).fetch,
        worker_init_fn=ShowsDataset(loader.worker_init_fn),
    )


class _GatheringFetcher(_MapDatasetFetcher):
    """Fetch by one gather a batch, and by torch's own fetch wherever that fails."""

    def __init__(self, loader: Specification, *, index_is_ours: bool) -> None:
        super().__init__(loader.dataset, True, loader.collate_fn, loader.drop_last)
        self._gatherer = gather.Gatherer(loader.dataset)
        self._index_is_ours = index_is_ours

    def fetch(self, possibly_batched_index: Any) -> Batch:
        index = possibly_batched_index
        try:
            return self._gatherer.batch(index)
        except Exception:
            # Whatever it was (an index out of range, a tensor that changed): torch decides below,
            # outside this handler, what becomes of it and with which error.
            pass
        if self._index_is_ours and type(index) is torch.Tensor:
            index = index.tolist()
        return super().fetch(index)  # type: ignore[no-untyped-call]
