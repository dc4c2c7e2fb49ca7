"""ToTensor and Normalize in the dataset, or on uint8 batches, once a batch, on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.transforms as v1
from PIL import Image
from torch.utils.data import DataLoader

from bench.harness import (
    Result,
    Samples,
    Scale,
    case,
    device_here,
    finished,
    interleave,
)
from dataloaders.recording.tail import Trailing
from dataloaders.replaying.tail import device_tail


def decoded(count: int, side: int) -> Samples:
    """Return decoded images in memory: only what comes after decoding is measured."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)
    images = [Image.fromarray(image) for image in pixels]
    normalize = v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    transform = v1.Compose([v1.ToTensor(), normalize])
    return Samples(lambda index: (transform(images[index]), index), count)


@case("seconds a batch <= 0.5 x those of the float32 copy", gpu=True, limit_s=60)
def device_tail_gpu(scale: Scale, folder: Path) -> Result:
    """Is a uint8 copy and the tail on the device faster than the copy of floats?"""
    count, side = scale.pick(full=256, tiny=4), scale.pick(full=224, tiny=8)
    device, repeats = device_here(), scale.pick(full=20, tiny=1)
    pins = device.type == "cuda"
    loader: DataLoader[Any] = DataLoader(decoded(count, side), batch_size=count, pin_memory=pins)
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
        sent = next(iter(tail.recorded(loader)))[0]

        def finish(pixels: torch.Tensor, tail: Any = tail, steps: Any = sent.steps) -> Any:
            batch = Trailing(pixels, steps)
            return tail.apply(batch)

        pixels = sent.pixels.pin_memory() if pins else sent.pixels
        ways[f"uint8 copied, tail{name}"] = pixels, finish

    def copy(way: tuple[torch.Tensor, Callable[[torch.Tensor], Any]]) -> None:
        batch, then = way
        for _ in range(repeats):
            then(batch.to(device, non_blocking=True))
        finished(device)

    timings = interleave(ways, copy, rounds=scale.pick(full=7, tiny=1))
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
