"""What does a sample cost that was precomputed, beside the ways of reading it that people use?

Photos ──precompute──> train.h5 ──backend="h5"──> batches ──┐
   └───────written in each peer's own format────> batches ──┴─ checked, then timed in turns
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from backends.h5 import H5
from bench.h5_check import check
from bench.h5_peers import MEAN, PEERS, STD, Job, Peer
from bench.harness import Case, Cell, Result, Scale, Timings, interleave, on_one_thread, version_of
from dataloaders import DataLoader
from dataloaders.cache import precompute

BATCH = 64
BAR_BYTES, BAR_FLOATS = 0.07, 0.14
BAR_BYTES_RATIO, BAR_FLOATS_RATIO = 6.0, 7.0
OURS, BASE = "h5 (ours)", "torch over h5py, 2 workers"


class Photos(Dataset[Any]):
    """Images of ``stored`` pixels a side, as a photo folder's are after decoding and resizing."""

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
        return self.transform(Image.fromarray(pixels)), index % 1000


def run(scale: Scale) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return on_one_thread(lambda scale: measure(scale, Path(folder)), scale)


def measure(scale: Scale, folder: Path) -> Result:
    length, stored = scale.pick(full=1000, tiny=20), scale.pick(full=256, tiny=16)
    side, batch = scale.pick(full=224, tiny=8), scale.pick(full=BATCH, tiny=4)
    photos = Photos(length, stored, np.asarray)
    images = np.stack([photos[number][0].transpose(2, 0, 1) for number in range(length)])
    ours = Peer(OURS, (), lambda job: own(job, Photos(length, stored, None)))
    peers = [ours, *(peer for peer in PEERS if not (scale.tiny and peer.workers))]
    rows: list[tuple[Cell, ...]] = []
    data, met, missing = {}, True, {}
    for kind, floats in (("uint8", False), ("float32", True)):
        job = Job(folder, images, side, batch, floats)
        ways = {}
        for peer in peers:
            try:
                ways[peer.name] = way = peer.open(job)
            except ImportError as error:
                missing[peer.packages[0]] = str(error)
                continue
            check(peer.name, job, way, kept=peer.kept)
        timings = interleave(
            {name: lambda way=way: exhaust(way) for name, way in ways.items()},
            rounds=scale.pick(full=9, tiny=1),
            children=True,
            again=True,
        )
        rows += table(kind, timings, {peer.name: peer.kept for peer in peers}, 1000 / length)
        data[kind] = {name: times.cpu for name, times in timings.items()}
        others = {peer.name for peer in peers if not peer.limit}
        met = met and is_met(floats, timings, 1000 / length, others)
    return Result(
        (
            "way",
            "safe to keep",
            "CPU s a 1,000",
            "smallest",
            "wall s a 1,000",
            "CPU ratio to ours (spread)",
        ),
        tuple(rows),
        met,
        (
            f"{length} images of 3 x {stored} x {stored} bytes in the page cache, batches of "
            f"{batch}, RandomCrop({side}) and RandomHorizontalFlip; float32: scaled and normalised "
            "too. CPU seconds of this process and its workers; one thread, or the workers that are "
            "named. Workers persist: their start is not counted. Each way reads an epoch that does "
            "not count, then the one that does.",
            "Every way was checked first: each image once an epoch, in a random order, each a "
            "random window of what was stored, to the bit (float32: to 1e-5). Where batches are "
            "not safe to keep, a later one overwrites them.",
            "Files hold planar images (FFCV and the compiled gather: interleaved, as they are "
            "decoded; FFCV's batches are channels last in memory).",
            "The compiled gathers are nothing that one installs: a function for this one job, by "
            "hand, without a loader around it. They show what the work takes, of rows as they are "
            "decoded and as ours are kept, and are not part of the bar.",
            f"Versions: {', '.join(versions(peers))}.",
            *(f"Not installed, so not measured: {name} ({why})." for name, why in missing.items()),
        ),
        data,
    )


def own(job: Job, photos: Photos) -> Iterable[Any]:
    """Ours, over a cache that it builds."""
    import torch
    from torchvision.transforms import v2

    floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    crop = [v2.RandomCrop(job.side), v2.RandomHorizontalFlip(), v2.ToImage()]
    photos.transform = v2.Compose([*crop, *(floats if job.floats else [])])
    path = job.folder / f"{job.dtype}.h5"
    precompute(photos, path)
    return DataLoader(photos, job.batch, shuffle=True, backend=H5(path))


def table(
    kind: str, timings: dict[str, Timings], kept: dict[str, bool], per_thousand: float
) -> list[tuple[Cell, ...]]:
    """A row for each way."""
    rows: list[tuple[Cell, ...]] = []
    for name, times in timings.items():
        cpu, low = (value * per_thousand for value in (times.median("cpu"), times.low("cpu")))
        ratio = None if name == OURS else str(times.ratio(timings[OURS], "cpu"))
        wall = times.median() * per_thousand
        rows.append((f"{kind}, {name}", kept[name], cpu, low, wall, ratio))
    return rows


def is_met(
    floats: bool, timings: dict[str, Timings], per_thousand: float, others: Collection[str]
) -> bool:
    """Whether ours is within its seconds, cheaper by enough, and none of ``others`` is cheaper."""
    ours, base = timings[OURS], timings.get(BASE)
    most, least = (BAR_FLOATS, BAR_FLOATS_RATIO) if floats else (BAR_BYTES, BAR_BYTES_RATIO)
    if ours.median("cpu") * per_thousand > most:
        return False
    if base is not None and base.ratio(ours, "cpu").median < least:
        return False
    others_times = (times for name, times in timings.items() if name in others)
    return all(ours.median("cpu") <= times.median("cpu") for times in others_times)


def versions(peers: Iterable[Peer]) -> list[str]:
    """The peers' distributions that are installed, each once."""
    names = dict.fromkeys(name for peer in peers for name in peer.packages)
    found = {name: version_of(name) for name in names if name != "numpy"}
    return [f"{name} {number}" for name, number in found.items() if number is not None]


def exhaust(batches: Iterable[Any]) -> None:
    for _batch in batches:
        pass


CASES = [
    Case(
        "h5",
        "What does a precomputed sample cost, beside the other ways of reading it?",
        f"CPU s a 1,000 samples: uint8 <= {BAR_BYTES}, float32 <= {BAR_FLOATS}; "
        f">= {BAR_BYTES_RATIO:g} and >= {BAR_FLOATS_RATIO:g} times fewer than torch over h5py with "
        "2 workers; no peer that one installs cheaper",
        run,
    ),
]
