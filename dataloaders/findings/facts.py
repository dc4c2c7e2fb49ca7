"""What was seen of a step, and the settings that it ran under, as plain values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from dataloaders.machine import resources
from dataloaders.measuring.intervals import Interval

__all__ = ["Facts", "Place", "environment"]


KINDS = ("product", "convolution")


class Place(NamedTuple):
    """Names something that a step does at one place of the user's code.

    Attributes:
        kind: "sync", "moved", "zeroed", "chain", "empty_cache", "bias" or "debugging".
        what: it in words, such as ".item()" or a module's name.
        device: the type of the device on which it happens.
        where: ``file:line``; None if no frame of the user's was on the stack.
    """

    kind: str
    what: str
    device: str
    where: str | None


@dataclass(frozen=True)
class Facts:
    """Holds what the rules decide on.

    Attributes:
        device: the type of the device that does most of the step's arithmetic.
        places: what each watched step does -> how much of it (times, bytes or operators, the least
            of the watched steps).
        flops: (device type, dtype, "product" or "convolution") -> floating-point operations in a
            step; attention counts as products.
        convolutions: how many there are in a step, forward.
        fixed_shapes: whether their shapes were the same in all watched steps.
        varied: whether batches differ in shape.
        planar: how many of the 2-d ones read inputs of several channels in NCHW order.
        autotuner, deterministic: cuDNN's flags, as the convolutions ran under them.
        matmul_precision: torch's, for float32.
        data_parallel: devices of a `torch.nn.DataParallel`; 0 without one.
        reduces_early: whether DDP reduced gradients in a step after which no optimizer stepped.
        cycle: batches to one step of the optimizer.
        checkpointed: whether activations are computed again in the backward pass.
        half: the 16-bit dtype that the device multiplies faster than float32; None without one.
        tf32: whether the device has TF32.
        memory: share of the device's memory that the step took at its most; None if unknown.
        threads, cores, workers, numa_nodes: of this process; nodes that its cores belong to.
        contention: seconds a batch that the loader's workers slow the step down by, if that is
            more than the measurement's resolution; None if not.
    """

    device: str = "cpu"
    places: Mapping[Place, int] = field(default_factory=dict)
    flops: Mapping[tuple[str, torch.dtype, str], int] = field(default_factory=dict)
    convolutions: int = 0
    fixed_shapes: bool = True
    varied: bool = False
    planar: int = 0
    autotuner: bool = False
    deterministic: bool = False
    matmul_precision: str = "highest"
    data_parallel: int = 0
    reduces_early: bool = False
    cycle: int = 1
    checkpointed: bool = False
    half: torch.dtype | None = None
    tf32: bool = False
    memory: float | None = None
    threads: int = 1
    cores: int = 1
    workers: int = 0
    numa_nodes: int = 1
    contention: Interval | None = None

    def of_kind(self, kind: str) -> dict[Place, int]:
        """Return the places of one kind."""
        return {place: much for place, much in self.places.items() if place.kind == kind}

    def work(self, *dtypes: torch.dtype, kinds: tuple[str, ...] = KINDS) -> int:
        """Return the step's floating-point operations in ``dtypes`` on its device."""
        wanted = [(self.device, dtype, kind) for dtype in dtypes for kind in kinds]
        return sum(self.flops.get(key, 0) for key in wanted)


def environment(device: str) -> dict[str, object]:
    """Return the `Facts` of the machine, for a step on ``device``; initialises no device."""
    facts: dict[str, object] = {
        "threads": torch.get_num_threads(),
        "cores": resources.usable_cores(),
        "numa_nodes": _numa_nodes(),
    }
    if device == "cpu":
        facts["half"] = torch.bfloat16 if _cpu_has_bf16() else None
    elif device == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generation, _ = torch.cuda.get_device_capability()
        facts["tf32"] = generation >= 8 and torch.version.hip is None
        if generation >= 7:  # tensor cores
            facts["half"] = torch.bfloat16 if generation >= 8 else torch.float16
        _, total = torch.cuda.mem_get_info()
        facts["memory"] = torch.cuda.max_memory_allocated() / total
    return facts


def _cpu_has_bf16() -> bool:
    tests = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, test, lambda: False)() for test in tests)


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
