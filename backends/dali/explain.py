"""Find what is recorded of a dataset's samples, in a process of its own; return it as a `Plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import default_collate

from dataloaders.backend import Specification
from dataloaders.plan import Plan, Stage
from dataloaders.recording.program import Node, RecordedBatch, ordered, unpack, wanted_of
from dataloaders.replaying.device import made_on_device
from dataloaders.replaying.grouped import levels_off
from dataloaders.replaying.host import HostReplay
from dataloaders.replaying.proof import Proof, prove
from dataloaders.specification import device_of, other_iteration, sampling_of

if TYPE_CHECKING:
    from . import Dali

_TENSORS = ("torch.", "tensor.", "v1t.", "v2.", "to_tensor", "pil_to_tensor")


def obstacle_of(loader: Specification) -> str | None:
    """Return why this loader cannot be served, and what to do about it."""
    if (other := other_iteration(loader)) is not None:
        return f"{other}; use backend='stock'"
    wanted = getattr(loader, "device", None)
    if wanted is not None and torch.device(wanted).type == "cuda" and not torch.cuda.is_available():
        return f"device={str(wanted)!r}: there is no CUDA device that torch can use; leave it out"
    return None


def proof_of(loader: Specification) -> Proof:
    """Return what recording does to samples of ``loader``."""
    return prove(loader, "files", _finished, _calls)


def _finished(batch: Any) -> Any:
    if not isinstance(batch, RecordedBatch):
        return batch
    from .decode import WindowDecoder

    with closing(HostReplay(WindowDecoder(), 1)) as replay:
        return replay.apply(batch)


class _Call(NamedTuple):
    """A recorded call; with a GPU: whether the device makes it, and how many levels off."""

    text: str
    on_device: bool
    off: int


def _calls(batch: Any) -> list[_Call]:
    """Return the steps of one sample of a recorded batch, in order."""
    if not isinstance(batch, RecordedBatch):
        return []
    nodes = unpack(batch)
    on_device = dict(zip(nodes, made_on_device(batch), strict=True))
    roots = [nodes[number] for number in wanted_of(batch.rest)]
    stacks = [node for node in nodes if node.op == "torch.stack"]
    for node in stacks:
        node.inputs = node.inputs[:1]
    if not stacks and batch.again is not None and isinstance(batch.again.keys, list):
        roots = roots[: max(1, len(roots) // len(batch.again.keys))]
    return [
        _Call(_call(node), on_device[node], levels_off(node.op))
        for node in ordered(roots)
        if node not in stacks
    ]


def _call(node: Node) -> str:
    args = list(map(repr, node.args))
    if not node.inputs:
        args[0] = f"{len(node.args[0])} bytes"
    args += [f"{name}={value!r}" for name, value in node.kwargs]
    return f"{node.op}({', '.join(args)})"


def explained(options: Dali, loader: Specification) -> Plan:
    """Return the plan of ``loader``, with one sample's record."""
    obstacle = obstacle_of(loader)
    if obstacle is not None:
        return Plan(options.name, obstacle=obstacle)
    device = device_of(loader)
    found = proof_of(loader)
    calls: list[_Call] = next(filter(None, found.facts), []) if found.obstacle is None else []
    workers = loader.num_workers
    where = f"{workers} worker process{'es' * (workers > 1)}" if workers else "this process"
    on = ", on stand-ins" if found.obstacle is None else ""
    code = f"the dataset's own code and random numbers{on and on + ' for images'}"
    stages = (
        Stage("sampler", "this process", sampling_of(loader)),
        Stage("fetch", where, code),
        Stage("collate", where, _collation(loader) + on),
        *_replay(calls, options, device, options.threads_for(loader)),
    )
    notes = tuple(_notes(options, loader, found, calls, device))
    return Plan(options.name, stages, str(device), notes=notes)


def _replay(
    recorded: Sequence[_Call], options: Dali, device: torch.device, threads: int
) -> Iterator[Stage]:
    stages: dict[tuple[str, bool], list[_Call]] = {}
    for call in recorded:
        op = call.text.partition("(")[0]
        stage = "normalise" if op.startswith(_TENSORS) else "augment"
        stage = "decode" if op in ("open", "decode") else stage
        if op not in ("array", "tensor"):
            stages.setdefault((stage, call.on_device and device.type == "cuda"), []).append(call)
    for (stage, on_device), calls in stages.items():
        where = str(device) if on_device else f"{threads} thread{'s' * (threads > 1)}"
        if stage == "decode":
            yield Stage(stage, f"DALI on {device}" if on_device else where, _DECODED[on_device])
            continue
        texts = [call.text + _OFF.format(call.off) * (on_device and call.off > 0) for call in calls]
        resized = not on_device and options.fast and any("pil.resize" in text for text in texts)
        yield Stage(stage, where, ", ".join(texts) + _RESIZED * bool(resized))


_DECODED = {
    True: "nvJPEG; near to Pillow's pixels, not equal; other files: Pillow, in threads",
    False: "nvImageCodec: JPEG windows; other files: Pillow",
}
_OFF = " (at most {} of 256 levels off)"
_RESIZED = "; bilinear resizing by torch: 1 level off, rarely 2 (fast=() for Pillow's)"


def _collation(loader: Specification) -> str:
    if loader.batch_sampler is None and loader.batch_size is None:
        return "none: samples one by one"
    function: Any = loader.collate_fn
    name = getattr(function, "__name__", type(function).__name__)
    return f"{'torch' if function is default_collate else 'your'}'s {name}"


def _notes(
    options: Dali,
    loader: Specification,
    found: Proof,
    calls: Sequence[_Call],
    device: torch.device,
) -> Iterator[str]:
    yield "batches are made ahead by a thread of this process"
    if options.threads == "auto":
        yield f"threads={options.threads_for(loader)}: by a rule from this rank's cores"
    if found.obstacle is not None:
        yield f"the dataset's own code makes all pixels: {found.obstacle}"
    elif not calls:
        yield "nothing of a sample is recorded: its own code makes what travels"
    for look in dict.fromkeys(found.looks):
        yield f"decoded where the dataset's code runs: {look}"
    if not loader.num_workers:
        yield "num_workers=0: the dataset's code runs on the loop's thread; give it workers"
    if device.type == "cuda":
        yield "this was not yet run on a GPU"
