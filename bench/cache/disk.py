"""How fast is a cache read in random order: from memory, and from a disk?"""

from __future__ import annotations

import mmap
import statistics
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from backends.h5 import H5
from bench.cache.read import Photos
from bench.harness import (
    Result,
    Samples,
    Scale,
    case,
    exhaust,
    interleave,
    timing_headings,
    timing_rows,
)
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute
from dataloaders.machine.page_cache import evict, resident_pages
from dataloaders.samplers import BlockShuffle

BAR_RANDOM, BAR_FIRST = 1.10, 0.050
BAR_READ, BAR_SPEED = 1.10, 2.0
POLL = 0.004
MEMMAP, SMALL = "full shuffle of np.memmap", "1/4 of the file"


def as_memmap(cached: CachedDataset) -> Samples:
    """Return the same rows of the same file, read as np.memmap: one missing page at a time."""
    images, labels = (cached.column(entry.name) for entry in cached.columns)
    row = lambda index: (torch.from_numpy(images[index].copy()), int(labels[index]))  # noqa: E731
    return Samples(row, len(images))


class Cached(NamedTuple):
    """A finished cache and the loaders over it, by the order in which they read."""

    path: Path
    rows: CachedDataset
    batch: int
    loaders: dict[str, Any]


def built(folder: Path, scale: Scale, length: int, window: float | None = None) -> Cached:
    """Build a cache of ``length`` images; ``window``: of BlockShuffle, as a share of the file."""
    from torchvision.transforms import v2

    length, batch = scale.pick(length, 24), scale.pick(64, 4)
    dataset = Photos(length, scale.pick(full=256, tiny=16), v2.Compose([v2.PILToTensor()]))
    path = folder / "photos.h5"
    precompute(dataset, path, single_file=True)
    rows, h5 = CachedDataset(path), H5(path, build="never")
    share = None if window is None else max(1, int(window * path.stat().st_size / rows.row_bytes))
    sampler = BlockShuffle(rows, window=share, seed=0)
    loaders = {
        "sequential": DataLoader(dataset, batch, backend=h5),
        "full shuffle": DataLoader(dataset, batch, shuffle=True, backend=h5),
        "BlockShuffle": DataLoader(dataset, batch, sampler=sampler, backend=h5),
    }
    return Cached(path, rows, batch, loaders)


@case(
    f"a full shuffle's CPU and wall <= {BAR_RANDOM:g} times sequential's; the slowest first "
    f"batch of each order <= {BAR_FIRST * 1e3:.0f} ms after iter()",
    one_thread=True,
)
def h5_memory(scale: Scale, folder: Path) -> Result:
    """Does a random order cost more than a sequential one, where the file is in memory?"""
    cached = built(folder, scale, 2000)
    timings = interleave(cached.loaders, exhaust, rounds=scale.pick(full=11, tiny=1))
    firsts = {
        name: [first_batch(loader) * 1e3 for _ in range(scale.pick(full=15, tiny=2))]
        for name, loader in cached.loaders.items()
    }
    base, full = timings["sequential"], timings["full shuffle"]
    ratios = [full.ratio(base, clock).median for clock in ("cpu", "wall")]
    slowest = max(max(each) for each in firsts.values())
    rows = timing_rows(timings, 1000 / len(cached.rows), "sequential")
    return Result(
        (*timing_headings("sequential"), "first batch, ms", "slowest first, ms"),
        tuple(
            (*row, statistics.median(each), max(each))
            for row, each in zip(rows, firsts.values(), strict=True)
        ),
        max(ratios) <= BAR_RANDOM and slowest <= BAR_FIRST * 1e3,
        (
            f"{len(cached.rows)} images of {cached.rows.row_bytes:,.0f} bytes in the page cache, "
            f"batches of {cached.batch}, backend h5 without workers, uint8 as they are kept.",
            f"Full shuffle / sequential: CPU {ratios[0]:.3f}, wall {ratios[1]:.3f}.",
            "First batch: from iter() to the first batch, of an epoch that is not the loader's "
            "first one.",
        ),
    )


class Run(NamedTuple):
    """One epoch from disk: seconds, bytes."""

    first: float
    seconds: float
    read: int
    most_resident: int


@case(
    "with a page cache of a quarter of the file, a full shuffle and BlockShuffle read <= "
    f"{BAR_READ:g} times the file, and are >= {BAR_SPEED:g} times as fast as np.memmap's",
    one_thread=True,
)
def h5_disk(scale: Scale, folder: Path) -> Result:
    """How fast is a cache read from a disk, in which order?"""
    cached = built(folder, scale, 2600, window=1 / 8)
    path, length, loaders = cached.path, len(cached.rows), cached.loaders
    size = path.stat().st_size
    # In a map of its own: BlockShuffle has the kernel read only the pages that are asked for.
    memmap = as_memmap(CachedDataset(path))
    loaders[MEMMAP] = torch.utils.data.DataLoader(memmap, cached.batch, shuffle=True)
    for loader in loaders.values():
        exhaust(loader)  # opened and proved; what is read for that is not an epoch's
    evict(path)
    if resident_pages(path).any():
        note = f"The files in {folder.parent} cannot leave memory (tmpfs?): set TMPDIR to a disk."
        return Result(("order",), tuple((name,) for name in loaders), None, (note,))
    caches = {"unlimited": size + mmap.PAGESIZE, SMALL: size // 4}
    runs: dict[tuple[str, str], list[Run]] = {(c, n): [] for c in caches for n in loaders}
    for turn in range(scale.pick(full=5, tiny=1)):
        for room, limit in caches.items():
            for name in list(loaders)[:: 1 if turn % 2 else -1]:
                runs[room, name].append(epoch(path, loaders[name], limit))
    rows = []
    for (room, name), of in runs.items():
        seconds = statistics.median(run.seconds for run in of)
        read = statistics.median(run.read for run in of)
        rates = sorted(length / run.seconds for run in of)
        rows.append(
            (
                f"{name}, {room}",
                length / seconds,
                f"{rates[0]:.4g} to {rates[-1]:.4g}",
                read / seconds / 1e6,
                read / size,
                max(run.most_resident for run in of) / 1e6,
                statistics.median(run.first for run in of) * 1e3,
            )
        )
    met, notes = True, []
    for name in ("full shuffle", "BlockShuffle"):
        pairs = zip(runs[SMALL, name], runs[SMALL, MEMMAP], strict=True)
        faster = [theirs.seconds / ours.seconds for ours, theirs in pairs]
        read = statistics.median(run.read / size for run in runs[SMALL, name])
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
            f"{length} images of {cached.rows.row_bytes:,.0f} bytes, {size / 1e6:.0f} MB; batches "
            f"of {cached.batch}, backend h5 without workers. BlockShuffle: a window of an eighth "
            "of the file. Before each epoch the file is unmapped and evicted.",
            f"{SMALL}: a model of a small page cache. Every {POLL * 1e3:.0f} ms a thread evicts "
            "the pages that have been there the longest, used or not, beyond that size; a real one "
            "keeps pages that are used again, which no page is within an epoch.",
            "How much the kernel reads around a missing page is a setting of the machine; a disk's "
            "speed varies: compare rows, not machines.",
            *notes,
        ),
    )


def first_batch(loader: Any) -> float:
    """Return the seconds from iter() to the first batch."""
    began = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - began


def epoch(path: Path, loader: Any, limit: int) -> Run:
    """Run one epoch, with the file evicted before, in a page cache of ``limit`` bytes."""
    evict(path)
    with SmallPageCache(path, limit) as held:
        read, began = read_from_disk(), time.perf_counter()
        batches = iter(loader)
        next(batches)
        first = time.perf_counter() - began
        exhaust(batches)
        seconds, read = time.perf_counter() - began, read_from_disk() - read
    return Run(first, seconds, read, held.most)


class SmallPageCache(threading.Thread):
    """While entered, keeps at most ``limit`` bytes of the file in memory, the newest pages."""

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
                # Pages that came together go together; the newest may not have been read yet.
                last = np.partition(since[resident], count - self._limit)[count - self._limit]
                evict(self._path, stretches(resident & (since <= min(last, now - 1))))

    def __enter__(self) -> SmallPageCache:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self.join()


def stretches(pages: Any) -> list[tuple[int, int]]:
    """Return runs of set pages, in bytes: (first, length)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], pages, [False]]))) * mmap.PAGESIZE
    first, last = edges[::2], edges[1::2]
    return list(zip(first.tolist(), (last - first).tolist(), strict=True))


def read_from_disk() -> int:
    """Return the bytes that this process has had read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
