"""What does a precomputed sample cost, beside the ways of reading that people use?

Photos ──precompute──> train.h5 ──backend="h5"──> batches ──┐
   └───────written in each peer's own format────> batches ──┴─ checked, then timed in turns
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from backends.h5 import H5
from bench.harness import (
    Result,
    Rows,
    Scale,
    Timings,
    case,
    exhaust,
    interleave,
    timing_headings,
    timing_rows,
    version_of,
)
from bench.peers.check import check
from bench.peers.readers import MEAN, PACKAGES, PEERS, STD, Job
from dataloaders import DataLoader
from dataloaders.cache import precompute

BATCH = 64
BARS = {"uint8": (0.045, 6.0), "float32": (0.12, 7.0)}
"""By dtype: CPU s a 1,000 samples at most; how many times cheaper than `BASE` at least."""

OURS, BASE = "h5 (ours)", "torch over h5py, 2 workers"
PARTS, PARTS_BAR = (8, 200), 1.25
"""Of how many parts it is read besides one; how many times the CPU s of one part at most."""


class Photos(Dataset[Any]):
    """Images of ``stored`` pixels a side, like a photo folder's after decoding and resizing.

    Their first channel is the row of each pixel, the second its column, for `bench.peers.check`.
    """

    def __init__(self, length: int, stored: int, transform: Any) -> None:
        random = np.random.default_rng(0)
        self.base = random.integers(0, 256, (16, stored, stored, 3), dtype=np.uint8)
        self.length = length
        self.transform = transform

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        pixels = np.roll(self.base[index % 16], index // 16, axis=0)
        pixels[..., 0], pixels[..., 1] = np.indices(pixels.shape[:2])
        return self.transform(Image.fromarray(pixels)), index % 1000


@case(
    "CPU s a 1,000 samples: uint8 <= 0.045, float32 <= 0.12; in 8 and 200 parts <= 1.25 times "
    "as many; >= 6 and >= 7 times fewer than torch over h5py with 2 workers; no peer cheaper",
    one_thread=True,
)
def h5(scale: Scale, folder: Path) -> Result:
    """What does a precomputed sample cost, beside the other ways of reading it?"""
    length, stored = scale.pick(full=1000, tiny=20), scale.pick(full=256, tiny=16)
    side, batch = scale.pick(full=224, tiny=8), scale.pick(full=BATCH, tiny=4)
    photos = Photos(length, stored, np.asarray)
    images = np.stack([photos[number][0].transpose(2, 0, 1) for number in range(length)])
    ours = {
        name: functools.partial(own, photos=Photos(length, stored, None), parts=parts)
        for parts, name in ((1, OURS), *((parts, of_parts(parts)) for parts in PARTS))
    }
    rows: Rows = ()
    met, missing = True, {}
    for kind in BARS:
        job = Job(folder, images, side, batch, kind == "float32")
        ways = {}
        for name, opened in {**ours, **PEERS}.items():
            try:
                ways[name] = opened(job)
            except ImportError as error:
                missing[name] = str(error)
                continue
            check(job, ways[name])
        rounds = scale.pick(full=9, tiny=1)
        timings = interleave(ways, exhaust, rounds=rounds, children=True, again=True)
        rows += timing_rows(timings, 1000 / length, OURS, f"{kind}, ")
        met = met and is_met(timings, 1000 / length, *BARS[kind])
    installed = {name: version_of(name) for name in PACKAGES}
    return Result(
        timing_headings(OURS),
        rows,
        met,
        (
            f"{length} images of 3 x {stored} x {stored} bytes in the page cache, batches of "
            f"{batch}, RandomCrop({side}) and RandomHorizontalFlip; float32: scaled and normalised "
            "too. CPU seconds of this process and its workers; one thread, or the workers named. "
            "Workers persist: their start does not count. Each way reads an epoch that does not "
            "count, then one that does.",
            "Every way was checked first: each image once an epoch, in a random order, each a "
            "random window of what was stored, to the bit (float32: to 1e-5), and batches are safe "
            "to keep.",
            f"Versions: {', '.join(f'{n} {v}' for n, v in installed.items() if v)}.",
            *(f"Not installed, so not measured: {name} ({why})." for name, why in missing.items()),
        ),
    )


def of_parts(parts: int) -> str:
    """Return the name of our way over a cache of so many files."""
    return f"{OURS}, {parts} parts"


def own(job: Job, photos: Photos, parts: int) -> Iterable[Any]:
    """Return our loader over a cache of so many files, which it builds."""
    import torch
    from torchvision.transforms import v2

    floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    crop = [v2.RandomCrop(job.side), v2.RandomHorizontalFlip(), v2.ToImage()]
    photos.transform = v2.Compose([*crop, *(floats if job.floats else [])])
    path = job.folder / f"{job.dtype}-{parts}.h5"
    rows = -(-len(photos) // parts)
    precompute(photos, path, num_workers=0, rows=rows, single_file=False)
    return DataLoader(photos, job.batch, shuffle=True, backend=H5(path))


def is_met(timings: Mapping[str, Timings], per: float, most: float, least: float) -> bool:
    """Return whether ours is within its bars, also in parts, and the cheapest of all."""
    ours, base = timings[OURS], timings.get(BASE)
    enough = base is None or base.ratio(ours).median >= least
    in_parts = [timings[of_parts(parts)] for parts in PARTS]
    flat = all(each.ratio(ours).median <= PARTS_BAR for each in in_parts)
    peers = (times for name, times in timings.items() if not name.startswith(OURS))
    cheapest = all(ours.median("cpu") <= times.median("cpu") for times in peers)
    return ours.median("cpu") * per <= most and enough and flat and cheapest
