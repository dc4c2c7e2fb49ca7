"""Store the deterministic part of a dataset's samples, computed once, in one HDF5 file.

    dataset ──cut──> head ──workers──> chunks ──assemble──> train.h5 ──map──> rows ──> tail

    build.py     precompute(), from study to file    cut.py        head and tail of a Compose
    rows.py      samples -> chunks, in workers       study.py      a few samples, read before
    reading.py   one sample -> cells                 seeds.py      generators: seeded, drawn from
    crew.py      these workers, and their ends       folder.py     what a build has so far
    journal.py   which chunks are finished           lock.py       one builder at a time
    syncing.py   chunks reach the disk meanwhile     sizes.py      which chunk begins where
    heap.py      of a worker: keeps freed memory     advice.py     said before images are kept large
    sample.py    a sample: structure and cells       cell.py       one leaf, and its bytes
    chunk.py     some rows as columns                layout.py     the columns of the whole file
    images.py    raw, encoded or packed          encoding.py    images -> encoded cells
    packed.py    a dataset's own files           decode.py      encoded cells -> images
    file.py      chunks -> the file                  hdf5.py       makes it HDF5
    about.py     what it says besides its rows       attributes.py classes and class_to_idx
    laying.py    the file without its values         putting.py    values -> their places
    filling.py   values, checksums, index            placing.py    values written once
    index.py     where values stand, without HDF5    block.py      what is in front of the HDF5
    entries.py   places, columns, shards             entry_checks.py  the same, of anybody's file
    fields.py    JSON of anybody, field by field     checksums.py  of every block of the file
    compress.py  what compress= may be               codecs/       zstd and Blosc, piece by piece
    pack.py      values -> pieces, in threads        pieces.py     pieces -> values
    reader.py    CachedDataset                       columns.py    the leaves of one column
    verification.py  finds any flipped bit           disk.py       room, sync, sizes
    estimation.py  size and time, before it starts   fingerprint.py what it is made of
    progress.py  how far a build is
    shards.py    the files of a joined cache         joined.py     the columns of one
    ranks.py     those who build shards meet         joining.py    shards -> one cache
    merge.py     the columns of shards as one's      findings.py   of a study, in parts
    planes.py    the channels of PIL images
    printable.py what a file says, fit to be shown   changes.py    between fingerprints
    limits.py    what a row may take in memory   work.py         study or chunk, by the same workers

Neither h5py nor libhdf5 is needed to read: they are loaded when a cache is built.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dataloaders.errors import MissingDependency

if sys.platform == "win32":
    raise MissingDependency(
        "dataloaders.cache, and with it backend='h5' and 'dali', needs fcntl and os.pread, which "
        "Windows lacks: use Linux, or backend='stock' or 'prefetch'"
    )

if TYPE_CHECKING:
    from dataloaders.cache.build import estimate, precompute
    from dataloaders.cache.compress import Compressed
    from dataloaders.cache.estimation import Estimate
    from dataloaders.cache.images import Encoded
    from dataloaders.cache.joining import join, merge
    from dataloaders.cache.progress import BuildProgress
    from dataloaders.cache.reader import CachedDataset
    from dataloaders.cache.verification import verify

__all__ = [
    "BuildProgress",
    "CachedDataset",
    "Compressed",
    "Encoded",
    "Estimate",
    "estimate",
    "join",
    "merge",
    "precompute",
    "verify",
]

_WHERE = {
    "BuildProgress": "progress",
    "CachedDataset": "reader",
    "Compressed": "compress",
    "Encoded": "images",
    "Estimate": "estimation",
    "estimate": "build",
    "join": "joining",
    "merge": "joining",
    "precompute": "build",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    # Reading a cache does not load what builds one. (No module here has the name of a function.)
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
