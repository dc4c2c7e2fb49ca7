"""Resolve ``"auto"``: a choice learned on this machine, else a rule from its resources.

    learned by tune() for this machine, dataset and batching? ── yes ──> that, if it fits
        │ no
    dataset in memory? ── yes ──> no workers: they would only add a copy
        │ no
    one worker for each usable core, fewer if memory, /dev/shm or batches do not suffice

The backend for "auto" is the learned one, else stock. Nothing is measured and no sample is loaded
here: making a loader takes microseconds, as with torch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal

import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from dataloaders import registry
from dataloaders.backend import Backend
from dataloaders.errors import CapacityWarning
from dataloaders.machine import resources
from dataloaders.tuning import learned

# Whether more workers gain depends on the dataset; tune() measures that.
_MOST_BY_RULE = 16
# The most that tune() tries. Workers that wait for files or a network may outnumber the cores.
_WORKERS_PER_CORE = 4
_LEAST_MOST = 8
_DEFAULT_PREFETCH = 2
# An image of 224 x 224 in float32, the most common large sample.
_ASSUMED_SAMPLE_BYTES = 3 * 224 * 224 * 4
# What a forked worker with torch writes before it holds data: 20 to 60 MiB were measured.
_WORKER_BYTES = 128 * 2**20
# The workers' share of available memory; the training process grows, too.
_MEMORY_SHARE = 0.5


def resolve(
    dataset: Any,
    *,
    batch_size: int | None,
    num_workers: int | Literal["auto"],
    prefetch_factor: int | Literal["auto"] | None,
    pin_memory: bool | Literal["auto"],
    needs_workers: bool,
    batch_sampler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    backend: str = "",
) -> tuple[int, int | None, bool]:
    """Return ``(num_workers, prefetch_factor, pin_memory)`` for a loader that asked for "auto".

    Values that are not "auto" are returned as given. ``needs_workers`` says that another argument
    needs workers (``persistent_workers``, ``timeout``, ``multiprocessing_context``): then at least
    one is chosen. By rule, an iterable dataset gets at most one, since several repeat each sample
    unless the dataset divides them. A choice learned with ``backend``, a name, comes first.

    Warns with `CapacityWarning` if shared memory has no room for more.
    """
    size = None if batch_sampler is not None else batch_size
    names = (backend, "") if backend == "auto" else (backend,)
    keys = (learned.key_of(dataset, size, batch_sampler, collate_fn, name) for name in names)
    found = next((known for key in keys if (known := learned.recall(key)) is not None), None)
    least = 1 if needs_workers or _is_int(prefetch_factor) else 0
    chosen: Any = num_workers
    if num_workers == "auto":
        wanted = _by_rule(dataset, size)
        if found is not None:
            wanted = min(found.num_workers, most_workers(resources.usable_cores()))
        chosen = max(least, min(wanted, memory_cap()) if wanted else 0)
    has_workers = _is_int(chosen) and chosen > 0
    prefetch: Any = prefetch_factor
    if prefetch_factor == "auto":
        known_prefetch = found.prefetch_factor if found is not None else None
        prefetch = (known_prefetch or _DEFAULT_PREFETCH) if has_workers else None
    if has_workers:
        batch_bytes = found.batch_bytes if found is not None else 0
        assumed = _ASSUMED_SAMPLE_BYTES * (size if _is_int(size) and size else 1)
        depth = prefetch if _is_int(prefetch) else _DEFAULT_PREFETCH
        shortage = resources.shm_shortage(chosen, depth, batch_bytes or assumed)
        if shortage is not None:
            if prefetch_factor == "auto":
                prefetch = depth = 1
            cap = shm_cap(batch_bytes or assumed, depth)
            if num_workers == "auto" and cap is not None:
                chosen = max(least, min(chosen, cap))
                prefetch = prefetch if chosen else None
            guess = "" if batch_bytes else "; a batch's size is a guess until tune() has seen one"
            warnings.warn(
                f'"auto" chose num_workers={chosen}, prefetch_factor={prefetch}: {shortage}{guess}',
                CapacityWarning,
                stacklevel=3,  # this, DataLoader.__init__, the caller
            )
    pinned: Any = pin_memory
    if pin_memory == "auto":
        pinned = found.pin_memory if found is not None else _is_int(chosen) and chosen > 0
        # torch.cuda.is_available() may initialise the driver, after which a process cannot fork
        # children that use CUDA. device_count() asks NVML first.
        pinned = bool(pinned) and torch.cuda.device_count() > 0
    return chosen, prefetch, pinned


def backend_for(loader: Any) -> tuple[Backend | None, str]:
    """Return the learned backend for ``backend="auto"``, None for stock, and a sentence on it."""
    known = learned.recall(learned.key_of_loader(loader, "auto"))
    if known is None or known.backend is None:
        return None, (
            'backend="auto" is stock: nothing was learned for this dataset, script and machine; '
            "dataloaders tune --backends SCRIPT measures what is best"
        )
    since = f"learned on {known.day} with num_workers={known.num_workers}"
    try:
        backend = _made(known.backend)
    except Exception as error:  # a package is gone, or the file is another version's
        return None, f'backend="auto" is stock: what was {since} cannot be made: {error}'
    return backend, (
        f'backend="auto" is {backend.name}: {since}, {known.gain:.2f} x the loader as it was then'
    )


def entry_of(backend: Backend) -> dict[str, Any]:
    """Return the backend's name and its options that are not the defaults, for JSON."""
    found = {one.name: (getattr(backend, one.name), one.default) for one in fields(backend)}  # type: ignore[arg-type]
    options = {
        name: entry_of(value) if isinstance(value, Backend) else value
        for name, (value, default) in found.items()
        if value != default
    }
    return {"name": backend.name, "options": options}


def _made(entry: Mapping[str, Any]) -> Backend:
    options = entry["options"].items()
    made = {name: _made(value) if isinstance(value, dict) else value for name, value in options}
    return registry.load(entry["name"])(**made)


def in_memory(dataset: Any) -> bool:
    """Return whether reading a sample only indexes tensors: a TensorDataset, Subsets of it."""
    if type(dataset) is TensorDataset:
        return True
    if type(dataset) is Subset:
        return in_memory(dataset.dataset)
    return type(dataset) is ConcatDataset and all(map(in_memory, dataset.datasets))


def most_workers(cores: int) -> int:
    """Return the most workers worth trying: 4 for each core, at least 8."""
    return max(_LEAST_MOST, _WORKERS_PER_CORE * cores)


def memory_cap() -> int:
    """Return the most workers for which this rank's available memory has room.

    A worker takes its own pages, and a copy of this process's Python objects: counting references
    copies their pages.
    """
    cost = _WORKER_BYTES + resources.python_heap_bytes()
    return int(resources.available_memory() * _MEMORY_SHARE // cost)


def shm_cap(batch_bytes: int, prefetch_factor: int) -> int | None:
    """Return the most workers whose batches in flight fit into this rank's share of shared memory.

    None: any number.
    """
    fit = resources.batches_that_fit(batch_bytes, resources.shm_room())
    if fit is None:
        return None
    return max(0, (fit - resources.batches_in_flight(1, 0)) // max(1, prefetch_factor))


def _by_rule(dataset: Any, batch_size: int | None) -> int:
    if in_memory(dataset):
        return 0
    most = resources.usable_cores()
    if isinstance(dataset, IterableDataset):
        return 1
    try:
        batches = math.ceil(len(dataset) / (batch_size or 1))
    except Exception:  # a dataset's own __len__ may raise anything, or be missing
        batches = most
    return min(most, _MOST_BY_RULE, batches)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
