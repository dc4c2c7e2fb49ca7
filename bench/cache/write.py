"""How much of the decoding speed of all cores is left when what they decode is also written?"""

from __future__ import annotations

import functools
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from bench.harness import Result, Scale, case, interleave
from dataloaders.cache import precompute
from dataloaders.cli.photos import make_photos
from dataloaders.machine.resources import usable_cores

BAR = 0.9


class Photos(Dataset[Any]):
    """JPEG files, again and again: read, decoded, resized and, with ``crop``, made square."""

    def __init__(self, files: list[Path], length: int, side: int, *, crop: bool) -> None:
        from torchvision.transforms import v2

        self.files, self.length = files, length
        self.transform = v2.Compose([v2.Resize(side), *([v2.CenterCrop(side)] if crop else [])])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.files[index % len(self.files)]) as image:
            return self.transform(image.convert("RGB")), index % 1000


def read(dataset: Photos, first: int, step: int) -> None:
    for index in range(first, len(dataset), step):
        dataset[index]


def read_by(processes: int, dataset: Photos) -> None:
    """Decode all samples and keep none."""
    process = multiprocessing.get_context("fork").Process
    started = [process(target=read, args=(dataset, n, processes)) for n in range(processes)]
    for one in started:
        one.start()
    for one in started:
        one.join()


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    shutil.rmtree(path.with_suffix(".parts"), ignore_errors=True)


@case(
    f">= {BAR} x (cores x what one process decodes), of 3,000 photos of 256 x 256", one_thread=True
)
def cache_write(scale: Scale, folder: Path) -> Result:
    """How much of the decoding speed of all cores is left when a cache is built?"""
    few, many = scale.pick(full=3000, tiny=12), scale.pick(full=9000, tiny=18)
    side = scale.pick(full=256, tiny=32)
    photos = make_photos(folder / "photos", count=scale.pick(full=64, tiny=4))
    files = sorted(photos.glob("*/*.jpg"))
    cores, path = usable_cores(), folder / "a.h5"
    square, any_shape = f"{side} x {side}", f"shorter side {side}"
    rows, met = [], True
    for length, shape in ((few, any_shape), (few, square), (many, square)):
        dataset = Photos(files, length, side, crop=shape == square)
        ways: dict[str, Callable[[], object]] = {
            # Removing takes time too; whichever way the round goes, no part is there.
            "removed before": functools.partial(remove, path),
            "one process decodes": functools.partial(read_by, 1, dataset),
            f"{cores} processes decode": functools.partial(read_by, cores, dataset),
            "precompute": functools.partial(precompute, dataset, path),
            "removed after": functools.partial(remove, path),
        }
        timings = interleave(
            ways,
            rounds=scale.pick(full=3, tiny=1),
            # By the last length all files have been read; its runs take long.
            warmups=scale.pick(full=int(length == few), tiny=0),
            children=True,
        )
        del timings["removed before"], timings["removed after"]
        one, all_cores = timings["one process decodes"], timings[f"{cores} processes decode"]
        what = f"{length:,} of {shape}"
        for name, times in timings.items():
            ratio = one.ratio(times, "wall")
            share, low, high = (value / cores for value in (ratio.median, ratio.low, ratio.high))
            cpu = times.median("cpu") * 1000 / length
            spread = f"{share:.3f} ({low:.3f} to {high:.3f})"
            beside = str(all_cores.ratio(times, "wall"))
            rows.append((f"{what}, {name}", length / times.median(), cpu, spread, beside))
            if name == "precompute" and (length, shape) == (few, square):
                met = share >= BAR
    return Result(
        (
            "way",
            "samples a second",
            "CPU s a 1,000",
            f"share of {cores} x one process (spread)",
            f"of {cores} processes",
        ),
        tuple(rows),
        met,
        (
            f"Samples of {len(files)} JPEG files of 480 x 640 to 768 x 1024, in the page cache, "
            f"decoded by Pillow and resized by torchvision; all {square} (rows of one shape) or as "
            "wide as they come (rows of several). Study, workers' start, fsync, checksums and all "
            f"count: one-time costs are a larger part of {few:,} samples than of {many:,}.",
            "What that many processes reach by decoding alone is what the machine's cores share: "
            "where it is below 1, no way of writing reaches 1, of this version or of another: that "
            "is why no earlier version is measured beside it.",
        ),
    )
