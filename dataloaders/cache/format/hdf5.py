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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
    sources: Sequence[Source] = (),
    **how: Any,
) -> Any:
    """Make a dataset without values, and return h5py's low-level object for it.

    It is virtual if it has ``sources``; chunked as `create_dataset` takes ``how``; else contiguous,
    at a place of its own.
    """
    import h5py

    if sources:
        layout = h5py.VirtualLayout(shape, dtype)
        layout.dcpl.set_obj_track_times(False)
        for source in sources:
            count = math.prod(source.shape) if len(shape) == 1 else source.shape[0]
            names = _verbatim(source.file), _verbatim(source.path)
            layout[source.first : source.first + count] = h5py.VirtualSource(*names, source.shape)
        made = file.create_virtual_dataset(None, layout)
    else:
        created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        if not how:
            created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # so that it has a place at once
        made = file.create_dataset(None, shape, dtype, track_times=False, dcpl=created, **how)
    # One by one: else h5py declares the dataset's name ASCII, and HDF5 those of new groups.
    *groups, own = name.strip("/").split("/")
    for group in groups:
        file = file.require_group(group)
    file[own] = made
    return made.id


def _verbatim(name: str) -> str:
    """Return ``name`` as HDF5 takes it where %b would stand for a number."""
    return name.replace("%", "%%")


def refuse_no_h5py() -> None:
    """Raise MissingDependency if h5py is not installed."""
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"building a cache needs h5py, which cannot be imported ({error}); install it with: "
            "pip install 'gpu-dataloaders[h5]'"
        ) from error
