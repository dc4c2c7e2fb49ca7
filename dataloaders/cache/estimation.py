"""What a build will take, from the few samples that were read before it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from dataloaders.cache.chunking import Chunking
from dataloaders.cache.disk import free_bytes, size_of
from dataloaders.cache.findings import Findings
from dataloaders.cache.rows import BYTES_PER_CELL, PART_BYTES
from dataloaders.errors import CacheError

__all__ = ["Estimate", "chunking_for", "estimate_of", "refuse_small_disk", "workers_for"]

_CHUNK_BYTES = 32 << 20
_CHUNK_SECONDS = 5.0
_CHUNKS_PER_WORKER = 16
_SHORT_CHUNK_SECONDS = 0.2  # that another worker waits so long at the end is little
_SMALLER = 4  # times, the last chunks
_BYTES_PER_WORKER = 4 * PART_BYTES + (300 << 20)
_FEW_SECONDS = 2.0
_NEARLY_ALL = 0.98  # of the bytes that are written once


@dataclass(frozen=True)
class Estimate:
    """What a build will take.

    Attributes:
        samples: the number of samples in the dataset.
        bytes: the size of the finished file.
        low_bytes: a size that it will hardly fall below: ``bytes`` minus two standard errors.
        seconds: the time of the phase that reads the samples, with these workers.
        disk_needed: the peak number of bytes on the disk: the file, and again what is kept in
            chunks until the file is made (small columns, and large ones except the largest whose
            rows are of several shapes).
        disk_free: bytes that can be written there now.
        num_workers: processes that read samples; 0: only this one.
        rows: samples in a chunk, which is what each worker loses on an interruption.
        advice: why rows are larger than they need to be, and what to do; "" if they are not.
    """

    samples: int
    bytes: int
    low_bytes: int
    seconds: float
    disk_needed: int
    disk_free: int
    num_workers: int
    rows: int
    advice: str = ""

    @property
    def low_needed(self) -> float:
        """Bytes of disk, at once, that it will hardly do with fewer of."""
        return self.disk_needed / max(1, self.bytes) * self.low_bytes

    def __str__(self) -> str:
        by = "this process"
        if self.num_workers:
            by = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        told = (
            f"{self.samples:,} samples, about {size_of(self.bytes)} and "
            f"{timedelta(seconds=max(1, round(self.seconds)))} with {by}"
        )
        if self.disk_needed > self.bytes:
            told += f"; {size_of(self.disk_needed)} while it is built"
        return f"{told}; {size_of(self.disk_free)} are free"


def workers_for(found: Findings, samples: int, *, cores: int, memory: int) -> int:
    """Workers for ``num_workers="auto"``: a core each, if there is work for them, and memory.

    Args:
        found: what the dataset is.
        samples: to be read.
        cores: that the build may use.
        memory: bytes that it may take.
    """
    if cores < 2 or samples * _seconds(found) < _FEW_SECONDS:
        return 0
    return max(1, min(cores, memory // _BYTES_PER_WORKER, samples))


def chunking_for(found: Findings, samples: int, num_workers: int) -> Chunking:
    """Chunks of about 32 MiB, 5 seconds, and enough of them for all workers; smaller at the end."""
    size = _mean(found.bytes) + BYTES_PER_CELL * found.cells
    seconds = max(1e-9, _seconds(found))
    each = samples / max(1, num_workers)
    fair = math.ceil(each / _CHUNKS_PER_WORKER)
    most = _CHUNK_BYTES / max(1.0, size)
    rows = max(1, int(min(fair, most, _CHUNK_SECONDS / seconds)))
    is_short = num_workers < 2 or rows * seconds < _SHORT_CHUNK_SECONDS
    return Chunking(samples, rows, rows if is_short else -(-rows // _SMALLER))


def estimate_of(
    found: Findings,
    folder: Path,
    *,
    samples: int,
    num_workers: int,
    cores: int,
    rows: int,
    placed: float,
    advice: str = "",
) -> Estimate:
    """What building in ``folder`` will take.

    Args:
        found: what the dataset is.
        folder: of the file.
        samples: to be read.
        num_workers: processes that read them.
        cores: that these may use.
        rows: of a chunk.
        placed: how much of it is written only once, from 0 to 1.
        advice: what would make it smaller.
    """
    again = 1 - placed if placed < _NEARLY_ALL else 0.0
    mean = _mean(found.bytes)
    spread = statistics.stdev(found.bytes) if len(found.bytes) > 1 else 0.0
    low = max(min(found.bytes, default=0), mean - 2 * spread / math.sqrt(max(1, len(found.bytes))))
    busy = max(1, min(num_workers, cores))
    return Estimate(
        samples=samples,
        bytes=round(mean * samples),
        low_bytes=round(low * samples),
        seconds=_seconds(found) * samples / busy,
        disk_needed=round((1 + again) * round(mean * samples)),
        disk_free=free_bytes(folder),
        num_workers=num_workers,
        rows=rows,
        advice=advice,
    )


def refuse_small_disk(
    estimate: Estimate, folder: Path, written: int, *, others: int = 0, ranks: int = 0
) -> None:
    """Nothing if there is room.

    Args:
        estimate: of this build.
        folder: that is written to.
        written: bytes that are there already.
        others: bytes that other ranks are still to write on the same disk.
        ranks: how many these are.

    Raises:
        CacheError: there is hardly room; says how much is needed and how much is free.
    """
    needed = round(estimate.low_needed) - written + others
    if needed > estimate.disk_free:
        meanwhile = ""
        times = estimate.disk_needed / max(1, estimate.bytes)
        if times > 1:
            meanwhile = f", and {times:.2g} times that while the file is made of its parts"
        beside = f", of which {size_of(others)} for {ranks} other ranks," if others else ""
        raise CacheError(
            f"{estimate.samples} samples will take about {size_of(estimate.bytes)}{meanwhile}: "
            f"{size_of(max(needed, 0))} more are needed{beside} and "
            f"{size_of(estimate.disk_free)} are free in {folder}; make room, give a path on "
            "another disk, or keep smaller samples (Resize and CenterCrop in the transform, uint8)"
        )


def _seconds(found: Findings) -> float:
    """Of one row: the median, without the first, which imports and opens things."""
    return statistics.median(found.seconds[1:] or found.seconds or [0.0])


def _mean(values: list[int]) -> float:
    return statistics.fmean(values) if values else 0.0
