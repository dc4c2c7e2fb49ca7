"""How far a build is, as it tells whoever asked."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from dataloaders.cache.journal import Record

__all__ = ["BuildProgress", "Pace"]


@dataclass(frozen=True)
class BuildProgress:
    """The progress of a build.

    Attributes:
        phase: "compute" while samples are read; "assemble" while the file is put together.
        waiting: whether another process or thread builds, and this one waits for its file.
        samples: the number of samples in the dataset, or in the shard; 0 while the builder that
            this call waits for has not said it.
        samples_done: samples that are finished and safe on the disk.
        failed: samples that were left out because reading them failed.
        bytes_done: bytes written in this phase.
        bytes_expected: all bytes of this phase; an estimate while phase is "compute", 0 unknown.
        seconds: the time since this call began this phase.
        samples_per_second: the rate of this call; None before the first samples are finished.
        seconds_left: the time until the end of this phase at this rate; None if unknown.
        shards_left: the shards of other ranks that this one waits for.
    """

    phase: Literal["compute", "assemble"]
    waiting: bool
    samples: int
    samples_done: int
    failed: int
    bytes_done: int
    bytes_expected: int
    seconds: float
    samples_per_second: float | None
    seconds_left: float | None
    shards_left: int = 0

    @classmethod
    def of_records(cls, records: Collection[Record], samples: int, seconds: float) -> BuildProgress:
        """Of the phase that reads samples: what these records say, and no more."""
        return cls(
            phase="compute",
            waiting=False,
            samples=samples,
            samples_done=sum(record.rows + len(record.failed) for record in records),
            failed=sum(len(record.failed) for record in records),
            bytes_done=sum(record.bytes + record.placed for record in records),
            bytes_expected=0,
            seconds=seconds,
            samples_per_second=None,
            seconds_left=None,
        )


class Pace:
    """How fast it goes, from when this call began; ``expected`` bytes in all."""

    def __init__(self, samples: int, expected: int) -> None:
        self._samples = samples
        self._expected = expected
        self._started = time.monotonic()
        self._before: int | None = None
        self._told = BuildProgress.of_records((), samples, 0.0)

    def computing(self, records: Collection[Record], *, more: bool = False) -> BuildProgress:
        """Of the phase that reads samples.

        Args:
            records: of all finished chunks.
            more: whether they are only those of chunks that were finished since this was last
                called; of many chunks, all would take long each time.
        """
        now = self._now(records)
        if more:
            now = replace(
                now,
                samples_done=self._told.samples_done + now.samples_done,
                failed=self._told.failed + now.failed,
                bytes_done=self._told.bytes_done + now.bytes_done,
            )
        self._told = now
        if self._before is None:
            self._before = now.samples_done
        made = now.samples_done - self._before
        rate = made / now.seconds if made and now.seconds else None
        left = (self._samples - now.samples_done) / rate if rate else None
        return replace(
            now, bytes_expected=self._expected, samples_per_second=rate, seconds_left=left
        )

    def assembling(self, done: int, whole: int) -> BuildProgress:
        """Of the phase that makes the file, of the chunks that `computing` was last told of."""
        seconds, done = time.monotonic() - self._started, min(done, whole)
        return replace(
            self._told,
            phase="assemble",
            bytes_done=done,
            bytes_expected=whole,
            seconds=seconds,
            seconds_left=seconds * (whole - done) / done if done else None,
        )

    def _now(self, records: Collection[Record]) -> BuildProgress:
        seconds = time.monotonic() - self._started
        return BuildProgress.of_records(records, self._samples, seconds)
