"""Describe what DALI does with a loader, stage by stage, as a `Plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import default_collate

from dataloaders.backend import Specification
from dataloaders.plan import Plan, Stage
from dataloaders.specification import sampling_of

from .behind import OnDevice, resizes_quickly
from .job import Job
from .line import RUNS
from .memory import batch_memory
from .plan import Behind, InGraph, Work
from .sources.opaque import Opaque

__all__ = ["described"]


def described(name: str, job: Job, loader: Specification) -> Plan:
    """Return the plan of ``loader``, for which there is a ``job``."""
    stages = [
        Stage("sampler", "this process", sampling_of(loader)),
        _fetching(job),
        *_images(job),
        Stage("collate", "this process", _collation(loader)),
    ]
    return Plan(name, tuple(stages), str(job.device), notes=tuple(_notes(job, loader)))


def _images(job: Job) -> Iterator[Stage]:
    dali = f"DALI on {job.device}" if job.device.type == "cuda" else "DALI's CPU operators"
    dali += "" if job.device.type == "cuda" else f", {_threads(job)}"
    graph = job.work.graph
    if job.kind == "encoded":
        yield Stage("decode", dali, _decoding(job))
    if graph.members:
        yield Stage("augment", dali, f"{_told(job.work, graph)}: {_exactness(graph)}")
    for part in job.work.parts:
        if not isinstance(part, Behind):
            names = ", ".join(map(str, part.members))
            where = str(job.device) if job.device.type == "cuda" else "a thread"
            how = "by batch, torchvision's values to the bit"
            yield Stage("normalise", where, f"{names}: {how}")
            continue
        why = graph.why if part is job.work.parts[0] else None
        obstacle = None if why is None else f"not in DALI: {why}"
        where, how = _threads(job), "image by image, torchvision's own functions"
        exactness = OnDevice.exactness(part) if job.device.type == "cuda" else None
        if exactness is not None:
            where, how = str(job.device), f"by batch, kernels: {exactness}"
        if job.device.type == "cpu" and resizes_quickly(part, job.fast):
            how += "; but bilinear resizing by torch: 1 level off, rarely 2 (fast=() for Pillow's)"
        yield Stage("augment", where, f"{_told(job.work, part)}: {how}", obstacle)


def _fetching(job: Job) -> Stage:
    if isinstance(job.source, Opaque):
        where = "this process"
        if job.num_workers:
            where = f"{job.num_workers} worker process{'es' * (job.num_workers > 1)}"
        how = "the dataset's own code, up to its transform; pixels are handed on"
        return Stage("fetch", where, how)
    if job.kind == "encoded":
        return Stage("fetch", "threads", "files read ahead, sizes from their headers")
    return Stage("fetch", "threads", "pixels in memory, by index")


def _decoding(job: Job) -> str:
    how = "RGB" if job.source.channels == 3 else "grey"
    first = job.work.graph.nodes[0].primitive if job.work.graph.nodes else None
    cut_out = first is not None and type(first).__name__ == "Crop"
    if job.device.type == "cuda":
        how += "; JPEG files by nvJPEG, near to Pillow's pixels and not equal to them"
    elif cut_out:
        how += ", only the window that is cut out"
    return f"{how}; files that DALI decodes otherwise than Pillow: by Pillow, in threads"


def _exactness(graph: InGraph) -> str:
    known = [node.exact for node in graph.nodes if node.exact != "exact"]
    return "; ".join(dict.fromkeys(known)) or "torchvision's pixels to the bit"


def _notes(job: Job, loader: Specification) -> Iterator[str]:
    yield f"up to {job.depth} batches are under way at once, made by threads of this process"
    chosen = f"threads={job.threads}, depth={job.depth}"
    if job.numbers.by == "tune":
        yield f"{chosen}: as tune() learned for this dataset on this machine"
    elif job.numbers.by == "rule":
        yield f"{chosen}: by a rule; dataloaders.tune(loader) measures what is best here"
    if isinstance(job.source, Opaque) and job.source.head.transforms:
        names = ", ".join(type(member).__name__ for member in job.source.head.transforms)
        yield f"the transform begins with {names}, which run where the dataset's own code does"
    elif isinstance(job.source, Opaque):
        yield f"the dataset's own code decodes: {job.source.why}"
    elif loader.num_workers:
        yield (
            f"num_workers={loader.num_workers} is not used: files are read by threads; leave it "
            "out, or keep it for other backends"
        )
    if isinstance(job.source, Opaque) and not job.num_workers:
        yield "num_workers=0: the dataset's code runs on the loop's thread; give it workers"
    if loader.batch_sampler is None:
        yield "batch_size=None: images are made one by one; a batch_size makes better use of DALI"
    if job.source.user_code:
        yield "target_transform and the like run on the loop's thread"
    if job.device.type == "cuda":
        yield (
            f"on {job.device} are at most {RUNS} batches inside DALI, {job.depth} finished ones, "
            "and those that the loop holds"
        )
        memory = batch_memory(job)
        if memory is not None:
            yield (
                f"that is about {memory.inside / 2**20:,.0f} MiB inside DALI, beside what its "
                f"operators keep for themselves, and {memory.waiting / 2**20:,.0f} MiB of finished "
                f"batches, {memory.finished / 2**20:,.1f} MiB each, if all images are as large as "
                "the first one"
            )
        yield "DALI on a CUDA device was not yet run on a GPU"


def _collation(loader: Specification) -> str:
    if loader.batch_sampler is None:
        return "none: samples one by one"
    if loader.collate_fn is default_collate:
        return "torch's default_collate; images are stacked already"
    function: Any = loader.collate_fn
    name = getattr(function, "__name__", type(function).__name__)
    return f"{name}, of samples whose images are views of one tensor"


def _told(work: Work, part: InGraph | Behind) -> str:
    """Name the members of ``part``; for one that is partly elsewhere, its steps in this part."""
    told, number = [], 0
    for member, operator in zip(work.chain.members, work.chain.operators, strict=True):
        own = dict(enumerate(operator.primitives, number))
        number += len(own)
        here = [type(step).__name__ for place, step in own.items() if place in part.places]
        if len(here) == len(own):
            told.append(str(member))
        elif here:
            told.append(f"{', '.join(dict.fromkeys(here))} of {member}")
    return ", ".join(told)


def _threads(job: Job) -> str:
    return "1 thread" if job.threads == 1 else f"{job.threads} threads"
