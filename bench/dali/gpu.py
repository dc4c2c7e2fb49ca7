"""On a GPU: how near is backend="dali" to a pipeline written by hand, and what does an epoch take?

rate      ours, with and without the decoding engine, and DALI's file reader, mixed decoder,
          crop_mirror_normalize, in turns
training  ResNet-18 in bfloat16: stock with every core, prefetch, dali; with their CPU seconds
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torchvision.datasets import ImageFolder

from bench.dali.photos import chain, dali_version, folder_of_photos, loader
from bench.harness import (
    Result,
    Scale,
    case,
    device_here,
    exhaust,
    finished,
    interleave,
)
from bench.peers.photos import hand_written
from bench.peers.readers import Epochs
from dataloaders.machine.resources import usable_cores

BAR = 0.95
HEADINGS = ("what", "photos a second", "wall s an epoch", "CPU s an epoch")


@case(f">= {BAR} of the rate of the pipeline written by hand", gpu=True, limit_s=150)
def dali_gpu(scale: Scale, folder: Path) -> Result:
    """How near does backend='dali' come to a pipeline written by hand, on a GPU?"""
    if dali_version() is None:
        return Result(HEADINGS, (("not measured: NVIDIA DALI is not installed", None, None, None),))
    from backends.dali import Dali

    count, side = scale.pick(full=8192, tiny=8), scale.pick(full=224, tiny=32)
    batch, cores = scale.pick(full=256, tiny=4), usable_cores()
    photos = folder_of_photos(folder, count, scale.pick(full=100, tiny=4))
    device = device_here()
    workers: Any = {} if scale.tiny else {"num_workers": cores, "persistent_workers": True}
    dataset = ImageFolder(str(photos), chain(side))
    ours = loader(dataset, batch, drop_last=True, backend="dali", device=device, **workers)
    no_engine = Dali(hw_decoder_load=0.0)
    without = loader(dataset, batch, drop_last=True, backend=no_engine, device=device, **workers)
    stock = loader(dataset, batch, pin_memory=device.type == "cuda", **workers)
    prefetch = loader(dataset, batch, backend="prefetch", device=device, **workers)
    # As ours, whole files: nvImageCodec 0.9 crashes on windows on a device (its issue 55).
    own: dict[str, Any] = {"threads": cores, "windows": False}
    own["device"] = "gpu" if device.type == "cuda" else "cpu"
    decoder: dict[str, Any] = {}
    if device.type == "cuda":
        decoder = {"jpeg_fancy_upsampling": True, "hw_decoder_load": Dali.hw_decoder_load}

    def drain(batches: Iterable[Any]) -> None:
        exhaust(batches)
        finished(device)

    rates = interleave(
        {
            "rate, dali (ours)": ours,
            "rate, dali (ours), hw_decoder_load=0": without,
            "rate, DALI by hand": Epochs(hand_written(photos, batch, side, **own)),
            "rate, DALI by hand, decoded as ours": Epochs(
                hand_written(photos, batch, side, **own, **decoder)
            ),
        },
        drain,
        rounds=scale.pick(full=3, tiny=1),
    )
    epochs = interleave(
        {
            f"ResNet-18, stock, {cores} workers": stock,
            "ResNet-18, prefetch over it": prefetch,
            "ResNet-18, dali (ours)": ours,
        },
        training(device, tiny=scale.tiny),
        rounds=scale.pick(full=2, tiny=1),
        children=True,
    )
    ratio = rates["rate, DALI by hand"].ratio(rates["rate, dali (ours)"], "wall")
    return Result(
        HEADINGS,
        tuple(
            (way, count / times.median(), times.median(), times.median("cpu"))
            for way, times in (rates | epochs).items()
        ),
        ratio.median >= BAR if device.type == "cuda" else None,
        (
            f"{count} photos, batches of {batch} of {side} x {side}, on {device}; {cores} cores.",
            f"Rate of ours / by hand: {ratio}. Both decode whole files.",
            f"Decoded as ours: hw_decoder_load={Dali.hw_decoder_load} and jpeg_fancy_upsampling, "
            "so that pixels do not depend on the place in the batch; the gap between the two by "
            "hand is the price of that.",
        ),
    )


def training(device: torch.device, *, tiny: bool) -> Callable[[Iterable[Any]], None]:
    """Return a function that trains a ResNet-18 in bfloat16 for an epoch of batches."""
    from torchvision.models import resnet18

    model: Any = resnet18(num_classes=4)
    if tiny:
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
