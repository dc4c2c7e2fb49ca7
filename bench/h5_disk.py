"""How fast is a cache read in random order: from memory, and from a disk?"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from backends.h5 import H5
from bench.h5 import Photos, exhaust
from bench.harness import Case, Result, Scale, interleave, on_one_thread
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute
from dataloaders.machine.page_cache import evict, resident_pages
from dataloaders.samplers import BlockShuffle

BATCH = 64
BAR_RANDOM, BAR_FIRST = 1.10, 0.050
BAR_READ, BAR_SPEED = 1.10, 2.0
POLL = 0.004
MEMMAP, SMALL = "full shuffle of np.memmap", "1/4 of the file"


class AsMemmap(Dataset[Any]):
    """The same rows of the same file, read as np.memmap reads: page by page, as they are missed."""

    def __init__(self, cached: CachedDataset) -> None:
        self.images, self.labels = (cached.column(entry.name) for entry in cached.columns)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.images[index].copy()), int(self.labels[index])


def in_memory(scale: Scale) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return on_one_thread(lambda scale: measure_memory(scale, Path(folder)), scale)


def from_disk(scale: Scale) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return on_one_thread(lambda scale: measure_disk(scale, Path(folder)), scale)


def measure_memory(scale: Scale, folder: Path) -> Result:
    length, batch = scale.pick(full=2000, tiny=24), scale.pick(full=BATCH, tiny=4)
    dataset, path = built(folder, length, scale.pick(full=256, tiny=16))
    cached = CachedDataset(path)
    loaders: dict[str, Any] = {
        "sequential": DataLoader(dataset, batch, backend=H5(path)),
        "full shuffle": DataLoader(dataset, batch, shuffle=True, backend=H5(path)),
        "BlockShuffle": DataLoader(
            dataset, batch, sampler=BlockShuffle(cached, seed=0), backend=H5(path)
        ),
    }
    ways = {name: lambda loader=loader: exhaust(loader) for name, loader in loaders.items()}
    timings = interleave(ways, rounds=scale.pick(full=11, tiny=1))
    rows, met, firsts = [], True, {}
    for name, loader in loaders.items():
        firsts[name] = [first_batch(loader) for _ in range(scale.pick(full=15, tiny=2))]
        times, base = timings[name], timings["sequential"]
        ratios = [times.ratio(base, clock) for clock in ("cpu", "wall")]
        if name == "full shuffle":
            met = met and all(ratio.median <= BAR_RANDOM for ratio in ratios)
        met = met and max(firsts[name]) <= BAR_FIRST
        per_thousand = 1000 / length
        rows.append(
            (
                name,
                times.median("cpu") * per_thousand,
                times.median() * per_thousand,
                *(None if times is base else str(ratio) for ratio in ratios),
                statistics.median(firsts[name]) * 1e3,
                max(firsts[name]) * 1e3,
            )
        )
    return Result(
        (
            "order",
            "CPU s a 1,000",
            "wall s a 1,000",
            "CPU, to sequential",
            "wall, to sequential",
            "first batch, ms",
            "slowest first, ms",
        ),
        tuple(rows),
        met,
        (
            f"{length} images of {cached.row_bytes:,.0f} bytes in the page cache, batches of "
            f"{batch}, backend h5 without workers, uint8 as they are kept.",
            "First batch: from iter() to the first batch, of an epoch that is not the loader's "
            "first one, "
            f"{len(firsts['sequential'])} times.",
        ),
        {name: times.wall for name, times in timings.items()} | {"firsts": firsts},
    )


class Run(NamedTuple):
    """One epoch from disk."""

    first: float
    seconds: float
    read: int | None
    resident_before: float
    most_resident: int


def measure_disk(scale: Scale, folder: Path) -> Result:
    length, batch = scale.pick(full=2600, tiny=24), scale.pick(full=BATCH, tiny=4)
    dataset, path = built(folder, length, scale.pick(full=256, tiny=16))
    cached = CachedDataset(path)
    size = path.stat().st_size
    small = size // 4
    window = max(1, int(small / 2 / cached.row_bytes))
    h5 = H5(path, build="never")
    ours = BlockShuffle(cached, window=window)
    loaders: dict[str, Any] = {
        "sequential": DataLoader(dataset, batch, backend=h5),
        MEMMAP: torch.utils.data.DataLoader(AsMemmap(cached), batch, shuffle=True),
        "full shuffle": DataLoader(dataset, batch, shuffle=True, backend=h5),
        "BlockShuffle": DataLoader(dataset, batch, sampler=ours, backend=h5),
    }
    for loader in loaders.values():
        exhaust(loader)  # opened and proved; what is read for that is not an epoch's
    evict(path)
    if resident_pages(path).any():
        note = f"The files in {folder.parent} cannot leave memory (tmpfs?): set TMPDIR to a disk."
        return Result(("order",), ((name,) for name in loaders), None, (note,))  # type: ignore[arg-type]
    caches = {"unlimited": None, SMALL: small}
    runs: dict[tuple[str, str], list[Run]] = {}
    for turn in range(scale.pick(full=5, tiny=1)):
        for room, limit in caches.items():
            for name in list(loaders)[:: 1 if turn % 2 else -1]:
                runs.setdefault((room, name), []).append(epoch(path, loaders[name], limit))
    rows = []
    for room in caches:
        for name in loaders:
            of = runs[room, name]
            seconds = [run.seconds for run in of]
            read = None if of[0].read is None else statistics.median(run.read or 0 for run in of)
            rows.append(
                (
                    f"{name}, {room}",
                    length / statistics.median(seconds),
                    f"{length / max(seconds):.4g} to {length / min(seconds):.4g}",
                    None if read is None else read / statistics.median(seconds) / 1e6,
                    None if read is None else read / size,
                    max(run.most_resident for run in of) / 1e6,
                    statistics.median(run.first for run in of) * 1e3,
                )
            )
    met, notes = True, []
    slow = runs[SMALL, MEMMAP]
    for name in ("full shuffle", "BlockShuffle"):
        quick = runs[SMALL, name]
        faster = [theirs.seconds / mine.seconds for mine, theirs in zip(quick, slow, strict=True)]
        read = statistics.median((run.read or 0) / size for run in quick)
        met = met and read <= BAR_READ and statistics.median(faster) >= BAR_SPEED
        notes.append(
            f"{name} in the small page cache, times as fast as np.memmap's, round by round: "
            f"{statistics.median(faster):.2f} ({min(faster):.2f} to {max(faster):.2f})."
        )
    return Result(
        (
            "order, page cache",
            "samples/s",
            "spread",
            "MB/s from disk",
            "read / file",
            "MB in memory, at most",
            "first batch, ms",
        ),
        tuple(rows),
        met,
        (
            f"{length} images of {cached.row_bytes:,.0f} bytes, {size / 1e6:.0f} MB; batches of "
            f"{batch}, backend h5 without workers. BlockShuffle: blocks of "
            f"{ours.block} rows, window of {window}. Before each epoch "
            "the file is unmapped and evicted; by mincore, "
            f"{max(run.resident_before for of in runs.values() for run in of):.1%} of its pages "
            "were in memory then, at most.",
            f"{SMALL}: a model of a small page cache. A thread looks every "
            f"{POLL * 1e3:.0f} ms and evicts the pages that have been there the longest, used or "
            "not, beyond that size; a real one keeps pages that are used again, which no page is "
            "within an epoch.",
            f"The kernel reads {read_around(path)} around a page that is missing, a setting of "
            "this machine; 128 KiB is usual, with which np.memmap would read less. The disk "
            "is a virtual one, whose speed varies: compare rows, not machines.",
            *notes,
        ),
        {f"{room}, {name}": [run._asdict() for run in of] for (room, name), of in runs.items()},
    )


def built(folder: Path, length: int, stored: int) -> tuple[Photos, Path]:
    from torchvision.transforms import v2

    dataset, path = Photos(length, stored, v2.Compose([v2.PILToTensor()])), folder / "photos.h5"
    precompute(dataset, path)
    return dataset, path


def first_batch(loader: Any) -> float:
    """Seconds from iter() to the first batch."""
    began = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - began


def epoch(path: Path, loader: Any, limit: int | None) -> Run:
    """One epoch after the file was evicted, in a page cache of ``limit`` bytes."""
    evict(path)
    before = float(resident_pages(path).mean())
    with nullcontext() if limit is None else SmallPageCache(path, limit) as held:
        read, began = read_from_disk(), time.perf_counter()
        batches = iter(loader)
        next(batches)
        first = time.perf_counter() - began
        exhaust(batches)
        seconds, after = time.perf_counter() - began, read_from_disk()
    most = int(resident_pages(path).sum()) * mmap.PAGESIZE if held is None else held.most
    return Run(
        first, seconds, None if read is None or after is None else after - read, before, most
    )


class SmallPageCache(threading.Thread):
    """While it is entered, at most so many bytes of the file stay in memory, the newest ones."""

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self._path = path
        self._limit = limit // mmap.PAGESIZE
        self._ended = threading.Event()

    def run(self) -> None:
        since = np.zeros(-(-self._path.stat().st_size // mmap.PAGESIZE), np.int64)
        now = 0
        while not self._ended.wait(POLL):
            now += 1
            resident = resident_pages(self._path)
            since[~resident] = 0
            since[resident & (since == 0)] = now
            count = int(resident.sum())
            self.most = max(self.most, count * mmap.PAGESIZE)
            if count > self._limit:
                # Pages that came together go together; those that just came may not be read yet.
                last = np.partition(since[resident], count - self._limit)[count - self._limit]
                evict(self._path, stretches(resident & (since <= min(last, now - 1))))

    def __enter__(self) -> SmallPageCache:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self.join()


def stretches(pages: Any) -> list[tuple[int, int]]:
    """Where pages that are set stand side by side: (first byte, last byte + 1)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], pages, [False]]))) * mmap.PAGESIZE
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def read_from_disk() -> int | None:
    """Bytes that this process has had read from disks; None where the system does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def read_around(path: Path) -> str:
    device = os.stat(path).st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        return f"{int(setting.read_text()):,} KiB"
    except (OSError, ValueError):
        return "some KiB"


CASES = [
    Case(
        "h5_memory",
        "Does a random order cost more than a sequential one, where the file is in memory?",
        f"a full shuffle's CPU and wall <= {BAR_RANDOM:g} times sequential's; the slowest first "
        f"batch of each order <= {BAR_FIRST * 1e3:.0f} ms after iter()",
        in_memory,
    ),
    Case(
        "h5_disk",
        "How fast is a cache read from a disk, in which order?",
        "with a page cache of a quarter of the file, a full shuffle and BlockShuffle read <= "
        f"{BAR_READ:g} times the file, and are >= {BAR_SPEED:g} times as fast as np.memmap's",
        from_disk,
    ),
]
