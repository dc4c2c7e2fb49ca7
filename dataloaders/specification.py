"""Read a torch loader as a specification: answer questions about it and copy it with changes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from dataloaders.errors import OptionError


def batches_in(loader: Any) -> int | None:
    """Return the number of batches in an epoch of ``loader``; None if it has no length.

    ``loader`` may be any sized iterable. Torch remembers the result of ``len(loader)`` for an
    iterable dataset, and warns when more batches come; this function leaves no trace.
    """
    try:
        if not isinstance(loader, DataLoader) or own_length(loader) is not None:
            return len(loader)
        if isinstance(loader.dataset, IterableDataset):
            size = len(loader.dataset)  # type: ignore[arg-type]
            whole = loader.batch_size or 1
            return size // whole if loader.drop_last else math.ceil(size / whole)
        return len(loader)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def size_of_batches(loader: DataLoader[Any]) -> int | None:
    """Return how many samples a batch has that is not the last one; None if not known."""
    batch_sampler = loader.batch_sampler
    size = loader.batch_size or getattr(batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def check_device(device: Any, given: str) -> None:
    """Raise OptionError, its text after ``given``, unless ``device`` names a device or is None."""
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise OptionError(
                f"{given}: must be a torch device such as 'cuda', 'cuda:1' or 'cpu' ({error})"
            ) from None


def given_device(loader: DataLoader[Any]) -> torch.device | None:
    """Return the ``device`` of ``loader``; None if it has none.

    A subclass may have an attribute of this name that is something else.
    """
    given = getattr(loader, "device", None)
    try:
        return None if given is None else torch.device(given)
    except (RuntimeError, TypeError):
        return None


def device_of(loader: DataLoader[Any], wanted: Any = None) -> torch.device:
    """Return where batches of ``loader`` are wanted; a CUDA or XPU device always with its number.

    That is ``wanted``, else the loader's ``device``, else the current CUDA or XPU device, else the
    CPU.
    """
    wanted = given_device(loader) if wanted is None else wanted
    if wanted is None:
        wanted = torch.accelerator.current_accelerator(check_available=True)
        if wanted is None or wanted.type not in ("cuda", "xpu"):
            wanted = "cpu"
    device = torch.device(wanted)
    if device.type in ("cuda", "xpu") and device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return device


def own_iteration(loader: DataLoader[Any]) -> DataLoader[Any] | None:
    """Return the loader whose own ``__iter__`` has to be called; None if torch's iterators serve.

    That is ``loader`` itself if its class overrides torch's iteration, or what `wrap` made it of.
    """
    kind = type(loader)
    if hasattr(kind, "_source"):  # this package's DataLoader
        source: DataLoader[Any] | None = vars(loader).get("_source")
        return source
    overrides = kind.__iter__ is not DataLoader.__iter__ or overridden(kind) is not None
    return loader if overrides else None


def own_length(loader: DataLoader[Any]) -> DataLoader[Any] | None:
    """Return the loader whose own ``len()`` counts; None if torch's serves. As `own_iteration`."""
    if hasattr(type(loader), "_sized"):  # this package's DataLoader
        sized: DataLoader[Any] | None = vars(loader).get("_sized")
        return own_iteration(loader) if sized is None else sized
    its = getattr(type(loader), "__len__", None)
    return None if its is DataLoader.__len__ else loader


def overridden(kind: type[DataLoader[Any]]) -> str | None:
    """Return the name of what ``kind`` overrides of what torch's ``__iter__`` calls; or None."""
    return next((name for name, its in _TORCHS.items() if getattr(kind, name) is not its), None)


def other_iteration(loader: DataLoader[Any]) -> str | None:
    """Say what iterates ``loader`` in another way than torch does; None if nothing does.

    An ``__iter__`` of a subclass of ours does not count: it iterates what a backend made.
    """
    if (own := own_iteration(loader)) is not None:
        return f"{type(own).__name__} iterates in its own way"
    name = overridden(type(loader))
    return None if name is None else f"{type(loader).__name__} overrides {name}"


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that ``loader`` and its samplers draw from, each once."""
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    owners = (
        loader,
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
        inner,
    )
    generators = (getattr(owner, "generator", None) for owner in owners)
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


def sampling_of(loader: DataLoader[Any]) -> str:
    """Describe how the samples are chosen and batched."""
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
    """Return a plain torch loader with the attributes of ``loader``, except ``changes``.

    Dataset, samplers and generator are shared. Attributes are written to ``__dict__``, because
    torch's ``__setattr__`` refuses some names on a finished loader and its ``__init__`` would
    reject combinations that it made itself.
    """
    view: DataLoader[Any] = object.__new__(DataLoader)
    view.__dict__.update(state_of(loader), _iterator=None)
    view.__dict__.update(changes)
    return view


def state_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the attributes of ``loader`` without the session that it keeps open.

    A session that held these attributes, with itself among them, would form a reference cycle and
    end only when the garbage collector finds it.
    """
    return {name: value for name, value in vars(loader).items() if name not in _OPEN}


def show_workers(loader: DataLoader[Any] | None, view: DataLoader[Any] | None) -> None:
    """Put the persistent workers of ``view`` where Lightning and others shut down ``loader``'s."""
    if loader is not None:
        loader.__dict__["_iterator"] = None if view is None else vars(view).get("_iterator")


_OPEN = ("_opened", "_session")

# Torch's own, taken before anything replaces them.
_TORCHS = {
    name: getattr(DataLoader, name)
    for name in ("_get_iterator", "_index_sampler", "_auto_collation")
}
