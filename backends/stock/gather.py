"""Fetch a batch of an in-memory dataset by one indexed gather, instead of sample by sample.

    TensorDataset(x, y), indices ──> [x.index_select(0, indices), y.index_select(0, indices)]

The batch equals ``default_collate([dataset[i] for i in indices])`` to the bit, including its
containers. The dataset's tensors are read anew for each batch, so a dataset that changes during an
epoch changes as it does under torch.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch
from torch.utils.data import StackDataset, Subset, TensorDataset, get_worker_info

from dataloaders.batches.collation import collates_as_torch
from dataloaders.batches.tree import Batch


class NotGatherable(Exception):
    """A batch has to be fetched sample by sample; the message says why."""


class Gatherer:
    """Gather batches of one in-memory dataset, by one gather a tensor."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def batch(self, index: Any) -> Batch:
        """Return ``default_collate([dataset[i] for i in index])``.

        It is in host memory, and inside a DataLoader worker in shared memory, where torch collates.

        Raises:
            NotGatherable: `obstacle` names why, or an index is not a plain integer.
            IndexError, RuntimeError: an index is negative or too large. Torch accepts negative
                ones, so a caller asks torch after any error.
        """
        if not collates_as_torch():
            raise NotGatherable("default_collate_fn_map was changed")
        return self._gather(self._dataset, index)

    def _gather(self, dataset: Any, index: Any) -> Batch:
        """Gather the batch of ``index``; None: only find out whether that can be."""
        kind = type(dataset)
        rows = None if index is None else _as_index(index)
        if rows is None and index is not None:
            raise NotGatherable("an index is not an integer")
        if kind is Subset:
            table = dataset.indices
            if type(table) not in _TABLES:
                raise NotGatherable(
                    f"the Subset's indices are a {type(table).__name__}, not a list"
                )
            if rows is not None:
                known = None if type(table) in (list, tuple, range) else _as_index(table)
                if known is None:
                    index = [table[row] for row in rows.tolist()]
                else:
                    index = known.index_select(0, rows)
            return self._gather(dataset.dataset, index)
        if kind is StackDataset:
            children = dataset.datasets
            if type(children) is dict:
                return {key: self._gather(child, rows) for key, child in children.items()}
            if type(children) is tuple:
                return [self._gather(child, rows) for child in children]
            raise NotGatherable(f"the StackDataset holds a {type(children).__name__}")
        if kind is TensorDataset:
            if not dataset.tensors:
                raise NotGatherable("the TensorDataset has no tensors")
            # default_collate turns a list of tuples into a list of columns.
            return [self._rows(tensor, rows) for tensor in dataset.tensors]
        if kind is torch.Tensor:
            return self._rows(dataset, rows)
        if kind is not np.ndarray:
            raise NotGatherable(f"{kind.__name__} is not an in-memory dataset that is known")
        if not _is_plain_array(dataset):
            raise NotGatherable("the array is not a plain, writable one")
        return self._rows(torch.from_numpy(dataset), rows)

    def _rows(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        why = _not_plain(tensor)
        if why is not None:
            raise NotGatherable(why)
        if rows is None:
            return tensor
        if get_worker_info() is None:
            return tensor.index_select(0, rows)
        # As torch's collation in a worker: straight into the shared memory that is sent.
        shape, elements = (len(rows), *tensor.shape[1:]), len(rows) * tensor[0].numel()
        whole = tensor._typed_storage()  # type: ignore[no-untyped-call]
        out = tensor.new(whole._new_shared(elements, device=tensor.device)).resize_(shape)
        return torch.index_select(tensor, 0, rows, out=out)


def obstacle(dataset: Any) -> str | None:
    """Say in a few words why batches of ``dataset`` cannot be gathered; None if they can."""
    try:
        Gatherer(dataset)._gather(dataset, None)
    except NotGatherable as error:
        return str(error)
    return None


_TABLES = (list, tuple, range, np.ndarray, torch.Tensor)
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


def _is_plain_array(dataset: np.ndarray[Any, Any]) -> bool:
    return (
        dataset.ndim >= 2
        and dataset.size > 0
        and dataset.dtype.isnative
        and dataset.dtype.kind in "biufc"
        and dataset.flags.c_contiguous
        and dataset.flags.writeable
    )
