"""Prefetching to a GPU beside what users do today, in one process, in turns.

    plain      torch's DataLoader, pinned, and batch.to(device, non_blocking=True)
    textbook   the guides' prefetcher: next batch on a side stream, wait_stream and record_stream
    prefetch   DataLoader(backend="prefetch")

Each workload is also taken apart: the step alone on a resident batch, the loader alone, the copy
alone. No way of loading can be faster than the slowest of the three.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

from bench.harness import (
    Case,
    Result,
    Scale,
    Timings,
    device_here,
    exhaust,
    finished,
    interleave,
)
from bench.peers import prefetchers
from dataloaders import DataLoader

_BAR = 1.03
_BATCHES, _ROUNDS = 32, 3  # a loan of a GPU is short


class Images(torch.utils.data.Dataset[Any]):
    """Finished batches of images and targets, each made after a wait."""

    def __init__(self, batches: int, shape: tuple[int, ...], waits: tuple[float, ...]) -> None:
        self.batches = batches
        self.image, self.target = torch.rand(shape), torch.arange(shape[0])
        self.waits = waits

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.waits[index % len(self.waits)])
        return self.image, self.target


@dataclass(frozen=True)
class Workload:
    """How batches are made, and how long the device works on one."""

    name: str
    dataset: Any
    step_ms: float
    batches: int
    workers: int = 0
    images: bool = True

    def loader(self, kind: type[Any], **options: Any) -> Any:
        if self.images:
            options.update(batch_size=None, num_workers=self.workers)
            options["persistent_workers"] = self.workers > 0
        else:
            options.update(batch_size=256, shuffle=True)
        return kind(self.dataset, **options)


def workloads(scale: Scale) -> list[Workload]:
    batches, length = scale.pick(_BATCHES, 4), scale.pick(128_000, 512)
    large = scale.pick((256, 3, 224, 224), (2, 3, 8, 8))
    usual = scale.pick((64, 3, 224, 224), (2, 3, 8, 8))
    jitter = (0.001, 0.002, 0.001, 0.040, 0.001, 0.030, 0.002, 0.001)
    rows = torch.utils.data.TensorDataset(torch.rand(length, 64), torch.arange(length))
    many, few = scale.pick((8, 4), (0, 0))
    return [
        Workload("transfer-heavy, 154 MB", Images(batches, large, (0.0,)), 5.0, batches, many),
        Workload("tiny steps", rows, 0.1, length // 256, images=False),
        Workload("jittery loader", Images(batches, usual, jitter), 10.0, batches, few),
        Workload("long steps", Images(batches, usual, (0.0,)), 40.0, batches, few),
    ]


class Step:
    """Work that keeps the device busy for about ``seconds``, after it has read its batch."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.total = torch.zeros((), device=device)
        self.cycles = 0
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.cuda._sleep(100_000_000)
            end.record()
            torch.cuda.synchronize()
            self.cycles = int(100_000_000 * seconds * 1e3 / begin.elapsed_time(end))

    def __call__(self, batch: Any) -> None:
        """Queue the work; return before the device is done."""
        self.total += batch[0][:, 0].flatten()[:64].sum()
        if self.cycles:
            torch.cuda._sleep(self.cycles)


def ways_of(work: Workload, device: torch.device) -> dict[str, Callable[[], object]]:
    step = Step(device, work.step_ms / 1e3)
    cuda = device.type == "cuda"
    theirs = work.loader(torch.utils.data.DataLoader, pin_memory=cuda)
    ours = work.loader(DataLoader, backend="prefetch", device=device)
    host = work.loader(torch.utils.data.DataLoader)
    batch = next(iter(host))
    resident = [leaf.to(device) for leaf in batch]
    pinned = [leaf.pin_memory() if cuda else leaf for leaf in batch]

    def train(batches: Iterable[Any]) -> None:
        for each in batches:
            step(each)
        finished(device)

    def copies() -> None:
        for _ in range(work.batches):
            for leaf in pinned:
                leaf.to(device, non_blocking=True)
        finished(device)

    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: train(prefetchers.plain(theirs, device)),
        "prefetch": lambda: train(ours),
        "step alone": lambda: train(resident for _ in range(work.batches)),
        "loader alone": lambda: exhaust(host),
        "copy alone": copies,
    }
    if cuda:
        ways["textbook"] = lambda: train(prefetchers.textbook(theirs, device))
    return ways


def run(scale: Scale) -> Result:
    device = device_here()
    rows: list[tuple[Any, ...]] = []
    met, data = True, {}
    for work in workloads(scale):
        timings = interleave(ways_of(work, device), rounds=scale.pick(_ROUNDS, 1))
        alone = {name: timings[name].median() for name in timings if name.endswith("alone")}
        slowest = max(alone, key=alone.__getitem__)
        floor, ours = alone[slowest], timings["prefetch"]
        others = [name for name in ("plain", "textbook") if name in timings]
        best = min(others, key=lambda name: timings[name].median())
        against = ours.ratio(timings[best], "wall")
        met = met and ours.median() <= _BAR * floor and against.median <= 1.0
        rows += [row(work, name, timings[name], floor) for name in (*others, "prefetch")]
        rows.append((work.name, f"(of {slowest})", 1e3 * floor / work.batches, 1.0, None))
        rows.append((work.name, f"prefetch / {best}", None, None, str(against)))
        data[work.name] = {name: vars(times) for name, times in timings.items()}
    return Result(
        ("workload", "way", "ms a step", "x slowest part alone", "spread or ratio"),
        tuple(rows),
        met,
        (f"device: {device}", "medians of interleaved rounds of one epoch each"),
        data,
    )


def row(work: Workload, name: str, timings: Timings, floor: float) -> tuple[Any, ...]:
    per_step = 1e3 / work.batches
    spread = f"{min(timings.wall) * per_step:.3f} to {max(timings.wall) * per_step:.3f}"
    return (work.name, name, timings.median() * per_step, timings.median() / floor, spread)


CASES = [
    Case(
        "prefetch",
        "Does a step ever wait for a copy that could have been hidden?",
        f"<= {_BAR} x the slowest of step, loader and copy alone; never slower than the best other",
        run,
        gpu=True,
        limit_s=140,
    )
]
