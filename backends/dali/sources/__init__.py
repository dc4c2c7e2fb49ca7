"""A dataset read as images by index and what its samples have beside them, to feed a graph.

    ImageFolder, Food101, ..., encoded() and target()   files.py    encoded files
    MNIST, CIFAR10, SVHN, ...                           arrays.py   pixels in memory
    CachedDataset                                       cached.py   a column of a cache
    Subset, ConcatDataset, random_split of these        nested.py
    anything else with a transform                      opaque.py   its own code decodes it:
                                                        recorder.py, recordings.py, streams.py

`source_for` proves on a few samples that the dataset's own come out.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, Subset

from dataloaders.cache import CachedDataset
from dataloaders.encoded import gets_many_as, source_of

from .arrays import array_source
from .cached import cached_source
from .files import FileSource
from .nested import Part, row_of
from .proof import proved
from .source import Failed, Found, Image, Source

__all__ = ["Failed", "Found", "Image", "Source", "source_for"]


def source_for(dataset: Any) -> Source | str:
    """The images of ``dataset``; or what stands in the way and what to do, in words.

    Reads up to four samples, on this thread; random states are then what they were.
    """
    try:
        found = _found(dataset)
        if isinstance(found, str) or not len(found):
            return found
        return proved(dataset, found) or found
    except Exception as error:  # a dataset may be anything
        return f"{type(dataset).__name__} could not be read ({type(error).__name__}: {error})"


def _found(dataset: Any) -> Source | str:
    kind = type(dataset)
    getitem = getattr(kind, "__getitem__", None)
    if getitem is Subset.__getitem__ and gets_many_as(kind, Subset):
        inner = _found(dataset.dataset)
        return inner if isinstance(inner, str) else Part(inner, dataset.indices)
    if getitem is ConcatDataset.__getitem__ and gets_many_as(kind, ConcatDataset):
        sources = []
        for each in dataset.datasets:
            source = _found(each)
            if isinstance(source, str):
                return source
            sources.append(source)
        return row_of(sources)
    if getitem is CachedDataset.__getitem__ and gets_many_as(kind, CachedDataset):
        return cached_source(dataset)
    if hasattr(dataset, "data") or hasattr(dataset, "_samples"):
        array = array_source(dataset)
        if array is not None:
            return array
    files = source_of(dataset)
    return files if isinstance(files, str) else FileSource(files)
