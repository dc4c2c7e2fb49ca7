"""A torch loader as a specification: asked about, copied with changes, never changed itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

__all__ = [
    "batches_in",
    "device_of",
    "generators_of",
    "iterates_itself",
    "sampling_of",
    "state_of",
    "view_of",
]


def batches_in(loader: Any) -> int | None:
    """Batches in an epoch of ``loader`` (a loader or any sized iterable); None if it has no length.

    Torch's own ``len(loader)`` of an iterable dataset is remembered by the loader, which then
    warns when more batches come; asking here leaves no trace.
    """
    try:
        if not isinstance(loader, DataLoader) or loader.__dict__.get("_source") is not None:
            return len(loader)
        if isinstance(loader.dataset, IterableDataset):
            size = len(loader.dataset)  # type: ignore[arg-type]
            whole = loader.batch_size or 1
            return size // whole if loader.drop_last else math.ceil(size / whole)
        return len(loader)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def device_of(wanted: Any) -> torch.device:
    """The device that ``wanted`` names; for None the current CUDA device if there is one, or CPU.

    Of CUDA devices always with its number.
    """
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def iterates_itself(kind: type[DataLoader[Any]]) -> bool:
    """Whether the class has an iteration of its own in place of torch's."""
    methods = ("__iter__", "_get_iterator")
    return any(getattr(kind, name) is not getattr(DataLoader, name) for name in methods)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that ``loader`` and its samplers draw from, each once."""
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
        inner,
    )
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def sampling_of(loader: DataLoader[Any]) -> str:
    """How its samples are chosen and batched, in words."""
    if loader._dataset_kind != torch.utils.data._DatasetKind.Map:
        return "none: the dataset decides its own order"
    if loader.batch_sampler is None:
        return type(loader.sampler).__name__
    inner = getattr(loader.batch_sampler, "sampler", None)
    how = type(loader.batch_sampler).__name__
    if inner is not None:
        how += f" of {type(inner).__name__}"
    if loader.batch_size is not None:
        how += f", {loader.batch_size} a batch"
        how += ", last short batch dropped" if loader.drop_last else ""
    return how


def view_of(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A plain torch loader with the attributes of ``loader``, except ``changes``.

    Dataset, samplers and generator are shared. Attributes go straight into ``__dict__``, since
    torch's ``__setattr__`` refuses some names on a finished loader, and its ``__init__`` would
    reject combinations that it made itself.
    """
    view: DataLoader[Any] = object.__new__(DataLoader)
    view.__dict__.update(state_of(loader), _iterator=None)
    view.__dict__.update(changes)
    return view


def state_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The attributes of ``loader`` without the session that it keeps open.

    A session that held its loader's attributes with itself among them would end only when the
    garbage collector finds it.
    """
    return {name: value for name, value in vars(loader).items() if name not in _OPEN}


_OPEN = ("_placed", "_session", "_session_backend", "_session_pid", "_session_wanted")
