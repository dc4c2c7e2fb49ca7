"""What ``"auto"`` becomes: settings learned on this machine, else a rule from its resources.

    learned by tune() for what this rank has, dataset and batching?  ── yes ──> those, if they fit
        │ no
    in memory already? ── yes ──> no workers: they would only add a copy
        │ no
    one worker a usable core, fewer where memory, /dev/shm or the batches do not suffice

Nothing is measured and no sample is loaded here: a loader is made in microseconds, as torch's is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from dataloaders.errors import CapacityWarning
from dataloaders.machine import resources
from dataloaders.tuning import learned

__all__ = ["in_memory", "memory_cap", "most_workers", "resolve", "shm_cap"]

# Beyond this many, whether more workers help depends on the dataset: that is for tune() to find.
_MOST_BY_RULE = 16
# tune() tries no more, since workers that wait for files or a network can be more than cores.
_WORKERS_PER_CORE = 4
_LEAST_MOST = 8
_DEFAULT_PREFETCH = 2
# An image of 224 x 224 as float32, the commonest sample of those that are large.
_ASSUMED_SAMPLE_BYTES = 3 * 224 * 224 * 4
# What a forked worker with torch writes to before it holds any data, measured: 20 to 60 MiB.
_WORKER_BYTES = 128 * 2**20
# The share of available memory that workers may be given; the training process grows too.
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

    What is not "auto" comes back as it was given. ``needs_workers`` says that another argument
    is accepted only with workers (``persistent_workers``, ``timeout``,
    ``multiprocessing_context``): then at least one is chosen. Iterable datasets get at most one
    by rule, since several repeat every sample unless the dataset shares them out itself. What was
    learned with the options of ``backend``, a name, counts first.

    Warns with `CapacityWarning` where shared memory is what keeps the number down.
    """
    size = None if batch_sampler is not None else batch_size
    keys = (
        learned.key_of(dataset, size, batch_sampler, collate_fn, of) for of in {backend: 0, "": 0}
    )
    found = next((known for key in keys if (known := learned.recall(key)) is not None), None)
    least = 1 if needs_workers or _is_int(prefetch_factor) else 0
    chosen: Any = num_workers
    if num_workers == "auto":
        if found is None:
            wanted, per_worker = _by_rule(dataset, size), None
        else:
            wanted = min(found.num_workers, most_workers(resources.usable_cores()))
            per_worker = found.memory_per_worker
        chosen = max(least, min(wanted, memory_cap(per_worker)) if wanted else 0)
    has_workers = _is_int(chosen) and chosen > 0
    prefetch: Any = prefetch_factor
    if prefetch_factor == "auto":
        known_prefetch = found.prefetch_factor if found is not None else None
        prefetch = (known_prefetch or _DEFAULT_PREFETCH) if has_workers else None
    if has_workers:
        batch_bytes = found.batch_bytes if found is not None else 0
        assumed = _ASSUMED_SAMPLE_BYTES * (size if _is_int(size) and size else 1)
        chosen, prefetch = _fit_in_shm(
            chosen,
            prefetch,
            batch_bytes or assumed,
            may_lower_workers=num_workers == "auto",
            may_lower_prefetch=prefetch_factor == "auto",
            least=least,
            assumed=not batch_bytes,
        )
    pinned: Any = pin_memory
    if pin_memory == "auto":
        pinned = found.pin_memory if found is not None else _is_int(chosen) and chosen > 0
        pinned = bool(pinned) and _has_cuda()
    return chosen, prefetch, pinned


def in_memory(dataset: Any, depth: int = 0) -> bool:
    """Return whether fetching a sample only indexes tensors: TensorDataset, Subsets of it."""
    if type(dataset) is TensorDataset:
        return True
    if depth > 8:
        return False
    if type(dataset) is Subset:
        return in_memory(dataset.dataset, depth + 1)
    if type(dataset) is ConcatDataset:
        return all(in_memory(one, depth + 1) for one in dataset.datasets)
    return False


def most_workers(cores: int) -> int:
    """Return the most workers worth trying with so many cores: 4 a core, and at least 8."""
    return max(_LEAST_MOST, _WORKERS_PER_CORE * cores)


def memory_cap(memory_per_worker: int | None = None) -> int:
    """Return the most workers that this rank's available memory bears.

    ``memory_per_worker`` in bytes; None stands for a bare worker and a copy of every Python
    object of this process, which is what counting references comes to (`resources`).
    """
    cost = memory_per_worker or _WORKER_BYTES + resources.python_heap_bytes()
    return int(resources.available_memory() * _MEMORY_SHARE // max(1, cost))


def shm_cap(batch_bytes: int, prefetch_factor: int) -> int | None:
    """Return the most workers whose batches in flight fit in this rank's part of shared memory.

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


def _fit_in_shm(
    num_workers: int,
    prefetch: Any,
    batch_bytes: int,
    *,
    may_lower_workers: bool,
    may_lower_prefetch: bool,
    least: int,
    assumed: bool,
) -> tuple[int, Any]:
    """Return workers and prefetch factor lowered until their batches fit; warn once if so."""
    depth = (prefetch if _is_int(prefetch) else _DEFAULT_PREFETCH) or 1
    shortage = resources.shm_shortage(num_workers, depth, batch_bytes)
    if shortage is None:
        return num_workers, prefetch
    fitting = num_workers
    if may_lower_prefetch:
        prefetch = depth = 1
    cap = shm_cap(batch_bytes, depth)
    if may_lower_workers and cap is not None:
        fitting = max(least, min(num_workers, cap))
        if fitting == 0:
            prefetch = None
    guess = "; the size of a batch is a guess until tune() has seen one" if assumed else ""
    warnings.warn(
        f'"auto" chose num_workers={fitting}, prefetch_factor={prefetch}: {shortage}{guess}',
        CapacityWarning,
        stacklevel=4,  # this, resolve, DataLoader.__init__, the caller
    )
    return fitting, prefetch


def _has_cuda() -> bool:
    # Not torch.cuda.is_available(): it may initialise the driver, after which a process cannot
    # fork children that use CUDA. Counting devices asks NVML first.
    return torch.cuda.device_count() > 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
