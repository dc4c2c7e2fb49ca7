"""Fetch a batch of an in-memory dataset by one indexed gather, instead of sample by sample.

    TensorDataset(x, y), indices ──> [x.index_select(0, indices), y.index_select(0, indices)]

Torch's own iterators run over a view of the loader: its dataset returns the indices themselves, and
its collate_fn gathers. Seeds, samplers, pinning, queues and workers stay torch's.

The batch equals ``default_collate([dataset[i] for i in indices])`` to the bit, including its
containers. The dataset's tensors are looked up for each batch, so a change during an epoch has the
same effect as under torch.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from dataloaders.backend import Specification
from dataloaders.batches.collation import collates_as_torch
from dataloaders.batches.tree import Batch
from dataloaders.batches.whole import RowNumbers, ShowsDataset, WholeBatches
from dataloaders.specification import other_iteration, view_of


def obstacle(loader: Specification) -> str | None:
    """Say in a few words why the batches of ``loader`` are not gathered; None if they are."""
    if loader._dataset_kind != torch.utils.data._DatasetKind.Map:
        return "an iterable dataset has no indices"
    if loader.batch_sampler is None:
        return "batch_size=None: the dataset makes its own batches"
    if loader.collate_fn is not default_collate:
        return "collate_fn is not torch's default_collate"
    if (other := other_iteration(loader)) is not None:
        return other
    if not collates_as_torch():
        return "default_collate_fn_map was changed"
    try:
        _gathered(loader.dataset, None)
    except _NotGatherable as error:
        return str(error)
    return None


def gathering_view(loader: Specification) -> Specification:
    """Return a view of ``loader``, which has no `obstacle`, that gathers its batches."""
    return view_of(
        loader,
        dataset=RowNumbers(loader.dataset),
        collate_fn=_Gathered(loader),
        worker_init_fn=ShowsDataset(loader.worker_init_fn),
    )


class _Gathered(WholeBatches):
    """Gathers a batch; if that fails, torch fetches it sample by sample."""

    def __init__(self, loader: Specification) -> None:
        self._dataset = loader.dataset
        self._torchs = _MapDatasetFetcher(loader.dataset, True, loader.collate_fn, loader.drop_last)

    def __call__(self, rows: Any) -> Batch:
        """Return the batch in host memory, in a worker in shared memory, as torch collates."""
        try:
            if collates_as_torch():
                return _gathered(self._dataset, rows)
        except Exception:
            # An index out of range, a tensor that changed, or anything else: torch's fetch below,
            # out of this handler, succeeds or raises its own error.
            pass
        return self._torchs.fetch(rows)  # type: ignore[no-untyped-call]


class _NotGatherable(Exception):
    """The batch has to be fetched sample by sample; the message says why."""


def _gathered(dataset: Any, index: Any) -> Batch:
    """Gather the batch of ``index``; with None, only find out whether that is possible.

    Raises:
        _NotGatherable: the dataset is of another kind, or an index is not a plain integer.
        IndexError, RuntimeError: an index is negative or too large. Torch accepts negative ones.
    """
    kind = type(dataset)
    rows = None if index is None else _as_index(index)
    if rows is None and index is not None:
        raise _NotGatherable("an index is not an integer")
    if kind is Subset:
        table = dataset.indices
        if type(table) not in (list, tuple, range, np.ndarray, torch.Tensor):
            raise _NotGatherable(f"the Subset's indices are a {type(table).__name__}, not a list")
        if rows is not None:
            known = None if type(table) in (list, tuple, range) else _as_index(table)
            if known is None:
                index = [table[row] for row in rows.tolist()]
            else:
                index = known.index_select(0, rows)
        return _gathered(dataset.dataset, index)
    if kind is StackDataset:
        children = dataset.datasets
        if type(children) is dict:
            return {key: _gathered(child, rows) for key, child in children.items()}
        return [_gathered(child, rows) for child in children]
    if kind is TensorDataset:
        if not dataset.tensors:
            raise _NotGatherable("the TensorDataset has no tensors")
        # default_collate turns a list of tuples into a list of columns.
        return [_rows(tensor, rows) for tensor in dataset.tensors]
    if kind is torch.Tensor:
        return _rows(dataset, rows)
    raise _NotGatherable(f"{kind.__name__} is not an in-memory dataset that is known")


def _rows(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    why = _not_plain(tensor)
    if why is not None:
        raise _NotGatherable(why)
    if rows is None:
        return tensor
    if get_worker_info() is None:
        return tensor.index_select(0, rows)
    # As torch's collation in a worker: directly into the shared memory that is sent.
    shape, elements = (len(rows), *tensor.shape[1:]), len(rows) * tensor[0].numel()
    whole = tensor._typed_storage()  # type: ignore[no-untyped-call]
    out = tensor.new(whole._new_shared(elements, device=tensor.device)).resize_(shape)
    return torch.index_select(tensor, 0, rows, out=out)


_INTEGERS = {int, np.int64, np.int32}


def _as_index(values: Any) -> torch.Tensor | None:
    """Return ``values`` as an int64 tensor with one dimension in host memory; None if not ints."""
    kind = type(values)
    if kind is torch.Tensor:
        fits = values.dtype == torch.int64 and values.dim() == 1 and values.is_cpu
        return values if fits and len(values) else None
    # bool would add a dimension.
    if (kind is list or kind is tuple) and values and _INTEGERS.issuperset(map(type, values)):
        # array() reads a list of ints several times faster than torch.tensor() does.
        return torch.frombuffer(array("q", values), dtype=torch.int64)
    if kind is np.ndarray and values.dtype == np.int64 and values.ndim == 1 and len(values):
        return torch.from_numpy(values) if values.flags.writeable else None
    return None


def _not_plain(tensor: torch.Tensor) -> str | None:
    if type(tensor) is not torch.Tensor:
        return f"a {type(tensor).__name__} is not a plain torch.Tensor"
    if not tensor.is_cpu:
        return f"a tensor is on {tensor.device}, not in host memory"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return "a tensor is sparse, nested or quantized"
    if tensor.requires_grad:
        return "a tensor requires grad"
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return "a tensor is not contiguous: store it as tensor.contiguous()"
    if tensor.dim() == 0 or tensor.numel() == 0:
        return "a tensor has no elements or no dimension to index"
    return None
