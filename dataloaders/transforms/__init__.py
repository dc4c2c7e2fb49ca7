"""Read a dataset's torchvision transforms: for the cache's cut, and for what h5 draws for a batch.

    dataset ──find──> Compose ──read──> members: deterministic, random or opaque
                                           ├─trailing──> ToTensor, Normalize: bytes become floats
                                           └─operators──> crops, flips, resizes: drawn for a batch

    kinds.py       which torchvision transforms are known, and which of them draw random numbers
    read.py        a Compose as a flat list of members, each with its place and kind
    find.py        where a dataset holds its transforms, and a copy of it with others
    trailing.py    the trailing members that work value by value
    draws.py       the random numbers of torch for each sample of a batch at once
    operators.py   crops, flips and resizes that draw for a batch
    actions.py     what they draw: which samples, which numbers; done to one image by torchvision

Importing this package does not import torchvision: transforms are recognised by their class's name.
"""

from __future__ import annotations

from dataloaders.transforms.read import Kind, Member, read

__all__ = ["Kind", "Member", "read"]
