"""What does a sample take, in bytes and CPU, in each of the ways in which a cache can keep it?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Case, Result, Scale, interleave, on_one_thread, version_of
from dataloaders.cache import CachedDataset, Compressed, precompute
from dataloaders.cli.photos import make_photos

WAYS: dict[str, dict[str, Any]] = {
    "raw": {},
    "jpeg, quality 90": {"images": "jpeg"},
    "webp, lossless": {"images": "webp"},
    "png": {"images": "png"},
    "packed": {"images": "packed"},
    "raw, zstd level 3": {"compress": "zstd"},
    "raw, zstd level 9": {"compress": Compressed("zstd", 9)},
    "raw, blosc": {"compress": "blosc"},
}


def run(scale: Scale) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return on_one_thread(lambda scale: measure(scale, Path(folder)), scale)


def photos(folder: Path, side: int, crop: int) -> Any:
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    live = [v2.RandomCrop(crop), v2.RandomHorizontalFlip(), v2.ToImage()]
    floats = v2.ToDtype(torch.float32, scale=True)
    return ImageFolder(str(folder), v2.Compose([v2.Resize((side, side)), *live, floats]))


def read(dataset: Any) -> None:
    for index in range(len(dataset)):
        dataset[index]


def measure(scale: Scale, folder: Path) -> Result:
    count, side = scale.pick(full=60, tiny=8), scale.pick(full=256, tiny=32)
    dataset = photos(make_photos(folder / "photos", count=count), side, side * 7 // 8)
    builds: dict[str, Callable[[], object]] = {}
    reads: dict[str, Callable[[], object]] = {}
    sizes: dict[str, int] = {}
    for name, options in WAYS.items():
        path = folder / f"{name}.h5"
        build = partial(precompute, dataset, path, num_workers=0, overwrite=True, **options)
        reads[name] = partial(read, build())
        builds[name] = build
        sizes[name] = path.stat().st_size
        assert len(CachedDataset(path)) == count
    reads["no cache"] = partial(read, dataset)
    rounds = scale.pick(full=5, tiny=1)
    read_in = interleave(reads, rounds=rounds)
    built_in = interleave(builds, rounds=scale.pick(full=3, tiny=1), warmups=0)
    rows = []
    for name, times in read_in.items():
        made = 1000 * built_in[name].median("cpu") / count if name in built_in else None
        took = 1000 * times.median("cpu") / count
        size = sizes[name] / count / 1000 if name in sizes else None
        of_raw = None if size is None else sizes[name] / sizes["raw"]
        rows.append((name, size, of_raw, made, took))
    return Result(
        ("way", "kB a sample", "of raw", "build, CPU ms a sample", "read, CPU ms a sample"),
        tuple(rows),
        None,
        (
            f"{count} of the demo's photographs (640x480 to 1024x768, JPEG quality 90) under "
            f"Resize(({side}, {side})), and RandomCrop({side * 7 // 8}), a flip, ToImage and "
            f"ToDtype live; one torch thread, no workers; Pillow {version_of('pillow')}. They have "
            "a camera's noise, which is what lossless ways spend their bytes on. With so few "
            "samples, a build is in part the study of the first ones.",
        ),
        {"read": {n: t.cpu for n, t in read_in.items()}, "sizes": sizes},
    )


CASES = [
    Case(
        "cache_kinds",
        "What does a sample take in each of the ways in which a cache keeps it?",
        "none: the ways are for different needs",
        run,
    ),
]
