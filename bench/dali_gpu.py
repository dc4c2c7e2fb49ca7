"""On a GPU: how near is backend="dali" to a pipeline written by hand, and what does an epoch take?

rate      ours, and DALI's file reader, mixed decoder, crop_mirror_normalize, in turns
training  ResNet-18 in bfloat16: stock with every core, prefetch, dali; with their CPU seconds
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from bench.dali import chain, dali_version, folder_of_photos, hand_written, loader
from bench.dali_device import settings_work
from bench.harness import Case, Cell, Result, Scale, Timings, device_here, finished, interleave
from dataloaders.machine.resources import usable_cores

__all__ = ["CASES"]

BATCH = 256
BAR = 0.95
HEADINGS = ("what", "photos a second", "wall s an epoch", "CPU s an epoch")


def run(scale: Scale) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return measure(scale, Path(folder))


def measure(scale: Scale, folder: Path) -> Result:
    if dali_version() == "none":
        return Result(HEADINGS, (("not measured: NVIDIA DALI is not installed", None, None, None),))
    count, side = scale.pick(full=8192, tiny=8), scale.pick(full=224, tiny=32)
    batch, cores = scale.pick(full=BATCH, tiny=4), usable_cores()
    photos = folder_of_photos(folder, count, scale.pick(full=100, tiny=4))
    device = device_here()
    windows = not scale.tiny and settings_work(photos, windows=True)
    ours = loader(photos, chain(side), batch, backend="dali", device=device, drop_last=True)
    workers: dict[str, Any] = {"num_workers": cores, "persistent_workers": True}
    if scale.tiny:
        workers = {}
    stock = loader(photos, chain(side), batch, pin_memory=device.type == "cuda", **workers)
    prefetch = loader(photos, chain(side), batch, backend="prefetch", device=device, **workers)
    kind = "gpu" if device.type == "cuda" else "cpu"
    own: dict[str, Any] = {"device": kind, "threads": cores, "windows": windows}
    by_hand = hand_written(photos, batch, side, **own)
    decoded_as_ours = hand_written(photos, batch, side, **own, as_ours=True)
    rates = interleave(
        {
            "dali (ours)": lambda: drain(ours),
            "DALI by hand": lambda: drain(by_hand()),
            "DALI by hand, decoded as ours": lambda: drain(decoded_as_ours()),
        },
        rounds=scale.pick(full=3, tiny=1),
    )
    train = training(device, tiny=scale.tiny)
    epochs = interleave(
        {
            f"stock, {cores} workers": lambda: train(stock),
            "prefetch over it": lambda: train(prefetch),
            "dali (ours)": lambda: train(ours),
        },
        rounds=scale.pick(full=2, tiny=1),
        children=True,
    )
    ratio = rates["DALI by hand"].ratio(rates["dali (ours)"])
    rows = [*table("rate", rates, count), *table("ResNet-18, bfloat16", epochs, count)]
    return Result(
        HEADINGS,
        tuple(rows),
        ratio.median >= BAR if device.type == "cuda" else None,
        (
            f"{count} photos, batches of {batch} of {side} x {side}, on {device}; {cores} cores.",
            f"Rate of ours / by hand: {ratio}. By hand the decoder "
            + ("cuts the windows out." if windows else "decodes whole files: it fails on windows."),
            "Decoded as ours: without the JPEG engine, and with jpeg_fancy_upsampling: what lies "
            "between the two by hand is the price of a sample's pixels being the same everywhere.",
        ),
        {"rate": {way: t.wall for way, t in rates.items()}},
    )


def drain(batches: Iterable[Any]) -> None:
    """Takes all batches, and waits until the device has them."""
    for _batch in batches:
        pass
    finished(device_here())


def training(device: torch.device, *, tiny: bool) -> Callable[[Iterable[Any]], None]:
    """A function that trains a ResNet-18 in bfloat16 for an epoch of these batches."""
    from torchvision.models import resnet18

    model: Any = resnet18(num_classes=4)
    if tiny:  # a toy in its place
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 9, 9), torch.nn.AdaptiveAvgPool2d(1))
        model.append(torch.nn.Flatten())
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(batches: Iterable[Any]) -> None:
        for images, targets in batches:
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            targets = targets.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        finished(device)

    return train


def table(name: str, timings: dict[str, Timings], count: int) -> list[tuple[Cell, ...]]:
    """A row for each way."""
    return [
        (f"{name}, {way}", count / times.median(), times.median(), times.median("cpu"))
        for way, times in timings.items()
    ]


CASES = [
    Case(
        "dali_gpu",
        "How near does backend='dali' come to a pipeline written by hand, on a GPU?",
        f">= {BAR} of the rate of the pipeline written by hand",
        run,
        gpu=True,
    ),
]
