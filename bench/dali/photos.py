"""What does a photo cost from its file to a normalised crop: torch's workers, DALI, DALI by hand?

Photos of about 500 x 375 ──ImageFolder, or a dataset ──> torch, 2 workers ──┐
                            of the user's own ─────────> backend="dali" ─────┼─ checked, in turns
            a pipeline written by hand: file reader, random crop ────────────┘
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from bench.harness import (
    Result,
    Rows,
    Scale,
    case,
    exhaust,
    interleave,
    timing_headings,
    timing_rows,
    version_of,
)
from bench.peers.photos import hand_written
from bench.peers.readers import MEAN, STD, Epochs
from dataloaders import DataLoader
from dataloaders.cli.photos import make_photos

BAR, BAR_EXACT, BAR_BY_HAND = 1.75, 1.4, 1.1
"""Times less CPU than torch with 2 workers: by default, with ``fast=()``; and than DALI by hand."""

OURS, EXACT, BASE = "dali (ours)", "dali (ours), fast=()", "torch, 2 workers"
BY_HAND = "DALI by hand, float32 copied out"
FOLDER, OWN, GUIDE = "ImageFolder", "own dataset", "guide"

_LONGER_SIDE, _QUALITY = 500, 97
_DIFFERENT = 100
_SEED = 7


@case(
    f"ImageFolder and a dataset of one's own: torch with 2 workers takes >= {BAR} times the "
    f"CPU, >= {BAR_EXACT} with fast=(); DALI by hand >= {BAR_BY_HAND}; batches safe to keep",
    one_thread=True,
)
def dali(scale: Scale, folder: Path) -> Result:
    """What does a photo cost from its file to a batch, beside torch and DALI by hand?"""
    count, side = scale.pick(full=1000, tiny=8), scale.pick(full=224, tiny=16)
    photos = folder_of_photos(folder, count, scale.pick(full=_DIFFERENT, tiny=4))
    batch = scale.pick(full=64, tiny=4)
    rows: Rows = ()
    met = True
    guide = guides_chain(max(8, side * 160 // 224))
    for name, kind, transform in (
        (FOLDER, ImageFolder, chain(side)),
        (OWN, Own, chain(side)),
        (GUIDE, ImageFolder, guide),
    ):
        dataset = kind(str(photos), transform)
        ways = ways_of(dataset, batch, workers=scale.pick(full=2, tiny=0))
        if name == FOLDER:
            ways[BY_HAND] = Epochs(hand_written(photos, batch, side))
        compare(dataset, batch)
        timings = interleave(ways, exhaust, rounds=scale.pick(full=7, tiny=1), children=True)
        rows += timing_rows(timings, 1000 / count, OURS, f"{name}, ")
        if name != GUIDE and BASE in timings:
            met &= timings[BASE].ratio(timings[OURS]).median >= BAR
            met &= timings[BASE].ratio(timings[EXACT]).median >= BAR_EXACT
        if name == FOLDER:
            met &= timings[BY_HAND].ratio(timings[OURS]).median >= BAR_BY_HAND
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


def folder_of_photos(folder: Path, count: int, different: int, side: int = _LONGER_SIDE) -> Path:
    """Write ``count`` files in class folders, of ``different`` photographs in turn.

    ``side``: pixels of the longer side.
    """
    first = []
    for file in sorted(make_photos(folder / "large", count=different).rglob("*.jpg")):
        small = folder / f"{len(first)}.jpg"
        image = Image.open(file)
        image.thumbnail((side, side))
        image.save(small, quality=_QUALITY)
        first.append(small)
    for number in range(count):
        target = folder / "photos" / f"class{number % 4}" / f"{number:05}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(first[number % len(first)], target)
    return folder / "photos"


class Own(Dataset[Any]):
    """A dataset class as people write them: it opens its files itself and returns dicts."""

    def __init__(self, root: str, transform: Any) -> None:
        self.files = sorted(Path(root).rglob("*.jpg"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = Image.open(self.files[index]).convert("RGB")
        return {"image": self.transform(image), "label": int(self.files[index].parent.name[5:])}


def loader(dataset: Any, batch: int, **options: Any) -> DataLoader[Any]:
    """Return the loader that a user has; only ``options`` differ."""
    return DataLoader(dataset, batch, shuffle=True, **options)


def ways_of(dataset: Any, batch: int, workers: int) -> dict[str, Iterable[Any]]:
    """Return what is timed; workers are forked before there are threads."""
    from backends.dali import Dali

    ways: dict[str, Iterable[Any]] = {"torch, no workers": loader(dataset, batch)}
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    for name, backend in ((BASE, "stock"), (OURS, "dali"), (EXACT, Dali(fast=()))):
        ways[name] = loader(dataset, batch, backend=backend, **options)
        exhaust(ways[name])
    return ways


def compare(dataset: Any, batch: int) -> None:
    """Compare an epoch of dali with torch's: a way that does something else is not timed."""
    from backends.dali import Dali

    by_default = loader(dataset, batch, backend="dali", seed=_SEED)
    exact = loader(dataset, batch, backend=Dali(fast=()), seed=_SEED)
    stock = loader(dataset, batch, seed=_SEED)
    two_levels = 2.02 / 255 / torch.tensor(STD).reshape(3, 1, 1)
    for some, same, wanted in zip(by_default, exact, stock, strict=True):
        (images, targets), (pixels, _), (those, labels) = map(_parts, (some, same, wanted))
        assert torch.equal(targets, labels), "another order"
        assert images.stride() == those.stride(), "another layout"
        assert torch.equal(pixels, those), "other pixels"
        if "Rotation" not in repr(dataset.transform):  # it moves pixels by neighbours' values
            assert ((images - those).abs() <= two_levels).all(), "other pixels"


def _parts(batch: Any) -> tuple[Any, Any]:
    return tuple(batch.values()) if isinstance(batch, dict) else batch  # type: ignore[return-value]


def dali_version() -> str | None:
    return version_of("nvidia-dali-cuda130", "nvidia-dali-cuda120")
