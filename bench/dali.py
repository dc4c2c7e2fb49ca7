"""What does a photo cost from its file to a normalised crop: torch's workers, DALI, DALI by hand?

Photos of about 500 x 375 ──ImageFolder, Compose──> torch, 2 workers ──┐
                             the same loader ─────> backend="dali" ────┼─ checked, timed in turns
          a pipeline written by hand: file reader, random crop ────────┘
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from bench.harness import (
    Case,
    Result,
    Rows,
    Scale,
    cpu_of,
    exhaust,
    in_folder,
    interleave,
    on_one_thread,
    timing_headings,
    timing_rows,
    version_of,
)
from bench.peers.photos import hand_written
from bench.peers.readers import MEAN, STD, Epochs
from dataloaders import DataLoader
from dataloaders.cli.photos import make_photos

BAR_SECONDS, BAR_RATIO = 2.2, 1.7
OURS, BASE = "dali (ours)", "torch, 2 workers"
CROPS, GUIDE = "crops", "guide"

_LONGER_SIDE, _QUALITY = 500, 97
_DIFFERENT = 100
_SEED = 7


@on_one_thread
@in_folder
def run(scale: Scale, folder: Path) -> Result:
    count, side = scale.pick(full=1000, tiny=8), scale.pick(full=224, tiny=16)
    photos = folder_of_photos(folder, count, scale.pick(full=_DIFFERENT, tiny=4))
    batch = scale.pick(full=64, tiny=4)
    rows: Rows = ()
    met, data = True, {}
    for name, transform in ((CROPS, chain(side)), (GUIDE, guides_chain(max(8, side * 160 // 224)))):
        ways = ways_of(photos, transform, batch, workers=scale.pick(full=2, tiny=0))
        if name == CROPS:
            by_hand = Epochs(hand_written(photos, batch, side))
            ways["DALI by hand, float32 copied out"] = by_hand
        compare(photos, transform, batch)
        timings = interleave(ways, exhaust, rounds=scale.pick(full=7, tiny=1), children=True)
        rows += timing_rows(timings, 1000 / count, OURS, f"{name}, ")
        data[name] = cpu_of(timings)
        if name == CROPS and BASE in timings:
            ours = timings[OURS]
            within = ours.median("cpu") * 1000 / count <= BAR_SECONDS
            met = within and timings[BASE].ratio(ours).median >= BAR_RATIO
    size = sum(file.stat().st_size for file in photos.rglob("*.jpg")) / count / 1000
    return Result(
        timing_headings(OURS),
        rows,
        met,
        (
            f"{count} JPEG files of {_LONGER_SIDE} pixels on the longer side, {size:.0f} kB each, "
            f"in the page cache, batches of {batch}, on the CPU. CPU seconds of this process, its "
            "threads and workers. Workers persist: their start does not count.",
            "Ours was checked first: with seed= no level of any batch is more than 2 off torch's; "
            "with fast=() each batch is torch's, to the bit.",
            "By hand: DALI's file reader, decoders.image_random_crop, resize, "
            "crop_mirror_normalize, DALIGenericIterator; each batch is copied, to be safe to keep.",
            f"nvidia-dali {dali_version()}.",
        ),
        data,
    )


def chain(side: int) -> Any:
    """Return the chain of ImageNet trainings."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(side),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def guides_chain(side: int) -> Any:
    """Return the chain of the tuning guides."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.Resize((side, side)),
            transforms.RandomHorizontalFlip(),
            transforms.RandomVerticalFlip(),
            transforms.RandomRotation(10),
            transforms.ColorJitter(0.05, 0.05, 0.05, 0.05),
            transforms.ToTensor(),
        ]
    )


def folder_of_photos(folder: Path, count: int, different: int) -> Path:
    """Write ``count`` files in class folders, of ``different`` photographs in turn."""
    from PIL import Image

    first = []
    for file in sorted(make_photos(folder / "large", count=different).rglob("*.jpg")):
        small = folder / f"{len(first)}.jpg"
        image = Image.open(file)
        image.thumbnail((_LONGER_SIDE, _LONGER_SIDE))
        image.save(small, quality=_QUALITY)
        first.append(small)
    for number in range(count):
        target = folder / "photos" / f"class{number % 4}" / f"{number:05}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(first[number % len(first)], target)
    return folder / "photos"


def loader(photos: Path, transform: Any, batch: int, **options: Any) -> DataLoader[Any]:
    """Return the loader that a user has; only ``options`` differ."""
    from torchvision.datasets import ImageFolder

    return DataLoader(ImageFolder(str(photos), transform), batch, shuffle=True, **options)


def ways_of(photos: Path, transform: Any, batch: int, workers: int) -> dict[str, Iterable[Any]]:
    """Return what is timed; torch's workers are forked first, before there are threads."""
    from backends.dali import Dali

    ways: dict[str, Iterable[Any]] = {}
    if workers:
        ways[BASE] = loader(photos, transform, batch, num_workers=workers, persistent_workers=True)
        exhaust(ways[BASE])
    ways["torch, no workers"] = loader(photos, transform, batch)
    ways[OURS] = loader(photos, transform, batch, backend="dali")
    ways["dali (ours), fast=()"] = loader(photos, transform, batch, backend=Dali(fast=()))
    return ways


def compare(photos: Path, transform: Any, batch: int) -> None:
    """Compare an epoch of ours with torch's: a way that does something else is not timed."""
    from backends.dali import Dali

    ours = loader(photos, transform, batch, backend="dali", seed=_SEED)
    exact = loader(photos, transform, batch, backend=Dali(fast=()), seed=_SEED)
    theirs = loader(photos, transform, batch, seed=_SEED)
    two_levels = 2.02 / 255 / torch.tensor(STD).reshape(3, 1, 1)
    for (images, targets), (same, _), (wanted, labels) in zip(ours, exact, theirs, strict=True):
        assert torch.equal(targets, labels), "another order"
        assert images.stride() == wanted.stride(), "another layout"
        assert torch.equal(same, wanted), "other pixels"
        if "Rotation" not in repr(transform):  # it moves pixels by their neighbours' values
            assert ((images - wanted).abs() <= two_levels).all(), "other pixels"


def dali_version() -> str | None:
    return version_of("nvidia-dali-cuda130", "nvidia-dali-cuda120")


CASES = [
    Case(
        "dali",
        "What does a photo cost from its file to a batch, beside torch and DALI by hand?",
        f"RandomResizedCrop: <= {BAR_SECONDS} CPU s a 1,000 photos, batches safe to keep, and >= "
        f"{BAR_RATIO} times fewer than torch with 2 workers",
        run,
    ),
]
