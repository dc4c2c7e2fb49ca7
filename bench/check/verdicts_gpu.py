"""How often the bottleneck check is right on a CUDA device: kernels and copies of known length.

The loops are those of the played device (`bench.check.workloads`). A kernel spins for a known
number of the device's cycles; a copy moves as many bytes as take the known time. Both are
calibrated by events. Truths come from the played device with CUDA's launch queue of 1,024. Without
CUDA the same loops run on the host, where a step's kernels are over when it returns.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.check.known_work import burn
from bench.check.played import Loop, Overhead, PlayedStep, RealTime
from bench.check.truth import calibrated
from bench.check.verdicts import entry_of, summarise
from bench.check.workloads import WORKLOADS
from bench.harness import Result, Scale, case, device_here
from dataloaders.bottleneck import check_bottleneck
from dataloaders.measuring.intervals import Interval

_NAMES = (
    "hidden_short", "double", "above_15", "launch_bound", "deep_queue_above", "accumulation",
    "workers", "workers_slower", "copy_pinned", "copy_pageable", "copy_workers", "item",
    "two_streams", "two_streams_slow",
)  # fmt: skip
_CUDAS_QUEUE = 1024
_PLAYED_BYTES_PER_S = 10e9  # of a workload's copies


class Kernels:
    """What `PlayedStep` does to a device, done to the CUDA device; to the host without CUDA.

    Attributes:
        device: where kernels run.
        cycles_per_s: of the kernel that spins.
        bytes_per_s: of a copy, by whether it is from pinned memory.
    """

    def __init__(self) -> None:
        self.time = RealTime()
        self.device = device_here()
        self.cuda = self.device.type == "cuda"
        self.cycles_per_s = 0.0
        self.bytes_per_s = {True: _PLAYED_BYTES_PER_S, False: _PLAYED_BYTES_PER_S}
        if self.cuda:
            cycles = 50_000_000
            self.cycles_per_s = cycles / self._seconds(lambda: torch.cuda._sleep(cycles))  # type: ignore[no-untyped-call]
            for pinned in (True, False):
                source, target = self._buffers(1 << 26, pinned)
                seconds = self._seconds(lambda: target.copy_(source, non_blocking=True))  # noqa: B023
                self.bytes_per_s[pinned] = source.nbytes / seconds

    def holds(self, batch: torch.Tensor) -> bool:
        return batch.is_cuda or not self.cuda

    def stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream() if self.cuda else None

    def launch(self, seconds: float, stream: torch.cuda.Stream | None = None) -> None:
        """Give a stream a kernel of so many seconds."""
        if not self.cuda:
            burn("wait", seconds)
            return
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * self.cycles_per_s))  # type: ignore[no-untyped-call]

    def copy(self, nbytes: int, *, pinned: bool) -> None:
        """Copy as many bytes as take as long as ``nbytes`` take the played device."""
        source, target = self._buffers(
            int(nbytes / _PLAYED_BYTES_PER_S * self.bytes_per_s[pinned]), pinned
        )
        target.copy_(source, non_blocking=True)

    def record(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event | None:
        return (stream or torch.cuda.current_stream()).record_event() if self.cuda else None

    def wait_for(
        self, event: torch.cuda.Event | None, stream: torch.cuda.Stream | None = None
    ) -> None:
        if event is not None:
            (stream or torch.cuda.current_stream()).wait_event(event)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.current_stream().synchronize()

    @functools.lru_cache(1)  # noqa: B019  of the one loop that is examined
    def _buffers(self, nbytes: int, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a source on the host and a target on the device."""
        source = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned and self.cuda)
        return source, torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that ``work`` takes on the device, its clocks up: a median of nine."""
        until = time.perf_counter() + 0.5
        while time.perf_counter() < until:
            work()
            torch.cuda.synchronize()
        took = []
        for _ in range(9):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()  # type: ignore[no-untyped-call]
            work()
            last.record()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            took.append(first.elapsed_time(last) / 1e3)  # type: ignore[no-untyped-call]
        return sorted(took)[4]


def truth_of(loop: Loop, overhead: Overhead, *, cuda: bool) -> Interval:
    """Return real / synthetic with torch's own cost, on the played device."""
    if cuda:
        loop = replace(loop, queue=_CUDAS_QUEUE)
    else:  # each step is waited for; nothing is copied, and no stream runs beside another
        loop = replace(loop, item_every=1, nbytes=0, side_s=0.0)
    value = loop.truth(take_s=overhead.take, make_s=overhead.make)
    return Interval(value, value, value)


def _examine(name: str, kernels: Kernels, budget_s: float, seconds: float) -> dict[str, Any]:
    workload = WORKLOADS[f"device_{name}"]
    loop = workload.loop
    assert loop is not None
    loader = loop.loader(pin_memory=bool(loop.nbytes) and loop.pinned and kernels.cuda)
    played = PlayedStep(loop, kernels, loader)

    def step(batch: torch.Tensor) -> None:
        if loop.nbytes:
            batch.to(kernels.device, non_blocking=True)  # shows the check where it is wanted
        played(batch)

    began = time.perf_counter()
    report = check_bottleneck(loader, step, budget_s=budget_s, predict=False)
    check_s = time.perf_counter() - began
    truth = truth_of(loop, calibrated(workload, seconds), cuda=kernels.cuda)
    return entry_of(workload, report, check_s, truth)


@case(
    "no wrong verdict, at most 10 % inconclusive, truth inside the interval in 90 %",
    one_thread=True,
    gpu=True,
    limit_s=200,
)
def verdicts_gpu(scale: Scale, folder: Path) -> Result:
    """How often is the check right with kernels and copies of known length on a CUDA device?"""
    kernels = Kernels()
    budget_s, seconds = scale.pick(full=(6.0, 1.0), tiny=(1.0, 0.2))
    names = scale.named(_NAMES, ("copy_workers",))
    result = summarise([_examine(name, kernels, budget_s, seconds) for name in names])
    copies = ", ".join(f"{rate / 1e9:.1f}" for rate in kernels.bytes_per_s.values())
    facts = f"{kernels.cycles_per_s / 1e9:.2f} cycles a ns; GB/s pinned, pageable: {copies}"
    return replace(result, notes=(*result.notes, facts))
