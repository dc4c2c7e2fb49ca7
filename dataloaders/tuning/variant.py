"""Make loaders like a given one with other settings; the given one is not changed.

The batches of all trials come from one endless stream of indices, drawn from a copy of the loader's
sampler. So within an epoch no trial reads samples that an earlier one has brought into the page
cache, and no trial ends with a short epoch.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from dataloaders import registry
from dataloaders.backend import Backend
from dataloaders.batches.tree import Batch, map_tensors, to_device
from dataloaders.errors import CheckError
from dataloaders.loader import DataLoader
from dataloaders.observing import Start
from dataloaders.specification import given_device, state_of

L = TypeVar("L", bound="torch.utils.data.DataLoader[Any]")


@dataclass(frozen=True)
class Settings:
    """The settings that tuning chooses, by torch's names; printed as arguments of a DataLoader."""

    num_workers: int
    prefetch_factor: int | None  # None without workers
    pin_memory: bool

    def __str__(self) -> str:
        text = f"num_workers={self.num_workers}"
        if self.prefetch_factor is not None:
            text += f", prefetch_factor={self.prefetch_factor}"
        return f"{text}, pin_memory=True" if self.pin_memory else text


def with_settings(loader: L, settings: Settings, **attributes: Any) -> L:
    """Return a loader of ``loader``'s class with other settings; all else is shared.

    ``attributes`` are set as well, in ``__dict__``, since torch's ``__setattr__`` refuses some.
    """
    state = state_of(loader)
    changed: L = type(loader).__new__(type(loader))
    changed.__dict__.update(state, _iterator=None)
    changed.__dict__.update(vars(settings))
    if settings.num_workers == 0:
        changed.__dict__.update(timeout=0, persistent_workers=False)
        changed.multiprocessing_context = None
    changed.__dict__.update(attributes)
    source = state.get("_source")
    if source is not None:  # wrap() keeps the loader whose own __iter__ it calls
        inner = {name: value for name, value in attributes.items() if name in vars(source)}
        changed.__dict__["_source"] = with_settings(source, settings, **inner)
    return changed


def backend_of(loader: torch.utils.data.DataLoader[Any]) -> Backend:
    """Return the backend that serves the loader; stock for torch's own loader."""
    if isinstance(loader, DataLoader):
        return loader._resolve_backend(loader._wanted_backend())[0]
    return registry.load("stock")()


def inner_name_of(backend: Backend) -> str:
    """Return the name of the backend that loads samples: that of the inner one of prefetch."""
    inner = getattr(backend, "inner", backend)
    return inner if isinstance(inner, str) else inner.name


class Variants:
    """Makes loaders for trials, with the given one's dataset and collation, and other samplers.

    Raises:
        CheckError: the sampler cannot be copied.
    """

    def __init__(self, loader: torch.utils.data.DataLoader[Any]) -> None:
        self._loader = loader
        self._iterable = isinstance(loader.dataset, IterableDataset)
        self._ours = isinstance(loader, DataLoader)
        backend = backend_of(loader)
        # Whether a process without a device loads samples as this loader does.
        self.loads_elsewhere = backend.delivers == "host" or inner_name_of(backend) == "stock"
        self._attributes: dict[str, Any] = {"seed": None} if self._ours else {}
        self._indices: _Indices | None = None
        if self._iterable:
            self._attributes["generator"] = copy.deepcopy(loader.generator)
            return
        auto_collation = loader.batch_sampler is not None
        given = loader.batch_sampler if auto_collation else loader.sampler
        one_shot = (given, loader.sampler, getattr(given, "sampler", None))
        # One deepcopy, so that a generator shared by both stays shared.
        shared = {id(loader.dataset): loader.dataset}
        try:
            if any(isinstance(one, Iterator) for one in one_shot):
                raise TypeError("an iterator ends within the first trial")
            sampler, generator = copy.deepcopy((given, loader.generator), shared)
        except Exception as error:  # a user's sampler may fail in any way
            raise CheckError(
                f"tune() cannot copy the loader's {type(loader.sampler).__name__} ({error}); give "
                "the loader a sampler that copy.deepcopy can copy"
            ) from error
        self._indices = _Indices(sampler)
        self._attributes["generator"] = generator
        self._attributes["batch_sampler" if auto_collation else "sampler"] = self._indices

    def make(self, settings: Settings, timeout_s: float) -> torch.utils.data.DataLoader[Any]:
        """Return a loader for one trial, in which a worker may take ``timeout_s`` for a batch."""
        extra = dict(self._attributes)
        if settings.num_workers:
            # Workers must not move the offsets of inherited files.
            extra["worker_init_fn"] = Start(self._loader.worker_init_fn)
            extra["timeout"] = self._loader.timeout or timeout_s
            # An iterable dataset's epochs end inside a trial.
            extra["persistent_workers"] = self._iterable and self._loader.persistent_workers
        return with_settings(self._loader, settings, **extra)

    def elsewhere(self, settings: Settings) -> torch.utils.data.DataLoader[Any]:
        """Return a loader without workers and without a device, for a separate process."""
        extra = {**self._attributes, "pin_memory": False}
        if self._ours:
            own = backend_of(self._loader)
            extra.update(backend=own if own.delivers == "host" else "stock", device=None)
        return with_settings(self._loader, settings, **extra)

    def delivered(self, batch: Batch) -> Batch:
        """Return a batch of that loader, on the device or pinned, as the user's loader does."""
        device = given_device(self._loader) if self._ours else None
        if device is not None:
            return to_device(batch, device)
        if self._loader.pin_memory and torch.cuda.is_available():
            return map_tensors(batch, torch.Tensor.pin_memory)
        return batch

    def skip(self, batches: int) -> None:
        """Skip the indices of ``batches`` that another process drew from its copy."""
        if self._indices is not None:
            deque(itertools.islice(self._indices, batches), maxlen=0)


class _Indices:
    """An endless stream of indices: ``iter()`` continues it; a pickled copy starts over."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.batch_size = getattr(sampler, "batch_size", None)
        self._rest = self._endless()

    def __iter__(self) -> Iterator[Any]:
        return self._rest

    def __reduce__(self) -> tuple[Any, ...]:
        return _Indices, (self._sampler,)

    def _endless(self) -> Iterator[Any]:
        drawn = True
        while drawn:
            drawn = False
            for indices in self._sampler:
                drawn = True
                yield indices
