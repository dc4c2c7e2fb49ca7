"""What does a sample cost that was precomputed, beside the ways of reading it that people use?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import Dataset

from backends.h5 import H5
from bench.harness import Case, Result, Scale, interleave, on_one_thread
from dataloaders import DataLoader
from dataloaders.cache import precompute

BATCH = 64
BAR_BYTES, BAR_FLOATS = 0.07, 0.14
BAR_BYTES_RATIO, BAR_FLOATS_RATIO = 6.0, 7.0
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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


class FromH5py(Dataset[Any]):
    """The dataset that tutorials write: a file opened in each worker, rows read by h5py."""

    def __init__(self, path: Path, transform: Any) -> None:
        self.path, self.transform, self.file = path, transform, None
        import h5py

        with h5py.File(path, "r") as file:
            self.length = len(file["labels"])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r")
        image = torch.from_numpy(self.file["images"][index])
        return self.transform(image), int(self.file["labels"][index])


class FromMemmap(Dataset[Any]):
    """The same over np.memmap."""

    def __init__(self, path: Path, shape: tuple[int, ...], transform: Any) -> None:
        self.images = np.memmap(path, np.uint8, "r", shape=shape)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.from_numpy(self.images[index].copy())), index % 1000


def run(scale: Scale) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return on_one_thread(lambda scale: measure(scale, Path(folder)), scale)


def measure(scale: Scale, folder: Path) -> Result:
    from torchvision.transforms import v2

    length, stored = scale.pick(full=1000, tiny=20), scale.pick(full=256, tiny=16)
    side, batch = scale.pick(full=224, tiny=8), scale.pick(full=BATCH, tiny=4)
    crop = [v2.RandomCrop(side), v2.RandomHorizontalFlip()]
    ends: dict[str, list[Any]] = {
        "uint8": [],
        "float32": [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)],
    }
    files = _plain_files(Photos(length, stored, np.asarray), folder, stored)
    rows, data, met = [], {}, True
    for kind, end in ends.items():
        dataset = Photos(length, stored, v2.Compose([*crop, v2.ToImage(), *end]))
        path = folder / f"{kind}.h5"
        precompute(dataset, path)
        ways: dict[str, Callable[[], object]] = {}
        own = DataLoader(dataset, batch, shuffle=True, backend=H5(path))
        ways["h5 (ours)"] = lambda own=own: exhaust(own)
        whole = v2.Compose([*crop, *end])
        h5py = FromH5py(files["h5py"], whole)
        memmap = FromMemmap(files["memmap"], (length, 3, stored, stored), whole)
        for name, theirs, workers in (
            ("torch over h5py, 2 workers", h5py, 2),
            ("torch over h5py, no workers", h5py, 0),
            ("torch over np.memmap, 2 workers", memmap, 2),
            ("torch over np.memmap, no workers", memmap, 0),
        ):
            if scale.tiny and workers:
                continue
            loader: Any = torch.utils.data.DataLoader(
                theirs, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
            )
            ways[name] = lambda loader=loader: exhaust(loader)
        timings = interleave(ways, rounds=scale.pick(full=9, tiny=1), children=True)
        per_thousand = 1000 / length
        ours = timings["h5 (ours)"]
        for name, times in timings.items():
            ratio = None if times is ours else str(times.ratio(ours, "cpu"))
            cpu, wall = times.median("cpu") * per_thousand, times.median() * per_thousand
            rows.append((f"{kind}, {name}", cpu, times.low("cpu") * per_thousand, wall, ratio))
        data[kind] = {name: times.cpu for name, times in timings.items()}
        bar = BAR_BYTES if kind == "uint8" else BAR_FLOATS
        least = BAR_BYTES_RATIO if kind == "uint8" else BAR_FLOATS_RATIO
        met = met and ours.median("cpu") * per_thousand <= bar
        base = timings.get("torch over h5py, 2 workers")
        met = met and (base is None or base.ratio(ours, "cpu").median >= least)
        met = met and all(ours.median("cpu") <= times.median("cpu") for times in timings.values())
    return Result(
        ("way", "CPU s a 1,000", "smallest", "wall s a 1,000", "CPU ratio to ours (spread)"),
        tuple(rows),
        met,
        (
            f"{length} images of 3 x {stored} x {stored} bytes in the page cache, batches of "
            f"{batch}, RandomCrop({side}) and RandomHorizontalFlip; float32: scaled and normalised "
            "too. Every batch is safe to keep. CPU seconds of this process and its workers; one "
            "torch thread. Workers persist: their start is not counted.",
            "The peers' files hold planar images, and their datasets crop tensors.",
        ),
        data,
    )


def _plain_files(photos: Photos, folder: Path, stored: int) -> dict[str, Path]:
    import h5py

    files = {"h5py": folder / "plain.h5", "memmap": folder / "plain.bin"}
    shape = (len(photos), 3, stored, stored)
    images = np.memmap(files["memmap"], np.uint8, "w+", shape=shape)
    for number in range(len(photos)):
        images[number] = photos[number][0].transpose(2, 0, 1)
    images.flush()
    with h5py.File(files["h5py"], "w") as file:
        file.create_dataset("images", data=images)
        file.create_dataset("labels", data=np.arange(len(photos)) % 1000)
    return files


def exhaust(loader: Iterable[Any]) -> None:
    for _batch in loader:
        pass


CASES = [
    Case(
        "h5",
        "What does a precomputed sample cost, beside h5py and np.memmap under torch's loader?",
        f"CPU s a 1,000 samples: uint8 <= {BAR_BYTES}, float32 <= {BAR_FLOATS}; "
        f">= {BAR_BYTES_RATIO:g} and >= {BAR_FLOATS_RATIO:g} times fewer than torch over h5py with "
        "2 workers; no way cheaper",
        run,
    ),
]
