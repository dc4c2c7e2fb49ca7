"""How far a build is, as it tells whoever asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dataloaders.cache.build.parts import Part

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
        shards_left: the ranks that this one waits for.
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


class Pace:
    """How fast a build is, from when this call began.

    Args:
        samples: of the build.
        expected: bytes of it; 0: not known.
    """

    def __init__(self, samples: int, expected: int) -> None:
        self._started = time.monotonic()
        self._before: int | None = None
        self._told = BuildProgress("compute", False, samples, 0, 0, 0, expected, 0.0, None, None)

    def computing(self, parts: Sequence[Part]) -> BuildProgress:
        """Return the progress of the phase that reads samples, with these parts more."""
        seconds = time.monotonic() - self._started
        done = self._told.samples_done + sum(len(part.samples) for part in parts)
        if self._before is None:
            self._before = done
        made = done - self._before
        rate = made / seconds if made and seconds else None
        self._told = replace(
            self._told,
            samples_done=done,
            failed=self._told.failed + sum(part.failed for part in parts),
            bytes_done=self._told.bytes_done + sum(part.index.file_bytes for part in parts),
            seconds=seconds,
            samples_per_second=rate,
            seconds_left=(self._told.samples - done) / rate if rate else None,
        )
        return self._told

    def assembling(self, done: int, whole: int) -> BuildProgress:
        """Return the progress of the phase that makes the file."""
        seconds, done = time.monotonic() - self._started, min(done, whole)
        return replace(
            self._told,
            phase="assemble",
            bytes_done=done,
            bytes_expected=whole,
            seconds=seconds,
            seconds_left=seconds * (whole - done) / done if done else None,
        )
