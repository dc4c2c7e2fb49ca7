"""How often the bottleneck check is right on a CUDA device: kernels and copies of known length.

The loops are those of the played device (`bench.check.workloads`). A kernel spins for a known
number of the device's cycles; a copy moves as many bytes as take the known time. Both are
calibrated by events. Truths come from the played device with CUDA's launch queue of 1,024. Without
CUDA the same loops run on the host, where a step's kernels are over when it returns.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from bench.check.known_work import Rows, as_array, burn
from bench.check.played import Loop, Overhead
from bench.check.truth import Truth, calibrated
from bench.check.verdicts import summarise
from bench.check.workloads import WORKLOADS
from bench.harness import Case, Result, Scale

__all__ = ["CASES"]

_NAMES = (
    "hidden_short", "double", "above_15", "launch_bound", "deep_queue_above", "accumulation",
    "workers", "workers_slower", "copy_pinned", "copy_pageable", "copy_workers", "item",
    "two_streams", "two_streams_slow",
)  # fmt: skip
_TINY = ("copy_workers",)
_CUDAS_QUEUE = 1024
_PLAYED_BYTES_PER_S = 10e9  # of a workload's copies


class Kernels:
    """Kernels and copies of known length on one device, or on the host without CUDA.

    Attributes:
        device: where they run.
        cycles_per_s: of the kernel that spins.
        bytes_per_s: of a copy, by whether it is from pinned memory.
    """

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.cycles_per_s = 0.0
        self.bytes_per_s = {True: _PLAYED_BYTES_PER_S, False: _PLAYED_BYTES_PER_S}
        if self.cuda:
            self.cycles_per_s = self._cycles_per_s()
            for pinned in (True, False):
                source, target = self.buffers(1 << 26, pinned)
                seconds = self._seconds(lambda: target.copy_(source, non_blocking=True))  # noqa: B023
                self.bytes_per_s[pinned] = source.nbytes / seconds

    def spin(self, seconds: float) -> None:
        """Give the current stream a kernel of so many seconds."""
        if self.cuda:
            torch.cuda._sleep(int(seconds * self.cycles_per_s))  # type: ignore[no-untyped-call]
        else:
            burn("wait", seconds)

    def buffers(self, nbytes: int, pinned: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a source on the host and a target on the device."""
        source = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned and self.cuda)
        return source, torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def _cycles_per_s(self) -> float:
        """Return the device's cycles a second, once its clocks are up."""
        cycles = 50_000_000
        return cycles / self._seconds(lambda: torch.cuda._sleep(cycles))  # type: ignore[no-untyped-call]

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that ``work`` takes on the device, the median of nine."""
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


class KernelStep:
    """The step of a `Loop`, with real kernels."""

    def __init__(self, loop: Loop, kernels: Kernels) -> None:
        self._loop, self._do = loop, kernels
        self._kernels = itertools.cycle(loop.kernels)
        self._calls = 0
        self._side = torch.cuda.Stream() if loop.side_s and kernels.cuda else None
        self._weight = torch.nn.Parameter(torch.zeros(1, device=kernels.device))
        self._optimizer = torch.optim.SGD([self._weight], lr=0.0)
        if loop.nbytes:
            nbytes = loop.nbytes / _PLAYED_BYTES_PER_S * kernels.bytes_per_s[loop.pinned]
            self._source, self._target = kernels.buffers(int(nbytes), loop.pinned)

    def __call__(self, batch: Any) -> None:
        loop, do = self._loop, self._do
        if loop.nbytes and not batch.is_cuda:
            batch.to(do.device, non_blocking=True)
            if do.cuda:
                self._target.copy_(self._source, non_blocking=True)
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                do.spin(loop.side_s)
        kernel = next(self._kernels)
        for _ in range(loop.launches):
            burn(loop.host_kind, loop.host_s)
            do.spin(kernel)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        self._calls += 1
        if loop.optimizer_every and self._calls % loop.optimizer_every == 0:
            self._weight.grad = torch.zeros_like(self._weight)
            self._optimizer.step()
        if loop.item_every and self._calls % loop.item_every == 0 and do.cuda:
            torch.cuda.current_stream().synchronize()


def truth_of(loop: Loop, overhead: Overhead, *, cuda: bool) -> Truth:
    """Return real / synthetic with torch's own cost, on the played device."""
    if cuda:
        loop = replace(loop, queue=_CUDAS_QUEUE)
    else:  # each step is waited for; nothing is copied, and no stream runs beside another
        loop = replace(loop, item_every=1, nbytes=0, side_s=0.0)
    value = loop.truth(take_s=overhead.take, make_s=overhead.make)
    return Truth(value, value, value)


def _examine(name: str, kernels: Kernels, budget_s: float, seconds: float) -> dict[str, Any]:
    from dataloaders.bottleneck import check_bottleneck

    workload = WORKLOADS[f"device_{name}"]
    assert workload.loop is not None
    loop = workload.loop(0)
    pins = bool(loop.nbytes) and loop.pinned and kernels.cuda
    loader: DataLoader[Any] = DataLoader(
        Rows(loop.loads, loop.load_kind, batches=1_000_000),
        4,
        num_workers=loop.workers,
        prefetch_factor=loop.prefetch if loop.workers else None,
        collate_fn=as_array if loop.workers and not loop.nbytes else None,
        pin_memory=pins,
    )
    began = time.perf_counter()
    report = check_bottleneck(loader, KernelStep(loop, kernels), budget_s=budget_s, predict=False)
    check_s = time.perf_counter() - began
    overhead = calibrated(workload, seconds)
    return {
        "name": workload.name,
        "check_s": check_s,
        "report": json.loads(replace(report, timeline={}).to_json()),
        "truth": asdict(truth_of(loop, overhead, cuda=kernels.cuda)),
    }


def run(scale: Scale) -> Result:
    """Examine the check on each loop; the played device's cases have the same table."""
    kernels, threads = Kernels(), torch.get_num_threads()
    names, budget_s, seconds = scale.pick(full=(_NAMES, 6.0, 1.0), tiny=(_TINY, 1.0, 0.2))
    torch.set_num_threads(1)  # of the step: loads count on a free core
    try:
        result = summarise([_examine(name, kernels, budget_s, seconds) for name in names])
    finally:
        torch.set_num_threads(threads)
    copies = ", ".join(f"{rate / 1e9:.1f}" for rate in kernels.bytes_per_s.values())
    facts = f"{kernels.cycles_per_s / 1e9:.2f} cycles a ns; GB/s pinned, pageable: {copies}"
    return replace(result, notes=(*result.notes, facts))


CASES = [
    Case(
        "verdicts_gpu",
        "How often is the check right with kernels and copies of known length on a CUDA device?",
        "no wrong verdict, at most 10 % inconclusive, truth inside the interval in 90 %",
        run,
        gpu=True,
        limit_s=200,
    ),
]
