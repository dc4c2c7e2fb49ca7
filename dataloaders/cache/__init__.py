"""Store the deterministic part of a dataset's samples, computed once, in HDF5 files.

    dataset ──cut──> head ──workers──> train.parts/00000.h5 ... ──> train.h5 ──map──> rows ──> tail

    sample/   what a sample consists of: a structure and leaves; images; which transforms are kept
    format/   the bytes of a file: HDF5, the sealed index in front, checksums, compression
    build/    precompute(): from a dataset to parts, and from parts to one cache
    read/     CachedDataset: from a mapped file to samples; verify()

    sample <── format <── read <── build

Neither h5py nor libhdf5 is needed to read: they are loaded when a cache is written.
"""

from __future__ import annotations

import sys

from dataloaders.errors import MissingDependency

if sys.platform == "win32":
    raise MissingDependency(
        "dataloaders.cache, and with it backend='h5' and 'dali', needs fcntl and os.pread, which "
        "Windows lacks: use Linux, or backend='stock' or 'prefetch'"
    )

from dataloaders.cache.build.builder import estimate, precompute
from dataloaders.cache.build.estimation import Estimate
from dataloaders.cache.build.joining import merge
from dataloaders.cache.build.progress import BuildProgress
from dataloaders.cache.format.compress import Compressed
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cache.read.verification import verify
from dataloaders.cache.sample.images import Encoded

__all__ = [
    "BuildProgress",
    "CachedDataset",
    "Compressed",
    "Encoded",
    "Estimate",
    "estimate",
    "merge",
    "precompute",
    "verify",
]
