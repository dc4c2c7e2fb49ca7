"""Read a dataset's torchvision transforms: for the cache's cut, and for what h5 does to a batch.

    dataset ──find──> Compose ──read──> members: deterministic, random or opaque

    read.py        a Compose as a flat list of members, and which of them draw random numbers
    find.py        where a dataset holds its transforms, and a copy of it with others

Importing this package does not import torchvision: transforms are recognised by their class's name.
"""
