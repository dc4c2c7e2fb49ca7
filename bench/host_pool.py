"""Large batches in fresh memory, from the pool, and in one buffer that is overwritten each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import TensorDataset

from backends.stock import Stock
from bench.harness import Case, Cell, Result, Scale, Timings, interleave, on_one_thread
from dataloaders import DataLoader
from dataloaders.batches.memory import HostPool

BATCH = 64
BAR = 1.15
BAR_WORKERS = 0.85

Make = Callable[[int], torch.Tensor]


def run(scale: Scale) -> Result:
    return on_one_thread(measure_memory, scale)


def run_loaders(scale: Scale) -> Result:
    return on_one_thread(measure_loaders, scale)


def measure_memory(scale: Scale) -> Result:
    side, batches = scale.pick(full=224, tiny=64), scale.pick(full=20, tiny=3)
    rows: list[tuple[Cell, ...]] = []
    data: dict[str, Any] = {}
    met = True
    for name, dtype in (("float32", torch.float32), ("uint8", torch.uint8)):
        images = torch.zeros(3 * BATCH, 3, side, side, dtype=dtype).fill_(1)
        samples = list(images)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        stack = collating(samples)
        select = gathering(images, order)
        for work, make in (("collated", stack), ("gathered", select)):
            timings = interleave(
                {way: lambda one=one: drain(one, batches) for way, one in make.items()},
                rounds=scale.pick(full=11, tiny=1),
            )
            ratio = timings["pooled"].ratio(timings["unsafe reuse"], "cpu")
            if dtype is torch.float32:
                met = met and ratio.median <= BAR
            per_thousand = 1000 / (BATCH * batches)
            for way, times in timings.items():
                to_reuse = str(times.ratio(timings["unsafe reuse"], "cpu"))
                label = f"{name} {work}, {way}"
                rows.append((label, *cpu(times, per_thousand), to_reuse))
            data[f"{name} {work}"] = {way: times.cpu for way, times in timings.items()}
    return Result(
        ("way", "CPU s a 1,000 images", "smallest", "ratio to unsafe reuse (spread)"),
        tuple(rows),
        met,
        (
            f"Batches of {BATCH} x 3 x {side} x {side}: torch.stack of {BATCH} tensors, or "
            "index_select from one; the last batch is still held while the next one is made. "
            "One torch thread. The bar is for float32.",
            "Unsafe reuse: the same tensor each time, overwritten while somebody may hold it.",
        ),
        data,
    )


def collating(samples: list[torch.Tensor]) -> dict[str, Make]:
    def part(number: int) -> list[torch.Tensor]:
        start = number % 3 * BATCH
        return samples[start : start + BATCH]

    pool = HostPool()
    shape, dtype = (BATCH, *samples[0].shape), samples[0].dtype
    buffer = HostPool().empty(shape, dtype)  # the same kind of memory
    return {
        "fresh": lambda number: torch.stack(part(number)),
        "pooled": lambda number: torch.stack(part(number), out=pool.empty(shape, dtype)),
        "unsafe reuse": lambda number: torch.stack(part(number), out=buffer),
    }


def gathering(images: torch.Tensor, order: torch.Tensor) -> dict[str, Make]:
    parts = order.split(BATCH)  # type: ignore[no-untyped-call]
    pool = HostPool()
    shape = (BATCH, *images.shape[1:])
    buffer = HostPool().empty(shape, images.dtype)
    return {
        "fresh": lambda number: images.index_select(0, parts[number % 3]),
        "pooled": lambda number: torch.index_select(
            images, 0, parts[number % 3], out=pool.empty(shape, images.dtype)
        ),
        "unsafe reuse": lambda number: torch.index_select(images, 0, parts[number % 3], out=buffer),
    }


def drain(make: Make, batches: int) -> None:
    batch = None
    for number in range(batches):
        batch = make(number)
    del batch


def measure_loaders(scale: Scale) -> Result:
    side, length = scale.pick(full=224, tiny=32), scale.pick(full=640, tiny=16)
    batch = scale.pick(full=BATCH, tiny=4)
    rows: list[tuple[Cell, ...]] = []
    data: dict[str, Any] = {}
    for name, dtype in (("float32", torch.float32), ("uint8", torch.uint8)):
        images = torch.zeros(length // 2, 3, side, side, dtype=dtype).fill_(1)
        labels = torch.arange(length // 2)
        pairs: Any = 2 * list(zip(images, labels.tolist(), strict=True))
        for kind, dataset in (("a list of samples", pairs), ("TensorDataset", None)):
            source = TensorDataset(images, labels) if dataset is None else dataset
            loaders: dict[str, Any] = {
                "torch": torch.utils.data.DataLoader(source, batch, shuffle=True),
                "stock": DataLoader(source, batch, shuffle=True),
            }
            timings = interleave(
                {way: lambda loader=loader: exhaust(loader) for way, loader in loaders.items()},
                rounds=scale.pick(full=9, tiny=1),
            )
            ratio = timings["torch"].ratio(timings["stock"], "cpu")
            for way, times in timings.items():
                told = str(ratio) if way == "stock" else None
                rows.append((f"{name}, {kind}, {way}", *cpu(times, 1000 / len(source)), told))
            data[f"{name} {kind}"] = {way: times.cpu for way, times in timings.items()}
    return Result(
        ("loader", "CPU s a 1,000 images", "smallest", "torch / stock (spread)"),
        tuple(rows),
        None,
        (f"Shuffled epochs of batches of {batch} x 3 x {side} x {side}, without workers.",),
        data,
    )


def run_workers(scale: Scale) -> Result:
    return on_one_thread(measure_workers, scale)


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that cost nothing: what is left is collation and the way out of the worker."""

    def __init__(self, side: int, length: int) -> None:
        self._images = list(torch.ones(8, 3, side, side))
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._images[index % len(self._images)]


def measure_workers(scale: Scale) -> Result:
    side, batches = scale.pick(full=224, tiny=128), scale.pick(full=40, tiny=3)
    dataset = Images(side, BATCH * batches)
    rows: list[tuple[Cell, ...]] = []
    data: dict[str, Any] = {}
    met = True
    copy = torch.empty(BATCH, 3, side, side)
    for work, step in (("dropped", None), ("read once", copy.copy_)):
        options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
        loaders: dict[str, Any] = {
            "torch": torch.utils.data.DataLoader(dataset, BATCH, **options),
            "stock": DataLoader(dataset, BATCH, backend=Stock(ring=True), **options),
        }
        timings = interleave(
            {way: lambda one=one, step=step: take(one, step) for way, one in loaders.items()},
            rounds=scale.pick(full=7, tiny=1),
            children=True,
        )
        ratio = timings["stock"].ratio(timings["torch"], "cpu")
        met = met and ratio.median <= BAR_WORKERS
        for way, times in timings.items():
            told = str(ratio) if way == "stock" else None
            wall = times.median() / batches
            rows.append((f"{work}, {way}", *cpu(times, 1 / batches), wall, told))
        data[work] = {way: times.cpu for way, times in timings.items()}
    return Result(
        ("batches", "CPU s a batch", "smallest", "wall s a batch", "CPU ratio to torch (spread)"),
        tuple(rows),
        met,
        (
            f"Batches of {BATCH} x 3 x {side} x {side} float32 from one persistent worker; "
            "CPU of worker and consumer together; one torch thread.",
        ),
        data,
    )


def take(loader: Iterable[torch.Tensor], step: Callable[[torch.Tensor], object] | None) -> None:
    for batch in loader:
        if step is not None:
            step(batch)


def exhaust(loader: Iterable[Any]) -> None:
    for _images, _labels in loader:
        pass


def cpu(times: Timings, factor: float) -> tuple[float, float]:
    return times.median("cpu") * factor, times.low("cpu") * factor


CASES = [
    Case(
        "host_pool",
        "What does a large batch cost in fresh memory, from the pool, in one overwritten buffer?",
        f"median CPU ratio of pooled to unsafe reuse <= {BAR}",
        run,
    ),
    Case(
        "host_pool_loader",
        "What does the pool save a whole loader of large in-memory batches?",
        "none: torch's loader side by side",
        run_loaders,
    ),
    Case(
        "host_pool_workers",
        "What does a ring of shared memory save workers that make large batches?",
        f"median CPU ratio to torch's workers <= {BAR_WORKERS}",
        run_workers,
    ),
]
