"""ToTensor and Normalize in the dataset, or on uint8 batches, once a batch, on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torchvision.transforms as v1
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from bench.harness import (
    Case,
    Result,
    Scale,
    cpu_of,
    device_here,
    exhaust,
    finished,
    interleave,
    on_one_thread,
)
from dataloaders.specification import view_of
from dataloaders.transforms import device_tail


class Decoded(Dataset[Any]):
    """Decoded images in memory: only what comes after decoding is measured."""

    def __init__(self, count: int, side: int) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)
        self.images = [Image.fromarray(image) for image in pixels]
        normalize = v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        self.transform = v1.Compose([v1.ToTensor(), normalize])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.images[index]), index


@on_one_thread  # as in a worker
def on_cpu(scale: Scale) -> Result:
    count, side = scale.pick(full=512, tiny=8), scale.pick(full=224, tiny=8)
    loader: DataLoader[Any] = DataLoader(Decoded(count, side), batch_size=min(64, count))
    tail: Any = device_tail(loader)
    view = view_of(loader, **tail.changes(loader))
    batch = next(iter(view))
    floats = torch.empty_like(batch[0], dtype=torch.float32)

    def reused(leaf: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        return floats

    def repeat(work: Callable[[], object]) -> None:
        for _ in range(count // len(batch[0])):
            work()

    ways: dict[str, Callable[[], object]] = {
        "dataset: ToTensor, Normalize": lambda: exhaust(loader),
        "dataset: uint8": lambda: exhaust(view),
        "tail": lambda: repeat(lambda: tail.apply(batch)),
        "tail, memory given": lambda: repeat(lambda: tail.apply(batch, empty_like=reused)),
    }
    timings = interleave(ways, rounds=scale.pick(full=7, tiny=1))
    per_1000 = {name: times.median("cpu") / count * 1000 for name, times in timings.items()}
    ours = per_1000["dataset: uint8"] + per_1000["tail, memory given"]
    return Result(
        ("way", "CPU-s per 1,000 images"),
        tuple(per_1000.items()),
        ours <= per_1000["dataset: ToTensor, Normalize"],
        (
            f"Images of {side}x{side} from decoded ones; collation in this process; one thread.",
            "Memory given: the tail's floats go into one buffer, as from a pool of batches.",
        ),
        cpu_of(timings),
    )


def on_gpu(scale: Scale) -> Result:
    count, side = scale.pick(full=256, tiny=4), scale.pick(full=224, tiny=8)
    device, repeats = device_here(), scale.pick(full=20, tiny=1)
    pins = device.type == "cuda"
    loader: DataLoader[Any] = DataLoader(Decoded(count, side), batch_size=count, pin_memory=pins)
    ways: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], Any]]] = {
        "float32 copied": (next(iter(loader))[0], lambda batch: batch)
    }
    options: dict[str, dict[str, Any]] = {
        "": {},
        ", channels_last": {"memory_format": torch.channels_last},
        ", bfloat16": {"dtype": torch.bfloat16},
    }
    for name, asked in options.items():
        tail: Any = device_tail(loader, **asked)
        tail.prepare(device)
        images = next(iter(view_of(loader, **tail.changes(loader))))[0]
        ways[f"uint8 copied, tail{name}"] = images, tail.apply

    def run(way: tuple[torch.Tensor, Callable[[torch.Tensor], Any]]) -> None:
        batch, then = way
        for _ in range(repeats):
            then(batch.to(device, non_blocking=True))
        finished(device)

    timings = interleave(ways, run, rounds=scale.pick(full=7, tiny=1))
    ratio = timings["uint8 copied, tail"].ratio(timings["float32 copied"], "wall")
    return Result(
        ("way", "bytes a batch", "s a batch", "CPU-s a batch"),
        tuple(
            (name, ways[name][0].nbytes, times.median() / repeats, times.median("cpu") / repeats)
            for name, times in timings.items()
        ),
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
        limit_s=60,
    ),
]
