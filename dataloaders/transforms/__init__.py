"""A dataset's torchvision transforms, read as a plan, and the part of them that a device can do.

    dataset ──find──> Compose ──read──> members: deterministic, random or opaque
                                           └─trailing──> ToTensor, Normalize: once a batch, behind
                                                         the copy, if `proof` finds it equal

    read.py      a Compose as a flat list of members, each with its place and kind
    presets.py   the transforms of torchvision's weights, as the steps that they are
    kinds.py     which torchvision transforms are known, and which of them draw random numbers
    find.py      where a dataset holds its transforms, and a copy of it with others
    trailing.py  the trailing members that work pixel by pixel, and what stands in their place
    table.py     what those members make of each of the 256 bytes
    ways.py      the same values on a device: arithmetic if equal to the bit, else a lookup
    proof.py     samples of the dataset itself, read both ways and compared
    tail.py      all of it together: `device_tail`

torchvision is never imported here: its transforms are recognised by their class's name.
"""

from __future__ import annotations

from dataloaders.transforms.read import Kind, Member, read
from dataloaders.transforms.tail import NoTail, Tail, device_tail

__all__ = ["Kind", "Member", "NoTail", "Tail", "device_tail", "read"]
