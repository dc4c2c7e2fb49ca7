"""What a session was opened for: a dataset's length and transforms, which its owner may change.

dataset.transform = gentler        other objects       ┐
dataset.transform[0].size = 64     one of torchvision's │ noticed at the next iter(), as torch
dataset.append(sample)             another length       ┘ does, which reads the dataset anew
mine.strength = 2                  code of one's own is run live, and is the same object: nothing
"""

from __future__ import annotations

from typing import Any

from dataloaders.cache.cut import equal_state
from dataloaders.transforms.find import find_chains

__all__ = ["Settled"]


class Settled:
    """The length and the transforms of ``dataset`` as they are now; reads none of its samples."""

    def __init__(self, dataset: Any) -> None:
        self._length = len(dataset)
        members = [member for found in find_chains(dataset) for member in found.members]
        # Kept, not their ids: what is gone leaves its id to others.
        self._members = [member.transform for member in members]
        known = [member.transform for member in members if member.torchvision is not None]
        self._states = [equal_state(transform) for transform in known]

    def is_as(self, other: Settled) -> bool:
        """Whether what was opened for one of them serves the other."""
        return (
            self._length == other._length
            and len(self._members) == len(other._members)
            and all(one is two for one, two in zip(self._members, other._members, strict=True))
            and self._states == other._states
        )
