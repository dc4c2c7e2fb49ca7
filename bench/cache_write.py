"""How much of the decoding speed of all cores is left when what they decode is also written?"""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from bench.harness import Case, Result, Scale, interleave, on_one_thread
from dataloaders.cache import precompute
from dataloaders.cli.photos import make_photos
from dataloaders.machine.resources import usable_cores

BAR = 0.9


class Photos(Dataset[Any]):
    """JPEG files of a folder, again and again: read, decoded, resized and cropped to a square."""

    def __init__(self, folder: Path, length: int, side: int, *, crop: bool) -> None:
        from torchvision.transforms import v2

        self.files = sorted(folder.glob("*/*.jpg"))
        self.length = length
        self.transform = v2.Compose([v2.Resize(side), *([v2.CenterCrop(side)] if crop else [])])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(self.files[index % len(self.files)]) as image:
            return self.transform(image.convert("RGB")), index % 1000


def read(dataset: Photos, first: int, step: int) -> None:
    """Every ``step``-th sample from ``first`` on, and nothing done with it."""
    for index in range(first, len(dataset), step):
        dataset[index]


def read_by(processes: int, dataset: Photos) -> None:
    """Decode all, and keep nothing."""
    context = multiprocessing.get_context("fork")
    each = [
        context.Process(target=read, args=(dataset, number, processes))
        for number in range(processes)
    ]
    for process in each:
        process.start()
    for process in each:
        process.join()


def run(scale: Scale) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return on_one_thread(lambda scale: measure(scale, Path(folder)), scale)


def measure(scale: Scale, folder: Path) -> Result:
    few, many = scale.pick(full=3000, tiny=12), scale.pick(full=9000, tiny=18)
    side = scale.pick(full=256, tiny=32)
    photos = make_photos(folder / "photos", count=scale.pick(full=64, tiny=4))
    cores, path = usable_cores(), folder / "a.h5"
    rows, data, met = [], {}, True
    square, any_shape = f"{side} x {side}", f"shorter side {side}"
    for length, shape in ((few, any_shape), (few, square), (many, square)):
        dataset = Photos(photos, length, side, crop=shape == square)
        timings = interleave(
            {
                # To give the room of a file back takes 0.07 s; in either order, none is there.
                "removed before": lambda: path.unlink(missing_ok=True),
                "one process decodes": functools.partial(read_by, 1, dataset),
                f"{cores} processes decode": functools.partial(read_by, cores, dataset),
                "precompute": functools.partial(precompute, dataset, path),
                "removed after": lambda: path.unlink(missing_ok=True),
            },
            rounds=scale.pick(full=3, tiny=1),
            # The last ones come when all files have been read, and take long.
            warmups=scale.pick(full=int(length == few), tiny=0),
            children=True,
        )
        del timings["removed before"], timings["removed after"]
        one, all_cores = timings["one process decodes"], timings[f"{cores} processes decode"]
        what = f"{length:,} of {shape}"
        for name, times in timings.items():
            ratio = one.ratio(times)
            share = ratio.median / cores
            spread = f"{share:.3f} ({ratio.low / cores:.3f} to {ratio.high / cores:.3f})"
            cpu = times.median("cpu") * 1000 / length
            beside = str(all_cores.ratio(times))
            rows.append((f"{what}, {name}", length / times.median(), cpu, spread, beside))
        if (length, shape) == (few, square):
            met = one.ratio(timings["precompute"]).median / cores >= BAR
        data[what] = {name: {"wall": t.wall, "cpu": t.cpu} for name, t in timings.items()}
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
            f"Samples of {len(list(photos.glob('*/*.jpg')))} JPEG files of 480 x 640 to 768 x "
            f"1024, in the page cache, decoded by Pillow and resized by torchvision; all {square} "
            "(rows of one shape) or as wide as they come (rows of several). Study, workers' "
            "start, fsync, checksums and all are counted: what is paid once is a larger "
            f"part of {few:,} samples than of {many:,}.",
            "What that many processes reach by decoding alone is what the machine's cores have to "
            "share: where it is below 1, no way of writing reaches 1.",
        ),
        data,
    )


CASES = [
    Case(
        "cache_write",
        "How much of the decoding speed of all cores is left when a cache is built?",
        f">= {BAR} x (cores x what one process decodes), of 3,000 photos of 256 x 256",
        run,
    ),
]
