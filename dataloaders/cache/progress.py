"""How far a build is, as it tells whoever asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BuildProgress"]


@dataclass(frozen=True)
class BuildProgress:
    """How far a build is.

    Attributes:
        phase: "compute" while samples are read; "assemble" while the file is made of them.
        waiting: whether another process or thread builds, and this one waits for its file.
        samples: of the dataset; 0 where a builder that is waited for has not said yet.
        samples_done: of these, finished and safe on the disk.
        failed: of these, left out since reading them failed.
        bytes_done: written, in this phase.
        bytes_expected: in all, in this phase; an estimate while phase is "compute", 0 unknown.
        seconds: since this call began this phase.
        samples_per_second: in this call; None before the first ones are finished.
        seconds_left: until the end of this phase at this rate; None where it is not known.
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
