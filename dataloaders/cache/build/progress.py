"""How far a build is, as ``progress=`` is called with it, and in one line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dataloaders.cache.build.parts import Part, missing_in
from dataloaders.cache.format.disk import size_of


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

    def __str__(self) -> str:
        rate, left, doing = self.samples_per_second, self.seconds_left, str(self.phase)
        whole = f" of about {size_of(self.bytes_expected)}" if self.bytes_expected else ""
        if self.waiting:
            doing = "waiting for the process that builds it"
        return (
            f"{doing}  {self.samples_done:,} of {self.samples:,} samples"
            f"{f', {rate:,.0f}/s' if rate else ''}, {size_of(self.bytes_done)}{whole}"
            f"{f', {self.failed} left out' if self.failed else ''}"
            f"{'' if left is None else f', {left:,.0f} s left'}"
        )


class Pace:
    """How fast a build of these samples is, from when this call began; ``now``: how far it is.

    ``expected`` are the bytes of all its samples; 0: not known. ``before`` are the parts that were
    there.
    """

    def __init__(self, samples: range, expected: int = 0, before: Sequence[Part] = ()) -> None:
        self._started = time.monotonic()
        self._before = len(samples) - sum(map(len, missing_in(samples, before)))
        failed = sum(part.failed for part in before)
        size = sum(part.index.file_bytes for part in before)
        self.now = BuildProgress(
            "compute", False, len(samples), self._before, failed, size, expected, 0.0, None, None
        )

    def computing(self, part: Part) -> BuildProgress:
        """Return the progress of the phase that reads samples, with this part more."""
        seconds = time.monotonic() - self._started
        done = self.now.samples_done + len(part.samples)
        rate = (done - self._before) / max(seconds, 1e-9) or None
        self.now = replace(
            self.now,
            samples_done=done,
            failed=self.now.failed + part.failed,
            bytes_done=self.now.bytes_done + part.index.file_bytes,
            seconds=seconds,
            samples_per_second=rate,
            seconds_left=rate and (self.now.samples - done) / rate,
        )
        return self.now

    def assembling(self, done: int, whole: int) -> BuildProgress:
        """Return the progress of the phase that makes the file."""
        seconds = time.monotonic() - self._started
        return replace(
            self.now,
            phase="assemble",
            bytes_done=done,
            bytes_expected=whole,
            seconds=seconds,
            seconds_left=seconds * (whole - done) / done if done else None,
        )
