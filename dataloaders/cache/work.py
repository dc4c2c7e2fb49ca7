"""What the workers of a build do: parts of the study, and then chunks.

    Part(0, 2)      ──Study──> Findings
    Piece(job, 17)  ──Chunks──> Made

They are the same processes: others would have to be started, and to warm up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataloaders.cache.crew import Crew
from dataloaders.cache.findings import Findings, merged
from dataloaders.cache.rows import Chunks, Job
from dataloaders.cache.study import Study

__all__ = ["Piece", "Work", "studied_by"]


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


def studied_by(crew: Crew, study: Study, workers: int) -> Findings:
    """What ``study`` finds, by up to so many workers, who stay; 0: in this process."""
    if not workers:
        return study()
    for parts in (min(workers, study.parts), 1):
        crew.hire(parts)
        studied = crew.answers(
            [Part(number, parts) for number in range(parts)],
            named=lambda _: "the few samples that show what there is to build",
        )
        # In whatever order they come: as they are numbered, so that it is the same always.
        found = merged([each for _, each in sorted(studied, key=lambda each: each[0])])
        if found is not None:
            break
    assert found is not None  # one part agrees with itself
    return found
