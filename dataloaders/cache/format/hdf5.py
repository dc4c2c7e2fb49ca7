"""Make the HDF5 file around a cache's values: names, types and places.

h5py allocates the datasets and says where they begin; the values are then written at these places
as into any file. Pieces of compressed datasets are handed to HDF5 as its own filters would make
them. A virtual dataset has its values in the parts beside the file.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dataloaders.errors import CacheError, MissingDependency

_ALIGNMENT, _CHUNK_ALIGNMENT = 4096, 64
_UNALIGNED = 2048  # bytes up to which a dataset is not worth a page of its own


class Source(NamedTuple):
    """A dataset of another file, a piece of a virtual one."""

    file: str  # its path from the folder of the virtual dataset's file
    path: str  # of the dataset in it
    shape: tuple[int, ...]
    first: int  # the number of its first value, or row, in the whole


@contextmanager
def hdf5_file(path: Path, user_block: int, *, has_chunks: bool) -> Iterator[Any]:
    """Give the h5py.File of a new file with a ``user_block`` of so many bytes, and close it.

    Raises CacheError, but for a full disk OSError, as of any other write.
    """
    refuse_no_h5py()
    import h5py  # type: ignore[import-untyped]

    try:
        path.unlink(missing_ok=True)  # who has the old file mapped keeps it
        with h5py.File(
            path,
            "w",
            libver=("earliest", "v110"),
            alignment_threshold=_UNALIGNED,
            alignment_interval=_CHUNK_ALIGNMENT if has_chunks else _ALIGNMENT,
            locking=False,  # some network file systems refuse locks
            userblock_size=user_block,
        ) as file:
            yield file
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        # HDF5 has the system's error number in its text only.
        found = re.search(r"\berrno = (\d+)", str(error))
        number = getattr(error, "errno", None) or (found and int(found[1]))
        if number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise OSError(number, os.strerror(number)) from error
        raise CacheError(
            f"the cache {path} cannot be written by HDF5 {h5py.version.hdf5_version}: {reason}"
        ) from error


def dataset(
    file: Any,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    *,
    sources: Sequence[Source] = (),
    chunk: tuple[int, ...] = (),
    filters: Iterable[tuple[int, tuple[int, ...]]] = (),
) -> Any:
    """Make a dataset without values, and return h5py's low-level object for it.

    It is virtual if it has ``sources``; compressed if it has a ``chunk``, by the ``filters`` of
    these numbers and parameters; else contiguous, at a place of its own.
    """
    import h5py

    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_obj_track_times(False)
    space = h5py.h5s.create_simple(shape)
    for source in sources:
        count = (math.prod(source.shape),) if len(shape) == 1 else source.shape
        space.select_hyperslab((source.first, *[0] * (len(count) - 1)), count)
        of = h5py.h5s.create_simple(source.shape)
        created.set_virtual(space, _verbatim(source.file), _verbatim(source.path), of)
    space.select_all()
    if chunk:
        created.set_chunk(chunk)
        for number, values in filters:
            created.set_filter(number, h5py.h5z.FLAG_OPTIONAL, values)
    elif not sources:
        created.set_layout(h5py.h5d.CONTIGUOUS)
        created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # so that it has a place at once
    if not sources:
        created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    return h5py.h5d.create(file.id, name.encode(), kind, space, created, links)


def _verbatim(name: str) -> bytes:
    """Return ``name`` as HDF5 takes it where %b would stand for a number."""
    return name.replace("%", "%%").encode()


def refuse_no_h5py() -> None:
    """Raise MissingDependency if h5py is not installed."""
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"building a cache needs h5py, which cannot be imported ({error}); install it with: "
            "pip install 'gpu-dataloaders[h5]'"
        ) from error
