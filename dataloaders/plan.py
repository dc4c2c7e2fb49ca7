"""Describe what a backend will do with a loader, stage by stage, and where.

    sampler ──> fetch ──> decode ──> augment ──> collate ──> transfer ──> training step

``loader.explain()`` returns a `Plan`. Print it to see what runs where, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan", "Stage"]


@dataclass(frozen=True)
class Stage:
    """One stage of a batch's path.

    Attributes:
        name: sampler, fetch, decode, augment, collate or transfer.
        where: who does the work, such as "this process", "2 worker processes" or "cuda:0".
        how: what is done, in a few words.
        obstacle: why this stage does not run in a better place, and what to do about it; or None.
    """

    name: str
    where: str
    how: str
    obstacle: str | None = None


@dataclass(frozen=True)
class Plan:
    """How one backend serves one loader.

    Attributes:
        backend: the backend's name.
        stages: the stages, in the order in which a batch passes through them.
        delivers: where finished batches are, such as "cpu", "cpu (pinned)" or "cuda:0".
        obstacle: why the backend cannot serve this loader at all, and what to do; or None.
        notes: further facts worth knowing, one sentence each.
    """

    backend: str
    stages: tuple[Stage, ...] = ()
    delivers: str = "cpu"
    obstacle: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether the backend can serve the loader."""
        return self.obstacle is None

    def __str__(self) -> str:
        if self.obstacle is not None:
            return f"backend {self.backend!r} cannot serve this loader: {self.obstacle}"
        lines = [f"backend {self.backend!r}, batches delivered on {self.delivers}"]
        name_width = max((len(stage.name) for stage in self.stages), default=0)
        where_width = max((len(stage.where) for stage in self.stages), default=0)
        for stage in self.stages:
            lines.append(
                f"  {stage.name:<{name_width}}  {stage.where:<{where_width}}  {stage.how}".rstrip()
            )
            if stage.obstacle is not None:
                lines.append(f"  {'':<{name_width}}  {'':<{where_width}}  ! {stage.obstacle}")
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)
