"""Prefetching to a GPU beside what users do today, in one process, in turns.

    plain      torch's DataLoader, pinned, and batch.to(device, non_blocking=True)
    textbook   the guides' prefetcher: next batch on a side stream, wait_stream and record_stream
    prefetch   DataLoader(backend="prefetch")

Each workload is also taken apart: the step alone on a resident batch, the loader alone, the copy
alone. No way of loading can be faster than the slowest of the three.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

from bench.check.verdicts_gpu import Kernels
from bench.harness import (
    Result,
    Samples,
    Scale,
    case,
    exhaust,
    finished,
    interleave,
)
from dataloaders import DataLoader

_BAR = 1.03
_BATCHES, _ROUNDS = 32, 3  # a loan of a GPU is short


def images(batches: int, shape: tuple[int, ...], waits: tuple[float, ...]) -> Samples:
    """Return finished batches of images and targets, each made after a wait."""
    image, target = torch.rand(shape), torch.arange(shape[0])

    def batch(index: int) -> Any:
        time.sleep(waits[index % len(waits)])
        return image, target

    return Samples(batch, batches)


@dataclass(frozen=True)
class Workload:
    """A loader's arguments, and how long the device works on a batch."""

    name: str
    given: dict[str, Any]
    step_ms: float


def workloads(scale: Scale) -> list[Workload]:
    length = scale.pick(128_000, 512)
    large = scale.pick((256, 3, 224, 224), (2, 3, 8, 8))
    usual = scale.pick((64, 3, 224, 224), (2, 3, 8, 8))
    jitter = (0.001, 0.002, 0.001, 0.040, 0.001, 0.030, 0.002, 0.001)
    rows = torch.utils.data.TensorDataset(torch.rand(length, 64), torch.arange(length))
    many, few = scale.pick((8, 4), (0, 0))

    def made(shape: tuple[int, ...], waits: tuple[float, ...], workers: int) -> dict[str, Any]:
        dataset = images(scale.pick(_BATCHES, 4), shape, waits)
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        return {"dataset": dataset, "batch_size": None, **options}

    return [
        Workload("transfer-heavy, 154 MB", made(large, (0.0,), many), 5.0),
        Workload("tiny steps", {"dataset": rows, "batch_size": 256, "shuffle": True}, 0.1),
        Workload("jittery loader", made(usual, jitter, few), 10.0),
        Workload("long steps", made(usual, (0.0,), few), 40.0),
    ]


def step_of(kernels: Kernels, seconds: float) -> Callable[[Any], None]:
    """Return a step that queues so many seconds of work, after it has read its batch."""
    total = torch.zeros((), device=kernels.device)

    def step(batch: Any) -> None:
        total.add_(batch[0][:, 0].flatten()[:64].sum())
        if kernels.cuda:
            kernels.launch(seconds)

    return step


def plain(loader: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copy in the loop, as most scripts do."""
    for batch in loader:
        yield [leaf.to(device, non_blocking=True) for leaf in batch]


def textbook(loader: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copy one batch ahead on a side stream, as the tuning guides show."""
    stream, iterator = torch.cuda.Stream(), iter(loader)

    def load() -> Any:
        batch = next(iterator, None)
        if batch is None:
            return None
        with torch.cuda.stream(stream):
            return [leaf.to(device, non_blocking=True) for leaf in batch]

    following = load()
    while following is not None:
        torch.cuda.current_stream().wait_stream(stream)
        batch = following
        for leaf in batch:
            leaf.record_stream(torch.cuda.current_stream())
        following = load()
        yield batch


def ways_of(work: Workload, kernels: Kernels) -> dict[str, Callable[[], object]]:
    step, device, cuda = step_of(kernels, work.step_ms / 1e3), kernels.device, kernels.cuda
    theirs = torch.utils.data.DataLoader(**work.given, pin_memory=cuda)
    ours = DataLoader(**work.given, backend="prefetch", device=device)
    host = torch.utils.data.DataLoader(**work.given)
    batch = next(iter(host))
    resident = [leaf.to(device) for leaf in batch]
    pinned = [leaf.pin_memory() if cuda else leaf for leaf in batch]

    def train(batches: Iterable[Any]) -> None:
        for each in batches:
            step(each)
        finished(device)

    def copies() -> None:
        for _ in range(len(host)):
            for leaf in pinned:
                leaf.to(device, non_blocking=True)
        finished(device)

    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: train(plain(theirs, device)),
        "prefetch": lambda: train(ours),
        "step alone": lambda: train(resident for _ in range(len(host))),
        "loader alone": lambda: exhaust(host),
        "copy alone": copies,
    }
    if cuda:
        ways["textbook"] = lambda: train(textbook(theirs, device))
    return ways


@case(
    f"<= {_BAR} x the slowest of step, loader and copy alone; never slower than the best other",
    gpu=True,
    limit_s=140,
)
def prefetch(scale: Scale, folder: Path) -> Result:
    """Does a step ever wait for a copy that could have been hidden?"""
    kernels = Kernels()
    rows: list[tuple[Any, ...]] = []
    met = True
    for work in workloads(scale):
        timings = interleave(ways_of(work, kernels), rounds=scale.pick(_ROUNDS, 1))
        alone = {name: timings[name].median() for name in timings if name.endswith("alone")}
        slowest = max(alone, key=alone.__getitem__)
        floor, ours = alone[slowest], timings["prefetch"]
        others = [name for name in ("plain", "textbook") if name in timings]
        best = min(others, key=lambda name: timings[name].median())
        against = ours.ratio(timings[best], "wall")
        met = met and ours.median() <= _BAR * floor and against.median <= 1.0
        per_step = 1e3 / len(torch.utils.data.DataLoader(**work.given))
        for name in (*others, "prefetch"):
            median, walls = timings[name].median(), timings[name].wall
            spread = f"{min(walls) * per_step:.3f} to {max(walls) * per_step:.3f}"
            rows.append((work.name, name, median * per_step, median / floor, spread))
        rows.append((work.name, f"(of {slowest})", floor * per_step, 1.0, None))
        rows.append((work.name, f"prefetch / {best}", None, None, str(against)))
    return Result(
        ("workload", "way", "ms a step", "x slowest part alone", "spread or ratio"),
        tuple(rows),
        met,
        (f"device: {kernels.device}", "medians of interleaved rounds of one epoch each"),
    )
