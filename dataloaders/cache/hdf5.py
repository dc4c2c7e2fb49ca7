"""The HDF5 file around the values: names, types and places, and not one value written.

h5py (and with it libhdf5) makes this skeleton, of datasets that have a place from the beginning
and are never filled. The values are then written at these places as into any file. Reading a
cache needs none of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dataloaders.cache.index import Extent
from dataloaders.errors import CacheError, MissingDependency

__all__ = ["skeleton"]

_ALIGNMENT = 4096
_UNALIGNED = 2048  # bytes up to which a dataset is not worth a page of its own

Datasets = Mapping[str, tuple[str, tuple[int, ...]]]


def skeleton(
    path: str,
    datasets: Datasets,
    user_block: int,
    attributes: Mapping[str, Mapping[str, str | int]],
) -> dict[str, Extent]:
    """The places of the values of each dataset in the HDF5 file made at ``path``.

    Args:
        path: of the file; one that is there is replaced.
        datasets: path within the file to dtype and shape.
        user_block: bytes left free in front of it.
        attributes: of groups and datasets by their path, "/" included.

    Raises:
        CacheError: it cannot be written.
        MissingDependency: h5py is not installed.
    """
    h5py = _h5py()
    try:
        # A file of its own: cutting the old one to nothing would kill whoever has it mapped.
        Path(path).unlink(missing_ok=True)
        with h5py.File(
            path,
            "w",
            libver=("earliest", "v110"),
            userblock_size=user_block,
            alignment_threshold=_UNALIGNED,
            alignment_interval=_ALIGNMENT,
            locking=False,  # some network file systems refuse locks
        ) as file:
            places = {
                name: _create(h5py, file, name, dtype, shape)
                for name, (dtype, shape) in datasets.items()
            }
            for name, pairs in attributes.items():
                for key, value in pairs.items():
                    file[name].attrs[key] = (
                        np.bytes_(value.encode()) if isinstance(value, str) else np.uint64(value)
                    )
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CacheError(
            f"the cache {path} cannot be laid out by HDF5 {h5py.version.hdf5_version}: {reason}"
        ) from error
    return places


def _create(h5py: ModuleType, file: Any, name: str, dtype: str, shape: tuple[int, ...]) -> Extent:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_layout(h5py.h5d.CONTIGUOUS)
    created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    created.set_obj_track_times(False)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    dataset = h5py.h5d.create(
        file.id,
        name.encode(),
        h5py.h5t.py_create(np.dtype(dtype), logical=True),
        h5py.h5s.create_simple(shape),
        created,
        links,
    )
    size = int(np.prod(shape, dtype=np.uint64))
    offset = dataset.get_offset() if size else 0  # from the file's beginning, user block included
    return Extent(int(offset), size)


def _h5py() -> ModuleType:
    try:
        import h5py  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependency(
            f"building a cache needs h5py, which cannot be imported ({error}); install it with: "
            "pip install h5py"
        ) from error
    module: ModuleType = h5py
    return module
