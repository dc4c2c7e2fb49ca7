"""What a build will take, and whether the disk has room for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from dataloaders.cache.format.disk import size_of
from dataloaders.errors import CacheError

_SURE = 0.9  # of the estimate: a few samples tell the mean of rows that vary about so well


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
