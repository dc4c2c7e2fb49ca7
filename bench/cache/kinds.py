"""What does a sample take, in bytes and CPU, in each of the ways in which a cache can keep it?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import Result, Scale, case, interleave
from dataloaders.cache import Compressed, precompute
from dataloaders.cli.photos import make_photos

WAYS: dict[str, dict[str, Any]] = {
    "raw": {},
    "jpeg, quality 90": {"images": "jpeg"},
    "webp, lossless": {"images": "webp"},
    "png": {"images": "png"},
    "packed": {"images": "packed"},
    "raw, zstd level 3": {"compress": "zstd"},
    "raw, zstd level 9": {"compress": Compressed("zstd", 9)},
    "raw, gzip": {"compress": "gzip"},
}


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


@case("none: the ways are for different needs", one_thread=True)
def cache_kinds(scale: Scale, folder: Path) -> Result:
    """What does a sample take in each of the ways in which a cache keeps it?"""
    count, side = scale.pick(full=60, tiny=8), scale.pick(full=256, tiny=32)
    dataset = photos(make_photos(folder / "photos", count=count), side, side * 7 // 8)
    reads, builds, sizes = {"no cache": dataset}, {}, {}
    for name, options in WAYS.items():
        path = folder / f"{name}.h5"
        build = partial(precompute, dataset, path, num_workers=0, overwrite=True, **options)
        builds[name], reads[name], sizes[name] = build, build(), path.stat().st_size
    read_in = interleave(reads, read, rounds=scale.pick(full=5, tiny=1))
    built_in = interleave(builds, rounds=scale.pick(full=3, tiny=1), warmups=0)
    rows = [("no cache", None, None, None, 1000 * read_in["no cache"].median("cpu") / count)]
    for name, size in sizes.items():
        made, took = (1000 * times[name].median("cpu") / count for times in (built_in, read_in))
        rows.append((name, size / count / 1000, size / sizes["raw"], made, took))
    return Result(
        ("way", "kB a sample", "of raw", "build, CPU ms a sample", "read, CPU ms a sample"),
        tuple(rows),
        None,
        (
            f"{count} of the demo's photographs (640x480 to 1024x768, JPEG quality 90) under "
            f"Resize(({side}, {side})), and RandomCrop({side * 7 // 8}), a flip, ToImage and "
            "ToDtype live; one torch thread, no workers. The photographs have a camera's noise, "
            "which is what lossless ways spend their bytes on. With so few samples, a build is in "
            "part the study of the first ones.",
        ),
    )
