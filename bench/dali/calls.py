"""What each of torchvision's transforms becomes when it is recorded, and how its pixels differ.

Stock makes a batch of photos, and so do ``backend="dali"``'s two replays from one recorded batch,
with the same draws: the one for the CPU, by default, and the one for a device, whose graph and
kernels run on the CPU here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader

from bench.dali.photos import folder_of_photos
from bench.harness import Result, Samples, Scale, case

_SIDE = 96
_SEEDS = 3


def transforms() -> dict[str, Callable[[Any], Any]]:
    """Return what is called on an image of `_SIDE` pixels each way, or larger, by its name."""
    from torchvision import transforms as v1
    from torchvision.transforms import functional, v2

    crop = v1.RandomCrop(_SIDE)
    calls: dict[str, Any] = {
        "RandomCrop, CenterCrop": lambda image: image,
        "RandomHorizontalFlip": v1.RandomHorizontalFlip(),
        "RandomVerticalFlip": v1.RandomVerticalFlip(),
        "ColorJitter(brightness)": v1.ColorJitter(brightness=0.5),
        "ColorJitter(contrast)": v1.ColorJitter(contrast=0.5),
        "ColorJitter(saturation)": v1.ColorJitter(saturation=0.5),
        "ColorJitter(hue)": v1.ColorJitter(hue=0.5),
        "RandomGrayscale": v1.RandomGrayscale(0.5),
        "RandomInvert": v1.RandomInvert(),
        "RandomPosterize": v1.RandomPosterize(3),
        "RandomSolarize": v1.RandomSolarize(100),
        "RandomAutocontrast": v1.RandomAutocontrast(),
        "RandomEqualize": v1.RandomEqualize(),
        "RandomAdjustSharpness": v1.RandomAdjustSharpness(1.7),
        "functional.adjust_gamma": lambda image: functional.adjust_gamma(image, 0.8),
        "RandomRotation": v1.RandomRotation(30),
        "RandomRotation, bilinear": v1.RandomRotation(30, v1.InterpolationMode.BILINEAR),
        "RandomAffine": v1.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), 10),
        "RandomPerspective": v1.RandomPerspective(),
        "GaussianBlur": v1.GaussianBlur(5),
        "RandAugment": v1.RandAugment(),
        "TrivialAugmentWide": v1.TrivialAugmentWide(),
        "AutoAugment": v1.AutoAugment(),
        "AugMix": v1.AugMix(),
    }
    found = {name: v1.Compose([crop, call, v1.PILToTensor()]) for name, call in calls.items()}
    found["RandomResizedCrop"] = v1.Compose([v1.RandomResizedCrop(_SIDE), v1.PILToTensor()])
    found["Resize, CenterCrop"] = v1.Compose(
        [v1.Resize(_SIDE + 20), v1.CenterCrop(_SIDE), v1.PILToTensor()]
    )
    found["Resize, bicubic"] = v1.Compose(
        [v1.Resize((_SIDE, _SIDE), v1.InterpolationMode.BICUBIC), v1.PILToTensor()]
    )
    on_tensors = {
        "RandomResizedCrop": v2.RandomResizedCrop(_SIDE),
        "ColorJitter": v2.Compose([v2.RandomCrop(_SIDE), v2.ColorJitter(0.5, 0.5, 0.5, 0.5)]),
        "RandomAffine": v2.Compose([v2.RandomCrop(_SIDE), v2.RandomAffine(20)]),
        "GaussianBlur": v2.Compose([v2.RandomCrop(_SIDE), v2.GaussianBlur(5)]),
    }
    for name, call in on_tensors.items():
        found[f"v2 on tensors: {name}"] = v2.Compose([v2.ToImage(), call])
    return found


@case("with fast=() none differs on the CPU")
def calls(scale: Scale, folder: Path) -> Result:
    """What does each recorded call become, and how far are its pixels from torchvision's?"""
    from backends.dali.decode import WindowDecoder
    from backends.dali.graph import Graph
    from dataloaders.recording.worker import recording_changes
    from dataloaders.replaying.device import DeviceReplay
    from dataloaders.replaying.host import HostReplay

    count = scale.pick(full=24, tiny=4)
    hosts = [HostReplay(WindowDecoder(), 2, exact) for exact in (False, True)]
    graph = Graph(count, torch.device("cpu"), threads=2)
    device = DeviceReplay(graph, hosts[0], torch.device("cpu"))
    calls = transforms()
    names = scale.pick(full=list(calls), tiny=list(calls)[:3])
    rows = []
    files = sorted(folder_of_photos(folder, count, count, 3 * _SIDE).rglob("*.jpg"))
    for name in names:
        loader = DataLoader(Samples(partial(_photo, files, calls[name]), count), count)
        changes = recording_changes(loader)
        view = DataLoader(changes["dataset"], count, collate_fn=changes["collate_fn"])
        worst = [(0, 0.0)] * 3
        places: set[bool] = set()
        for seed in range(_SEEDS):
            expected, recorded = (_first(each, seed) for each in (loader, view))
            places |= _places(recorded)
            made = [each.apply(recorded) for each in (*hosts, device)]
            found = [_difference(each, expected) for each in made]
            worst = [max(pair) for pair in zip(worst, found, strict=True)]
        host, exact, there = map(_as_text, worst)
        rows.append((name, host, exact, _PLACES[frozenset(places)], there))
    for each in (*hosts, graph):
        each.close()
    headings = ("call", "CPU", "CPU, fast=()", "with a GPU, made on", "difference there")
    notes = (
        f"Levels of 256: the largest difference from stock's pixels, and the share of values that "
        f"are more than a level off; {count} photos, {_SEEDS} draws of each.",
        "What a device does was computed on the CPU, from Pillow's pixels: nvJPEG's differ, and "
        "have not been compared on a GPU yet.",
    )
    return Result(headings, tuple(rows), all(row[2] == "0" for row in rows), notes)


_PLACES = {
    frozenset({True}): "the device",
    frozenset({False}): "the CPU",
    frozenset({True, False}): "both",
}


def _places(recorded: Any) -> set[bool]:
    """Return whether the device makes the images of a batch, or the CPU, or each some."""
    from dataloaders.replaying.device import made_on_device

    made = zip(recorded.program, made_on_device(recorded), strict=True)
    return {on_device for step, on_device in made if step[0] == "open"}


def _photo(files: list[Path], call: Callable[[Any], Any], index: int) -> Any:
    return call(Image.open(files[index]).convert("RGB"))


def _first(loader: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    return next(iter(loader))


def _difference(made: torch.Tensor, expected: torch.Tensor) -> tuple[int, float]:
    assert made.shape == expected.shape
    assert made.dtype == expected.dtype
    distance = (made.int() - expected.int()).abs()
    return int(distance.max()), float((distance > 1).double().mean())


def _as_text(worst: tuple[int, float]) -> str:
    levels, share = worst
    return str(levels) if levels < 2 else f"{levels} ({share:.2%})"
