"""Read a dataset's torchvision transforms, and find the part of them that a device can do.

    dataset ──find──> Compose ──read──> members: deterministic, random or opaque
                                           ├─trailing──> ToTensor, Normalize: once a batch, after
                                           │             the copy, if `proof` finds it equal
                                           └─operators──> crops, flips, resizes: drawn for a batch

    kinds.py       which torchvision transforms are known, and which of them draw random numbers
    read.py        a Compose as a flat list of members, each with its place and kind
    find.py        where a dataset holds its transforms, and a copy of it with others
    trailing.py    the trailing members that work pixel by pixel, and their replacement
    table.py       what those members make of each of the 256 bytes
    ways.py        the same values on a device: arithmetic if equal to the bit, else a lookup
    proof.py       samples of the dataset itself, read both ways and compared
    tail.py        all of it together: `device_tail`
    draws.py       the random numbers of torch for each sample of a batch at once
    operators.py   crops, flips and resizes that draw for a batch
    actions.py     what they draw: which samples, which numbers
    primitives/    the same done to one image, by torchvision

Importing this package does not import torchvision: transforms are recognised by their class's name.
"""

from __future__ import annotations

from dataloaders.transforms.read import Kind, Member, read
from dataloaders.transforms.tail import NoTail, Tail, device_tail

__all__ = ["Kind", "Member", "NoTail", "Tail", "device_tail", "read"]
