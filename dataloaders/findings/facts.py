"""Hold facts about a step, and the settings that it ran under, as plain values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from dataloaders.machine import resources
from dataloaders.measuring.intervals import Interval

KINDS = ("product", "convolution")


class Place(NamedTuple):
    """Names something that a step does at one place of the user's code."""

    kind: str  # "sync", "moved", "zeroed", "chain", "empty_cache", "bias" or "debugging"
    what: str  # in words, such as ".item()" or a module's name
    device: str  # the type of the device on which it happens
    where: str | None  # file:line; None if no frame of the user's code is on the stack


@dataclass(frozen=True)
class Facts:
    """Holds what the rules decide on."""

    device: str = "cpu"  # the type of the device that does most of the step's arithmetic
    # What at least two watched steps do -> how much of it: times, bytes or operators.
    places: Mapping[Place, int] = field(default_factory=dict)
    # "product", "convolution", "backward", ... -> file:line of the first one in a step
    sites: Mapping[str, str] = field(default_factory=dict)
    # (device type, dtype, kind) -> floating-point operations; attention counts as products.
    flops: Mapping[tuple[str, torch.dtype, str], int] = field(default_factory=dict)
    convolutions: int = 0  # in the forward pass
    fixed_shapes: bool = True  # whether their shapes were the same in all watched steps
    varied: bool = False  # whether batches differ in shape
    planar: int = 0  # 2-d convolutions whose inputs of several channels are in NCHW order
    autotuner: bool = False  # this and the next: cuDNN's flags when the convolutions ran
    deterministic: bool = False
    convolution_tf32: bool = True
    matmul_precision: str = "highest"  # torch's, for float32
    data_parallel: int = 0  # devices of a torch.nn.DataParallel; 0 without one
    reduces_early: bool = False  # whether DDP reduced in a step after which no optimizer stepped
    cycle: int = 1  # batches to one step of the optimizer
    checkpointed: bool = False  # whether activations are computed again in the backward pass
    half: torch.dtype | None = None  # 16 bits, if the device multiplies these faster than float32
    tf32: bool = False  # whether the device has TF32
    memory: float | None = None  # the largest share of the device's memory in use
    threads: int = 1  # these four are this process's
    cores: int = 1
    workers: int = 0
    numa_nodes: int = 1  # to which its cores belong
    contention: Interval | None = None  # seconds a batch, if clearly above zero

    def of_kind(self, kind: str) -> dict[Place, int]:
        """Return the places of one kind."""
        return {place: much for place, much in self.places.items() if place.kind == kind}

    def work(self, *dtypes: torch.dtype, kinds: tuple[str, ...] = KINDS) -> int:
        """Return the step's floating-point operations in ``dtypes`` on its device."""
        wanted = [(self.device, dtype, kind) for dtype in dtypes for kind in kinds]
        return sum(self.flops.get(key, 0) for key in wanted)


def environment(device: str) -> dict[str, object]:
    """Return `Facts` fields about the machine for a step on ``device``; initialise no device."""
    facts: dict[str, object] = {
        "threads": torch.get_num_threads(),
        "cores": resources.usable_cores(),
        "numa_nodes": _numa_nodes(),
    }
    if device == "cpu":
        tests = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        quick = any(getattr(torch.cpu, test, lambda: False)() for test in tests)
        facts["half"] = torch.bfloat16 if quick else None
    elif device == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generation, _ = torch.cuda.get_device_capability()
        facts["tf32"] = generation >= 8 and torch.version.hip is None
        if generation >= 7:  # tensor cores
            facts["half"] = torch.bfloat16 if generation >= 8 else torch.float16
        _, total = torch.cuda.mem_get_info()
        facts["memory"] = torch.cuda.max_memory_allocated() / total
    return facts


def _numa_nodes(root: Path = Path("/sys/devices/system/node")) -> int:
    """Return how many NUMA nodes the cores that this process may use belong to."""
    try:
        cores = os.sched_getaffinity(0)
        nodes = {
            node.parent.name
            for node in root.glob("node[0-9]*/cpu[0-9]*")
            if int(node.name.removeprefix("cpu")) in cores
        }
    except (AttributeError, OSError, ValueError):
        return 1
    return max(1, len(nodes))
