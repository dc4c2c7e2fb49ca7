"""What is recorded of a dataset's samples, found in a process of its own; told as a `Plan`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, default_collate

from dataloaders.backend import Specification
from dataloaders.observing import Unobserved, observe
from dataloaders.plan import Plan, Stage
from dataloaders.recording.program import RecordedBatch
from dataloaders.recording.worker import describe_sample
from dataloaders.replaying.evaluate import replayed
from dataloaders.replaying.proof import prove
from dataloaders.specification import device_of, iterates_itself, sampling_of

from .numbers import Numbers

if TYPE_CHECKING:
    from . import Dali

_TENSORS = ("torch.", "tensor.", "v1t.", "v2.", "to_tensor", "pil_to_tensor")


def obstacle_of(loader: Specification) -> str | None:
    """Return why this loader cannot be served, and what to do about it."""
    if iterates_itself(type(loader)) and not hasattr(loader, "backend"):
        return f"{type(loader).__name__} iterates in its own way; use backend='stock'"
    wanted = getattr(loader, "device", None)
    if wanted is not None and torch.device(wanted).type == "cuda" and not torch.cuda.is_available():
        return f"device={str(wanted)!r}: there is no CUDA device that torch can use; leave it out"
    return None


def unequal(loader: Specification) -> str | None:
    """Return how a recorded sample differs from the dataset's own; None: those tried do not.

    Makes up to four samples both ways. An iterable dataset is not asked: it cannot begin again.
    """
    found = prove(loader, "files", _finished, _nothing)
    return None if isinstance(found, str) else found.differs  # its workers will show what is wrong


def _nothing(batch: Any) -> None:
    """Return what is to be known of a recorded batch."""


def _finished(batch: Any) -> Any:
    return replayed(batch) if isinstance(batch, RecordedBatch) else batch


def explained(options: Dali, loader: Specification, numbers: Numbers) -> Plan:
    """Return the plan of ``loader``, with one sample's record."""
    obstacle = obstacle_of(loader)
    if obstacle is not None:
        return Plan(options.name, obstacle=obstacle)
    device = device_of(getattr(loader, "device", None))
    first = None if isinstance(loader.dataset, IterableDataset) else 0
    record: Any = None
    try:
        record = observe(loader, partial(_look, first))
        unknown = "" if record else "the first sample could not be read"
    except Unobserved as error:
        unknown = str(error)
    workers = loader.num_workers
    where = f"{workers} worker process{'es' * (workers > 1)}" if workers else "this process"
    stages = (
        Stage("sampler", "this process", sampling_of(loader)),
        Stage("fetch", where, "the dataset's own code and random numbers, on stand-ins for images"),
        Stage("collate", where, _collation(loader)),
        *_replay(record, options, device, numbers.threads),
    )
    notes = tuple(_notes(loader, numbers, record, unknown, device))
    return Plan(options.name, stages, str(device), notes=notes)


def _look(key: int | None, dataset: Any) -> dict[str, Any] | None:
    """Describe a sample; None if it cannot be read."""
    try:
        return describe_sample(dataset, key)
    except Exception:  # it is raised when that sample is asked for
        return None


def _replay(record: Any, options: Dali, device: torch.device, threads: int) -> Iterator[Stage]:
    if not record or not record["calls"]:
        return
    gpu = device.type == "cuda"
    count = f"{threads} thread{'s' * (threads > 1)}"
    sources = [call for call in record["calls"] if call.startswith(("open(", "decode("))]
    if sources:
        how = "nvJPEG; near to Pillow's pixels, not equal" if gpu else "nvImageCodec: JPEG windows"
        how += "; other files: Pillow, in threads"
        yield Stage("decode", f"DALI on {device}" if gpu else count, how)
    made = ("open(", "decode(", "array(", "pixels(", "tensor(")
    calls = [call for call in record["calls"] if not call.startswith(made)]
    images = [call for call in calls if not call.startswith(_TENSORS)]
    tensors = [call for call in calls if call.startswith(_TENSORS)]
    if images:
        how = ", ".join(images)
        if not gpu and options.fast and any("resize" in call for call in images):
            how += "; bilinear resizing by torch: 1 level off, rarely 2 (fast=() for Pillow's)"
        yield Stage("augment", str(device) if gpu else count, how)
    if tensors:
        yield Stage("normalise", str(device) if gpu else count, ", ".join(tensors))


def _collation(loader: Specification) -> str:
    if loader.batch_sampler is None and loader.batch_size is None:
        return "none: samples one by one"
    function: Any = loader.collate_fn
    name = getattr(function, "__name__", type(function).__name__)
    return f"{'torch' if function is default_collate else 'your'}'s {name}, on stand-ins"


def _notes(
    loader: Specification, numbers: Numbers, record: Any, unknown: str, device: torch.device
) -> Iterator[str]:
    yield f"up to {numbers.depth} batches are made ahead by a thread of this process"
    chosen = f"threads={numbers.threads}, depth={numbers.depth}"
    if numbers.by == "tune":
        yield f"{chosen}: as tune() learned for this dataset on this machine"
    elif numbers.by == "rule":
        yield f"{chosen}: by a rule; dataloaders.tune(loader) measures what is best here"
    if unknown:
        yield f"nothing is known of its samples: {unknown}"
    elif not record["calls"]:
        yield "nothing of a sample is recorded: its own code makes what travels"
    elif record["differs"]:
        yield f"the dataset's own code makes all pixels: of its first sample, {record['differs']}"
    for look in dict.fromkeys(record["looks"] if record else ()):
        yield f"decoded where the dataset's code runs: {look}"
    if not loader.num_workers:
        yield "num_workers=0: the dataset's code runs on the loop's thread; give it workers"
    if device.type == "cuda":
        yield "this was not yet run on a GPU"
