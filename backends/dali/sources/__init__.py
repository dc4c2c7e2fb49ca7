"""A dataset read as images by index and what its samples have beside them, to feed a graph.

    ImageFolder, Food101, ..., encoded() and target()   files.py    encoded files
    MNIST, CIFAR10, SVHN, ...                           arrays.py   pixels in memory
    CachedDataset                                       cached.py   a column of a cache
    Subset, ConcatDataset, random_split of these        nested.py
    anything else with a transform                      opaque.py   its own code decodes it:
                                                        recorder.py, recordings.py, streams.py

`source_for` proves on a few samples that the dataset's own come out, in the process in which the
dataset is observed; `read_source` makes the same source here, without reading any.
"""

from __future__ import annotations

from typing import Any

from dataloaders.cache import CachedDataset
from dataloaders.datasets.files import source_of
from dataloaders.datasets.nested import is_own, is_read_as, read_nested

from .arrays import array_source
from .cached import cached_source
from .files import FileSource
from .nested import Part, row_of
from .proof import proved
from .source import Failed, Found, Image, Source

__all__ = ["Failed", "Found", "Image", "Source", "read_source", "source_for"]


def source_for(dataset: Any) -> Source | str:
    """The images of ``dataset``; or what stands in the way and what to do, in words.

    Reads up to four samples, on this thread; random states are then what they were.
    """
    found = read_source(dataset)
    try:
        if isinstance(found, str) or not len(found):
            return found
        return proved(dataset, found) or found
    except Exception as error:  # a dataset may be anything
        return _unread(dataset, error)


def read_source(dataset: Any) -> Source | str:
    """The same without reading a sample: what it gives is not proved."""
    try:
        return read_nested(dataset, _read, part=Part, row=row_of)
    except Exception as error:  # a dataset may be anything
        return _unread(dataset, error)


def _unread(dataset: Any, error: Exception) -> str:
    return f"{type(dataset).__name__} could not be read ({type(error).__name__}: {error})"


def _read(dataset: Any) -> Source | str:
    if not is_own(dataset):
        if is_read_as(dataset, CachedDataset):
            return cached_source(dataset)
        if hasattr(dataset, "data") or hasattr(dataset, "_samples"):
            array = array_source(dataset)
            if array is not None:
                return array
    files = source_of(dataset)
    return files if isinstance(files, str) else FileSource(files)
