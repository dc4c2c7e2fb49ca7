"""The CUDA-stream prefetcher beside the ways that users have today, in one process, in turns.

    plain      torch's DataLoader, pinned, and batch.to(device, non_blocking=True)
    textbook   the guides' prefetcher: next batch on a side stream, wait_stream and record_stream
    timm       timm.data.loader.PrefetchLoader (images with a target only)
    prefetch   DataLoader(backend="prefetch")

Each workload is also taken apart: the step alone on a resident batch, the loader alone, the copy
alone. No way of loading can be quicker than the slowest of the three.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

from bench.harness import Case, Cell, Result, Scale, Timings, device_here, finished, interleave
from dataloaders import DataLoader

__all__ = ["CASES"]

_BAR = 1.03
_BATCHES, _ROUNDS = 32, 3  # a loan of a GPU is short


class Images(torch.utils.data.Dataset[Any]):
    """Finished batches of images and targets, each made after a wait."""

    def __init__(self, batches: int, shape: tuple[int, ...], waits: tuple[float, ...]) -> None:
        self.batches = batches
        self.image = torch.rand(shape)
        self.target = torch.arange(shape[0])
        self.waits = waits

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.waits[index % len(self.waits)])
        return self.image, self.target


@dataclass(frozen=True)
class Workload:
    """What is trained: how batches are made and how long the device works on one."""

    name: str
    loader: Callable[[type[Any], dict[str, Any]], Any]
    step_ms: float
    batches: int
    images: bool = True


def _ready(scale: Scale, shape: tuple[int, ...], waits: tuple[float, ...], workers: int) -> Any:
    def make(kind: type[Any], options: dict[str, Any]) -> Any:
        dataset = Images(scale.pick(_BATCHES, 4), shape, waits)
        workers_here = scale.pick(workers, 0)
        return kind(
            dataset,
            batch_size=None,
            num_workers=workers_here,
            persistent_workers=workers_here > 0,
            **options,
        )

    return make


def _rows(scale: Scale) -> Any:
    data = torch.utils.data.TensorDataset(
        torch.rand(scale.pick(256_000, 512), 64), torch.arange(scale.pick(256_000, 512))
    )

    def make(kind: type[Any], options: dict[str, Any]) -> Any:
        return kind(data, batch_size=256, shuffle=True, **options)

    return make


def _workloads(scale: Scale) -> list[Workload]:
    large = scale.pick((256, 3, 224, 224), (2, 3, 8, 8))
    usual = scale.pick((64, 3, 224, 224), (2, 3, 8, 8))
    jitter = (0.001, 0.002, 0.001, 0.040, 0.001, 0.030, 0.002, 0.001)
    batches = scale.pick(_BATCHES, 4)
    return [
        Workload("transfer-heavy, 154 MB", _ready(scale, large, (0.0,), 8), 5.0, batches),
        Workload("tiny steps", _rows(scale), 0.1, scale.pick(1000, 2), images=False),
        Workload("jittery loader", _ready(scale, usual, jitter, 4), 10.0, batches),
        Workload("long steps", _ready(scale, usual, (0.0,), 4), 40.0, batches),
    ]


class Step:
    """Work that keeps the device busy for about ``seconds``, after it has read its batch."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
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
        """Queue it; returns before the device is done."""
        self.total += batch[0][:, 0].flatten()[:64].sum()
        if self.cycles:
            torch.cuda._sleep(self.cycles)


def _textbook(loader: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """One batch ahead on a side stream, as the tuning guides have it."""
    stream = torch.cuda.Stream()
    iterator = iter(loader)

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


def _ways(work: Workload, device: torch.device, step: Step) -> dict[str, Callable[[], object]]:
    theirs = work.loader(torch.utils.data.DataLoader, {"pin_memory": device.type == "cuda"})
    ours = work.loader(DataLoader, {"backend": "prefetch", "device": device})

    def train(batches: Iterable[Any]) -> None:
        for batch in batches:
            step(batch)
        finished(device)

    def plain() -> Iterator[Any]:
        for batch in theirs:
            yield [leaf.to(device, non_blocking=True) for leaf in batch]

    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: train(plain()),
        "prefetch": lambda: train(ours),
    }
    if device.type == "cuda":
        ways["textbook"] = lambda: train(_textbook(theirs, device))
        timm = _timm(theirs, device) if work.images else None
        if timm is not None:
            ways["timm"] = lambda: train(timm)
    ways |= _alone(work, device, step)
    return ways


def _timm(loader: Any, device: torch.device) -> Any:
    try:
        from timm.data.loader import PrefetchLoader

        # It always normalises; with these numbers it does so without changing anything.
        made = PrefetchLoader(loader, mean=(0.0,) * 3, std=(1 / 255,) * 3, device=device)
        next(iter(made))
    except Exception as error:  # not installed, or not as it was when this was written
        print(f"prefetch: timm's way is left out: {error!r}")
        return None
    return made


def _alone(work: Workload, device: torch.device, step: Step) -> dict[str, Callable[[], object]]:
    host = work.loader(torch.utils.data.DataLoader, {})
    batch = next(
        iter(
            work.loader(torch.utils.data.DataLoader, {"num_workers": 0})
            if not work.images
            else host
        )
    )
    resident = [leaf.to(device) for leaf in batch]
    pinned = [leaf.pin_memory() if device.type == "cuda" else leaf for leaf in batch]

    def steps() -> None:
        for _ in range(work.batches):
            step(resident)
        finished(device)

    def copies() -> None:
        for _ in range(work.batches):
            for leaf in pinned:
                leaf.to(device, non_blocking=True)
        finished(device)

    def loads() -> None:
        for _ in host:
            pass

    return {"step alone": steps, "loader alone": loads, "copy alone": copies}


def run(scale: Scale) -> Result:
    """Seconds per step of each way, and the most that any way could reach."""
    device = device_here()
    rows: list[tuple[Cell, ...]] = []
    met = True
    data: dict[str, Any] = {}
    for work in _workloads(scale):
        step = Step(device, work.step_ms / 1e3)
        timings = interleave(_ways(work, device, step), rounds=scale.pick(_ROUNDS, 1))
        alone = {name: timings[name].median() for name in timings if name.endswith("alone")}
        floor = max(alone.values())
        ours = timings["prefetch"]
        others = [name for name in ("plain", "textbook", "timm") if name in timings]
        best = min(others, key=lambda name: timings[name].median())
        against = ours.ratio(timings[best])
        met &= ours.median() <= _BAR * floor and against.median <= 1.0
        for name in (*others, "prefetch"):
            rows.append(_row(work, name, timings[name], floor))
        rows.append(
            (
                work.name,
                f"(of {max(alone, key=alone.__getitem__)})",
                1e3 * floor / work.batches,
                1.0,
                None,
            )
        )
        rows.append((work.name, f"prefetch / {best}", None, None, str(against)))
        data[work.name] = {
            name: {"wall": list(each.wall), "cpu": list(each.cpu)} for name, each in timings.items()
        }
    return Result(
        headings=("workload", "way", "ms a step", "x slowest part alone", "spread or ratio"),
        rows=tuple(rows),
        met=met,
        notes=(f"device: {device}", "medians of interleaved rounds of one epoch each"),
        data=data,
    )


def _row(work: Workload, name: str, timings: Timings, floor: float) -> tuple[Cell, ...]:
    per_step = 1e3 / work.batches
    spread = f"{timings.low() * per_step:.3f} to {timings.high() * per_step:.3f}"
    return (work.name, name, timings.median() * per_step, timings.median() / floor, spread)


CASES = [
    Case(
        "prefetch",
        "Does a step ever wait for a copy that could have been hidden?",
        f"<= {_BAR} x the slowest of step, loader and copy alone; never slower than the best other",
        run,
        gpu=True,
    )
]
