"""Remember the length and transforms for which a session was opened; the user may change them.

dataset.transform = gentler        other objects       ┐
dataset.transform[0].size = 64     one of torchvision's │ noticed at the next iter(), as in
dataset.append(sample)             another length       ┘ torch, which reads the dataset anew
mine.strength = 2                  user code runs live, and is the same object: no change
"""

from __future__ import annotations

from typing import Any

from dataloaders.cache.sample.cut import equal_state
from dataloaders.transforms.find import find_chains

__all__ = ["Snapshot"]


class Snapshot:
    """The length and the transforms of ``dataset`` at this moment. Reads none of its samples."""

    def __init__(self, dataset: Any) -> None:
        self._length = len(dataset)
        members = [member for found in find_chains(dataset) for member in found.members]
        # The objects, not their ids: the id of a dead object may be given to another one.
        self._members = [member.transform for member in members]
        known = [member.transform for member in members if member.torchvision is not None]
        self._states = [equal_state(transform) for transform in known]

    def same_as(self, other: Snapshot) -> bool:
        """Whether what was opened for one of them serves the other."""
        return (
            self._length == other._length
            and len(self._members) == len(other._members)
            and all(one is two for one, two in zip(self._members, other._members, strict=True))
            and self._states == other._states
        )
