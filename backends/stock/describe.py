"""Describe what stock does with a loader, stage by stage, as a `Plan`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset
from torch.utils.data._utils.collate import default_collate, default_convert

from dataloaders.backend import Specification
from dataloaders.batches.memory import SMALLEST
from dataloaders.observing import held
from dataloaders.plan import Plan, Stage
from dataloaders.specification import sampling_of

from .order import is_known

__all__ = ["describe"]


def describe(
    loader: Specification, name: str, not_gathered: str | None, *, own: bool, ring: bool = False
) -> Plan:
    """Return the plan of ``loader``.

    ``not_gathered`` is why its batches are fetched sample by sample, None if they are gathered;
    ``own`` says that the loader's class iterates in its own way, about which nothing is known.
    """
    if own:
        how = f"{type(loader).__name__}.__iter__, the loader's own"
        return Plan(name, (Stage("fetch", "as the loader decides", how),))
    where = _place(loader)
    gathered = not_gathered is None
    stages = [Stage("sampler", "this process", _sampling(loader, gathered))]
    if gathered:
        how = f"one indexed gather a batch from {type(loader.dataset).__name__}, collated at once"
        stages.append(Stage("fetch", where, how))
    else:
        stages.extend(_sample_stages(loader, where))
    pinned = loader.pin_memory and torch.accelerator.is_available()
    if loader.pin_memory:
        stages.append(_pinning(loader))
    delivers = "cpu (pinned)" if pinned else "cpu"
    return Plan(name, tuple(stages), delivers, notes=_notes(loader, not_gathered, ring))


def _sample_stages(loader: Specification, where: str) -> list[Stage]:
    dataset = _root(loader.dataset)
    if isinstance(dataset, IterableDataset):
        how = f"next(iter({type(dataset).__name__}))"
    elif callable(held(loader.dataset, "__getitems__")):
        how = f"{type(loader.dataset).__name__}.__getitems__(indices)"
    else:
        how = f"{type(loader.dataset).__name__}[index], sample by sample"
    stages = [Stage("fetch", where, how)]
    decode = held(dataset, "loader")  # the name in torchvision's folder datasets
    if callable(decode):
        stages.append(Stage("decode", where, _called(decode)))
    transform = held(dataset, "transform") or held(dataset, "transforms")
    if callable(transform):
        stages.append(Stage("augment", where, _members(transform)))
    if loader.collate_fn is default_convert:
        how = "none: samples become tensors one by one"
    else:
        how = _called(loader.collate_fn)
    stages.append(Stage("collate", where, how))
    return stages


def _sampling(loader: Specification, gathered: bool) -> str:
    how = sampling_of(loader)
    if gathered and not loader.num_workers and is_known(loader.batch_sampler):
        how += ", as index tensors"
    return how


def _pinning(loader: Specification) -> Stage:
    if not torch.accelerator.is_available():
        return Stage(
            "transfer",
            "nowhere",
            "pin_memory=True has no effect",
            obstacle="no accelerator is available here; leave pin_memory out",
        )
    where = "a thread of this process" if loader.num_workers else "this process"
    return Stage("transfer", where, "copied into pinned memory; the step copies to its device")


def _notes(loader: Specification, not_gathered: str | None, ring: bool) -> tuple[str, ...]:
    notes = []
    if not_gathered is not None:
        notes.append(f"fetched sample by sample, not by one gather a batch: {not_gathered}")
    elif loader.num_workers:
        notes.append(
            f"num_workers={loader.num_workers} with a dataset in memory: num_workers=0 gathers a "
            "batch in this process, which is often quicker than sending it from a worker"
        )
    seeded = getattr(loader, "seed", None) is not None  # seeded collation is torch's own
    pooled = loader.collate_fn is default_collate and not (seeded and not_gathered is not None)
    if ring and pooled and loader.num_workers and not_gathered is not None:
        notes.append(
            f"workers reuse the shared memory of tensors of {SMALLEST >> 20} MiB and more once "
            "nothing refers to them"
        )
    if pooled and not loader.num_workers:
        notes.append(
            f"tensors of {SMALLEST >> 20} MiB and more come from a pool, which reuses their "
            "memory once nothing refers to it"
        )
    return tuple(notes)


def _place(loader: Specification) -> str:
    count = loader.num_workers
    if not count:
        return "this process"
    return "1 worker process" if count == 1 else f"{count} worker processes"


def _root(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _called(thing: Any) -> str:
    name = held(thing, "__name__")
    return name if isinstance(name, str) else type(thing).__name__


def _members(transform: Any) -> str:
    members = held(transform, "transforms")
    if isinstance(members, (list, tuple)):
        return ", ".join(_called(member) for member in members)
    return _called(transform)
