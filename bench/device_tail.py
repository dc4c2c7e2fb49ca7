"""ToTensor and Normalize in the dataset against uint8 and once a batch on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torchvision.transforms as v1
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from bench.harness import Case, Result, Scale, device_here, finished, interleave, on_one_thread
from dataloaders.batches.tree import nbytes
from dataloaders.specification import view_of
from dataloaders.transforms import Tail, device_tail
from dataloaders.transforms.table import tables_of
from dataloaders.transforms.ways import Arithmetic, Lookup

MEMBERS = v1.ToTensor(), v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Decoded(Dataset[Any]):
    """Decoded images in memory: what is measured is all that comes after decoding."""

    def __init__(self, count: int, side: int) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)
        self.images = [Image.fromarray(image) for image in pixels]
        self.transform = v1.Compose(MEMBERS)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), index


def on_cpu(scale: Scale) -> Result:
    return on_one_thread(measure_cpu, scale)  # as in a worker


def measure_cpu(scale: Scale) -> Result:
    count, side = scale.pick(full=512, tiny=8), scale.pick(full=224, tiny=8)
    loader: DataLoader[Any] = DataLoader(Decoded(count, side), batch_size=min(64, count))
    tail = device_tail(loader)
    assert isinstance(tail, Tail)
    changes = tail.changes(loader)
    assert changes is not None
    view = view_of(loader, **changes)
    memory: list[torch.Tensor] = []

    def reused(leaf: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        if not memory:
            memory.append(torch.empty_like(leaf, dtype=dtype))
        return memory[0]

    (images, labels) = next(iter(view))
    repeats = count // len(images)
    tables, _ = tables_of(MEMBERS)
    steps = tables[3].steps
    assert steps is not None
    cpu = torch.device("cpu")
    out = torch.empty(images.shape)
    ways: dict[str, Callable[[], object]] = {
        "dataset: ToTensor, Normalize": lambda: [None for _ in loader],
        "dataset: uint8": lambda: [None for _ in view],
        "tail": lambda: [tail.apply([images, labels]) for _ in range(repeats)],
        "tail, memory given": lambda: [
            tail.apply([images, labels], empty_like=reused) for _ in range(repeats)
        ],
        "arithmetic": lambda: [Arithmetic(steps, cpu).run(images, out) for _ in range(repeats)],
        "lookup": lambda: [Lookup(tables[3].values, cpu).run(images, out) for _ in range(repeats)],
    }
    timings = interleave(ways, rounds=scale.pick(full=7, tiny=1))
    per_1000 = {name: times.median("cpu") / count * 1000 for name, times in timings.items()}
    sizes = {"dataset: ToTensor, Normalize": nbytes(next(iter(loader)))}
    sizes["dataset: uint8"] = nbytes([images, labels])
    rows = tuple((name, sizes.get(name), seconds) for name, seconds in per_1000.items())
    ours = per_1000["dataset: uint8"] + per_1000["tail, memory given"]
    return Result(
        ("way", "bytes a batch", "CPU-s per 1,000 images"),
        rows,
        ours <= per_1000["dataset: ToTensor, Normalize"],
        (
            f"Images of {side}x{side} from decoded ones; collation in this process; one thread.",
            "The tail's floats into given memory, as a pool of batches would give it.",
        ),
        {name: times.cpu for name, times in timings.items()},
    )


def on_gpu(scale: Scale) -> Result:
    count, side = scale.pick(full=256, tiny=4), scale.pick(full=224, tiny=8)
    device = device_here()
    pins = device.type == "cuda"
    loader: DataLoader[Any] = DataLoader(Decoded(count, side), batch_size=count, pin_memory=pins)
    floats, _ = next(iter(loader))
    times = scale.pick(full=20, tiny=1)
    ways: dict[str, Callable[[], object]] = {}
    crossing: dict[str, int] = {}

    def add(name: str, batch: torch.Tensor, then: Callable[[torch.Tensor], Any]) -> None:
        def run() -> None:
            for _ in range(times):
                then(batch.to(device, non_blocking=True))
            finished(device)

        ways[name], crossing[name] = run, batch.nbytes

    add("float32 copied", floats, lambda batch: batch)
    asked: dict[str, dict[str, Any]] = {
        "uint8 copied, tail": {},
        "uint8 copied, tail, channels_last": {"memory_format": torch.channels_last},
        "uint8 copied, tail, bfloat16": {"dtype": torch.bfloat16},
    }
    for name, options in asked.items():
        tail: Any = device_tail(loader, **options)
        bytes_, _ = next(iter(view_of(loader, **tail.changes(loader))))
        tail.prepare(device)
        add(name, bytes_, tail.apply)
    table = tables_of(MEMBERS)[0][3]
    lookup = Lookup(table.values, device)

    def looked_up(batch: torch.Tensor) -> None:
        lookup.run(batch, torch.empty_like(batch, dtype=torch.float32))

    add("uint8 copied, lookup", bytes_, looked_up)
    timings = interleave(ways, rounds=scale.pick(full=7, tiny=1))
    ratio = timings["uint8 copied, tail"].ratio(timings["float32 copied"])
    rows = tuple(
        (name, crossing[name], timing.median() / times, timing.median("cpu") / times)
        for name, timing in timings.items()
    )
    return Result(
        ("way", "bytes a batch", "s a batch", "CPU-s a batch"),
        rows,
        ratio.median <= 0.5,
        (f"Batches of {count}x3x{side}x{side} from pinned memory.", f"Ratio: {ratio}."),
    )


CASES = [
    Case(
        "device_tail_cpu",
        "Do uint8 samples and a tail once a batch cost less CPU than ToTensor and Normalize?",
        "median CPU-s of both together <= those of the dataset's own way, all on one core",
        on_cpu,
    ),
    Case(
        "device_tail_gpu",
        "Is a uint8 copy and the tail on the device faster than the copy of floats?",
        "seconds a batch <= 0.5 x those of the float32 copy",
        on_gpu,
        gpu=True,
    ),
]
