"""Describe what stock does with a loader, stage by stage, as a `Plan`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset
from torch.utils.data._utils.collate import default_convert

from dataloaders.backend import Specification
from dataloaders.observing import held
from dataloaders.plan import Plan, Stage
from dataloaders.specification import sampling_of


def describe(loader: Specification, name: str, not_gathered: str | None, *, own: bool) -> Plan:
    """Return the plan of ``loader``.

    ``not_gathered`` says why batches are fetched sample by sample; None if they are gathered.
    ``own`` says that the loader's class has its own iteration, about which nothing is known.
    """
    if own:
        how = f"{type(loader).__name__}.__iter__, the loader's own"
        return Plan(name, (Stage("fetch", "as the loader decides", how),))
    count = loader.num_workers
    where = f"{count} worker process{'es' * (count > 1)}" if count else "this process"
    stages = [Stage("sampler", "this process", sampling_of(loader))]
    if not_gathered is None:
        how = f"one indexed gather a batch from {type(loader.dataset).__name__}, collated at once"
        stages.append(Stage("fetch", where, how))
    else:
        stages.extend(_sample_stages(loader, where))
    pinned = loader.pin_memory and torch.accelerator.is_available()
    if pinned:
        by = "a thread of this process" if count else "this process"
        how = "copied into pinned memory; the step copies to its device"
        stages.append(Stage("transfer", by, how))
    elif loader.pin_memory:
        why = "no accelerator is available here; leave pin_memory out"
        stages.append(Stage("transfer", "nowhere", "pin_memory=True has no effect", why))
    delivers = "cpu (pinned)" if pinned else "cpu"
    return Plan(name, tuple(stages), delivers, notes=_notes(loader, not_gathered))


def _sample_stages(loader: Specification, where: str) -> list[Stage]:
    dataset = loader.dataset
    kind = type(dataset).__name__
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, IterableDataset):
        how = f"next(iter({type(dataset).__name__}))"
    elif callable(held(loader.dataset, "__getitems__")):
        how = f"{kind}.__getitems__(indices)"
    else:
        how = f"{kind}[index], sample by sample"
    stages = [Stage("fetch", where, how)]
    decode = held(dataset, "loader")  # the name in torchvision's folder datasets
    if callable(decode):
        stages.append(Stage("decode", where, _called(decode)))
    transform = held(dataset, "transform")
    if transform is None:  # its truth value is not asked for: MONAI's Compose then seeds itself
        transform = held(dataset, "transforms")
    if callable(transform):
        members = held(transform, "transforms")
        members = members if isinstance(members, (list, tuple)) else [transform]
        stages.append(Stage("augment", where, ", ".join(map(_called, members))))
    collates = loader.collate_fn is not default_convert
    how = _called(loader.collate_fn) if collates else "none: samples become tensors one by one"
    return [*stages, Stage("collate", where, how)]


def _notes(loader: Specification, not_gathered: str | None) -> tuple[str, ...]:
    notes = []
    if not_gathered is not None:
        notes.append(f"fetched sample by sample, not by one gather a batch: {not_gathered}")
    elif loader.num_workers:
        notes.append(
            f"num_workers={loader.num_workers} with a dataset in memory: num_workers=0 gathers a "
            "batch in this process, which is often quicker than sending it from a worker"
        )
    return tuple(notes)


def _called(thing: Any) -> str:
    name = held(thing, "__name__")
    return name if isinstance(name, str) else type(thing).__name__
