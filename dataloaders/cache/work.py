"""What the workers of a build do: parts of the study, and then chunks.

    Part(0, 2)      ──Study──> Findings
    Piece(job, 17)  ──Chunks──> Made

They are the same processes: to start others would take longer than the study does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataloaders.cache.rows import Chunks, Job
from dataloaders.cache.study import Study

__all__ = ["Part", "Piece", "Work"]


@dataclass(frozen=True)
class Part:
    """The ``number``-th of ``parts`` of the study; gives that number, too."""

    number: int
    parts: int


@dataclass(frozen=True)
class Piece:
    """A chunk of a job, by its number."""

    job: Job
    chunk: int


class Work:
    """Callable that does a `Part` or a `Piece`."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._job: Job | None = None
        self._chunks: Chunks | None = None

    def __call__(self, task: Part | Piece) -> Any:
        """(its number, the Findings), or the `Made` of the chunk."""
        if isinstance(task, Part):
            return task.number, self._study(task.number, task.parts)
        if self._chunks is None or task.job != self._job:
            self._job = task.job
            self._chunks = Chunks(task.job, self._study.cuts[task.job.choice])
        return self._chunks[task.chunk]
