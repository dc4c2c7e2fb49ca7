"""What does a photo cost from its file to a normalised crop: torch's workers, DALI, DALI by hand?

Photos of about 500 x 375 ──ImageFolder, Compose──> torch, 2 workers ──┐
                             the same loader ─────> backend="dali" ────┼─ checked, timed in turns
          a pipeline written by hand: file reader, random crop ────────┘
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.harness import Case, Cell, Result, Scale, Timings, interleave, on_one_thread, version_of
from dataloaders import DataLoader, tune
from dataloaders.cli.photos import make_photos

__all__ = ["CASES", "chain", "folder_of_photos"]

BATCH = 64
BAR_SECONDS, BAR_RATIO, BAR_AUTO = 2.2, 1.7, 1.1
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OURS, EXACT, BASE = "dali (ours)", "dali (ours), fast=()", "torch, 2 workers"
BY_HAND = "DALI by hand, float32 copied out"

_LONGER_SIDE, _QUALITY = 500, 97
_DIFFERENT = 100
_SEED = 7


def run(scale: Scale) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return on_one_thread(lambda scale: measure(scale, Path(folder)), scale)


def measure(scale: Scale, folder: Path) -> Result:
    count, side = scale.pick(full=1000, tiny=8), scale.pick(full=224, tiny=16)
    photos = folder_of_photos(folder, count, scale.pick(full=_DIFFERENT, tiny=4))
    batch = scale.pick(full=BATCH, tiny=4)
    rows: list[tuple[Cell, ...]] = []
    met, data = True, {}
    for name, transform in chains(side).items():
        ways = ways_of(photos, transform, batch, side, by_hand=name == CROPS, tiny=scale.tiny)
        compare(photos, transform, batch)
        timings = interleave(
            {way: lambda batches=batches: exhaust(batches) for way, batches in ways.items()},
            rounds=scale.pick(full=7, tiny=1),
            children=True,
        )
        rows += table(name, timings, 1000 / count)
        data[name] = {way: {"cpu": t.cpu, "wall": t.wall} for way, t in timings.items()}
        if name == CROPS and BASE in timings:
            ours = timings[OURS]
            within = ours.median("cpu") * 1000 / count <= BAR_SECONDS
            met = within and timings[BASE].ratio(ours, "cpu").median >= BAR_RATIO
    size = sum(file.stat().st_size for file in photos.rglob("*.jpg")) / count / 1000
    return Result(
        ("way", "CPU s a 1,000", "smallest", "wall s a 1,000", "CPU ratio to ours (spread)"),
        tuple(rows),
        met,
        (
            f"{count} JPEG files of {_LONGER_SIDE} pixels on the longer side, {size:.0f} kB each, "
            f"in the page cache, batches of {batch}, on the CPU. CPU seconds of this process, its "
            "threads and workers. Workers persist: their start is not counted.",
            "Ours was checked first: with seed= no level of any batch is more than 2 off torch's; "
            "with fast=() each batch is torch's, to the bit.",
            "By hand: DALI's file reader, decoders.image_random_crop, resize, "
            "crop_mirror_normalize, DALIGenericIterator; each batch is copied, to be safe to keep.",
            f"Versions: nvidia-dali {dali_version()}, pillow {version_of('pillow')}.",
        ),
        data,
    )


CROPS, GUIDE = "crops", "guide"


def chains(side: int) -> dict[str, Any]:
    """The chain of ImageNet trainings, and the one of the tuning guides."""
    from torchvision import transforms

    guide = max(8, side * 160 // 224)
    return {
        CROPS: chain(side),
        GUIDE: transforms.Compose(
            [
                transforms.Resize((guide, guide)),
                transforms.RandomHorizontalFlip(),
                transforms.RandomVerticalFlip(),
                transforms.RandomRotation(10),
                transforms.ColorJitter(0.05, 0.05, 0.05, 0.05),
                transforms.ToTensor(),
            ]
        ),
    }


def chain(side: int) -> Any:
    """RandomResizedCrop, flip, ToTensor, Normalize."""
    from torchvision import transforms

    return transforms.Compose(
        [
            transforms.RandomResizedCrop(side),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def folder_of_photos(folder: Path, count: int, different: int) -> Path:
    """``count`` files in class folders, of ``different`` photographs in turn."""
    from PIL import Image

    large = make_photos(folder / "large", count=different)
    first = []
    for number, file in enumerate(sorted(large.rglob("*.jpg"))):
        small = folder / f"{number}.jpg"
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
    """The loader that a user has; only ``options`` differ."""
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(str(photos), transform)
    return DataLoader(dataset, batch, shuffle=True, **options)


def ways_of(
    photos: Path, transform: Any, batch: int, side: int, *, by_hand: bool, tiny: bool
) -> dict[str, Iterable[Any]]:
    """What is timed; torch's workers first: they are forked before there are threads."""
    from backends.dali import Dali

    ways: dict[str, Iterable[Any]] = {}
    if not tiny:
        workers = loader(photos, transform, batch, num_workers=2, persistent_workers=True)
        for _ in workers:
            pass
        ways[BASE] = workers
    ways["torch, no workers"] = loader(photos, transform, batch)
    ways[OURS] = loader(photos, transform, batch, backend="dali")
    ways[EXACT] = loader(photos, transform, batch, backend=Dali(fast=()))
    if by_hand:
        ways[BY_HAND] = Repeated(hand_written(photos, batch, side))
    return ways


def compare(photos: Path, transform: Any, batch: int) -> None:
    """Ours beside torch's own, for one epoch; nobody is timed who does something else."""
    from backends.dali import Dali

    ours = loader(photos, transform, batch, backend="dali", seed=_SEED)
    exact = loader(photos, transform, batch, backend=Dali(fast=()), seed=_SEED)
    theirs = loader(photos, transform, batch, seed=_SEED)
    two_levels = 2.02 / 255 / torch.tensor(STD).reshape(3, 1, 1)
    for (images, targets), (same, _), (wanted, labels) in zip(ours, exact, theirs, strict=True):
        assert torch.equal(targets, labels), "another order"
        assert images.stride() == wanted.stride(), "another layout"
        assert torch.equal(same, wanted), "other pixels"
        if "Rotation" not in repr(transform):  # which turns pixels by their neighbours
            assert ((images - wanted).abs() <= two_levels).all(), "other pixels"


class Repeated:
    """An iterable that makes an iterator each time."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def hand_written(
    photos: Path,
    batch: int,
    side: int,
    *,
    device: str = "cpu",
    threads: int = 2,
    windows: bool = True,
    as_ours: bool = False,
) -> Callable[[], Iterator[Any]]:
    """The pipeline of DALI's own examples for this chain; on the CPU each batch is copied.

    Without ``windows`` whole files are decoded, and the windows cut out as they are resized.
    ``as_ours``: a device decodes as under ``backend="dali"``, by its cores, chroma as libjpeg's.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    gpu = device == "gpu"

    @pipeline_def(batch_size=batch, num_threads=threads, device_id=0 if gpu else None)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        files, labels = fn.readers.file(
            file_root=str(photos), random_shuffle=True, name="reader", prefetch_queue_depth=2
        )
        where: dict[str, Any] = {"device": "mixed" if gpu else "cpu"}
        if gpu and as_ours:
            where.update(jpeg_fancy_upsampling=True, hw_decoder_load=0.0)
        drawn = {"random_area": (0.08, 1.0), "random_aspect_ratio": (3 / 4, 4 / 3)}
        size: Any = {"size": (side, side), "interp_type": types.INTERP_TRIANGULAR}
        if windows:
            images = fn.decoders.image_random_crop(files, **where, **drawn)
            images = fn.resize(images, **size)
        else:
            images = fn.decoders.image(files, **where)
            images = fn.random_resized_crop(images, **drawn, **size)
        images = fn.crop_mirror_normalize(
            images,
            mirror=fn.random.coin_flip(),
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            output_layout="CHW",
        )
        return images, labels

    built = pipeline()
    iterator = DALIGenericIterator(
        [built],
        ["images", "labels"],
        reader_name="reader",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )

    def epoch() -> Iterator[Any]:
        for (found,) in iterator:
            yield (found["images"] if gpu else found["images"].clone()), found["labels"]

    return epoch


def run_settings(scale: Scale) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return on_one_thread(lambda scale: measure_settings(scale, Path(folder)), scale)


def measure_settings(scale: Scale, folder: Path) -> Result:
    """An epoch under each setting, in turns."""
    from backends.dali import Dali

    count, side = scale.pick(full=512, tiny=8), scale.pick(full=224, tiny=16)
    photos = folder_of_photos(folder, count, scale.pick(full=_DIFFERENT, tiny=4))
    batch = scale.pick(full=BATCH, tiny=4)
    ways = {
        f"{threads} threads, depth {depth}": loader(
            photos, chain(side), batch, backend=Dali(threads=threads, depth=depth)
        )
        for threads in (1, 2, 4)
        for depth in (1, 2, 3, 5)
    }
    ways["auto"] = auto = loader(photos, chain(side), batch, backend="dali")
    tuning = tune(auto, budget_s=scale.pick(full=30.0, tiny=0.2), remember=False)
    ways["tuned"] = tuning.apply(auto)
    timings = interleave(
        {name: lambda batches=batches: exhaust(batches) for name, batches in ways.items()},
        rounds=scale.pick(full=5, tiny=1),
    )
    best = min(timings.values(), key=Timings.median)
    rows = [
        (name, t.median("cpu") * 1000 / count, t.median() * 1000 / count, str(t.ratio(best)))
        for name, t in timings.items()
    ]
    return Result(
        ("setting", "CPU s a 1,000", "wall s a 1,000", "wall ratio to the best (spread)"),
        tuple(rows),
        all(timings[way].ratio(best).median <= BAR_AUTO for way in ("auto", "tuned")),
        (
            f"{count} photos as in `dali`, RandomResizedCrop({side}), batches of {batch}.",
            f"auto: the rule. tuned: {tuning.choice.backend}, of {len(tuning.trials)} trials in "
            f"{tuning.seconds:.0f} s, without a step.",
        ),
        {name: t.wall for name, t in timings.items()},
    )


def table(name: str, timings: dict[str, Timings], per_thousand: float) -> list[tuple[Cell, ...]]:
    """A row for each way."""
    rows: list[tuple[Cell, ...]] = []
    for way, times in timings.items():
        cpu, low = (value * per_thousand for value in (times.median("cpu"), times.low("cpu")))
        ratio = None if way == OURS else str(times.ratio(timings[OURS], "cpu"))
        rows.append((f"{name}, {way}", cpu, low, times.median() * per_thousand, ratio))
    return rows


def dali_version() -> str:
    """Of whichever of its distributions is installed."""
    names = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")
    return next((found for found in map(version_of, names) if found is not None), "none")


def exhaust(batches: Iterable[Any]) -> None:
    for _batch in batches:
        pass


CASES = [
    Case(
        "dali",
        "What does a photo cost from its file to a batch, beside torch and DALI by hand?",
        f"RandomResizedCrop: <= {BAR_SECONDS} CPU s a 1,000 photos, batches safe to keep, and >= "
        f"{BAR_RATIO} times fewer than torch with 2 workers",
        run,
    ),
    Case(
        "dali_settings",
        "How many threads, and how many batches in flight?",
        f"what 'auto' and tune() choose takes <= {BAR_AUTO} of the best setting's time",
        run_settings,
    ),
]
