"""What a build will take, from the few samples that were read before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from dataloaders.cache.build.rows import PART_BYTES, PART_SECONDS
from dataloaders.cache.build.study import Findings
from dataloaders.cache.format.disk import size_of
from dataloaders.errors import CacheError

ONE_FILE_BYTES = 128 << 20
"""Parts that take less together are put into one file."""

_BYTES_PER_WORKER = 2 * PART_BYTES + (300 << 20)
_FEW_SECONDS = 2.0
_SURE = 0.9  # of the estimate: a few samples tell the mean of rows that vary about so well
_MOST_PARTS, _PART_SECONDS = 64, 1.0  # of what becomes one file


@dataclass(frozen=True)
class Estimate:
    """What a build will take.

    Attributes:
        samples: the number of samples in the dataset.
        bytes: the size of the finished cache, compressed as well as the samples that were read.
        seconds: the time of the phase that reads the samples, with these workers.
        disk_needed: the peak number of bytes on the disk: the cache, and where it becomes one file
            its parts as well.
        disk_free: bytes that can be written there now.
        num_workers: processes that read samples; 0: only this one.
        rows: samples in a part, which is what each worker loses on an interruption.
    """

    samples: int
    bytes: int
    seconds: float
    disk_needed: int
    disk_free: int
    num_workers: int
    rows: int

    def refuse_small_disk(self, samples: int, written: int, folder: Path) -> None:
        """Raise CacheError if so many samples do not fit, of which some bytes are there already."""
        needed = round(self.disk_needed / max(1, self.samples) * samples) - written
        if _SURE * needed <= self.disk_free:
            return
        copied = ", and twice that while its parts are copied into one file"
        raise CacheError(
            f"{self.samples} samples will take about {size_of(self.bytes)}"
            f"{copied if self.disk_needed > self.bytes else ''}: {size_of(needed)} more are needed"
            f"{' for all ranks' if samples > self.samples else ''} and "
            f"{size_of(self.disk_free)} are free in {folder}; make room, give a path on "
            "another disk, or keep smaller samples (Resize and CenterCrop in the transform, uint8)"
        )

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"
        peak = f"; {size_of(self.disk_needed)} while it is built"
        return (
            f"{self.samples:,} samples, about {size_of(self.bytes)} and "
            f"{timedelta(seconds=max(1, round(self.seconds)))} with "
            f"{workers if self.num_workers else 'this process'}"
            f"{peak if self.disk_needed > self.bytes else ''}"
            f"; {size_of(self.disk_free)} are free"
        )


def workers_for(found: Findings, samples: int, *, cores: int, memory: int) -> int:
    """Return how many workers "auto" is: one a core, if there is work for them, and memory.

    At least one: "auto" never opens the dataset's files in this process.
    """
    if samples * found.row_seconds < _FEW_SECONDS:
        return 1
    return max(1, min(cores, memory // _BYTES_PER_WORKER, samples))


def rows_of_part(found: Findings, samples: int, workers: int, one_file: bool) -> int:
    """Return the samples of a part: as many as fit into a worker's memory, and half a minute.

    Several parts are as many for each worker, so that no worker is left waiting for the last one.
    What becomes one file is made of more and smaller parts, so that all workers have some.
    """
    seconds = found.row_seconds
    rows = max(1, int(min(PART_BYTES / found.row_memory, PART_SECONDS / (seconds or 1e-9))))
    parts = math.ceil(samples / rows)
    if one_file:
        parts = max(parts, min(_MOST_PARTS, round(seconds * samples / _PART_SECONDS)))
    if parts > 1:
        parts = math.ceil(parts / max(1, workers)) * max(1, workers)
    return max(1, math.ceil(samples / max(1, parts)))
