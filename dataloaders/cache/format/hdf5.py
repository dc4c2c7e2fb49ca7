"""Make the HDF5 file around a cache's values: names, types and places.

h5py allocates the datasets and says where they begin; the values are then written at these places
as into any file. Pieces of compressed datasets are handed to HDF5 as its own filters would make
them. A virtual dataset has its values in the parts beside the file.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from dataloaders.cache.format.entries import Extent
from dataloaders.errors import CacheError, MissingDependency

__all__ = ["Chunked", "Dataset", "Source", "refuse_no_h5py", "write_hdf5"]

_ALIGNMENT, _CHUNK_ALIGNMENT = 4096, 64
_UNALIGNED = 2048  # bytes up to which a dataset is not worth a page of its own


class Source(NamedTuple):
    """A dataset of another file, a piece of a virtual one.

    Attributes:
        file: its path from the folder of the virtual dataset's file.
        path: of the dataset in it.
        shape: of the dataset.
        first: the number of its first value, or row, in the whole.
    """

    file: str
    path: str
    shape: tuple[int, ...]
    first: int


class Chunked(NamedTuple):
    """How a dataset is compressed.

    Attributes:
        shape: of a chunk.
        filters: HDF5's numbers and parameters, in the order in which they encode.
        chunks: gives each chunk's bytes, and whether they went through the filters.
    """

    shape: tuple[int, ...]
    filters: tuple[tuple[int, tuple[int, ...]], ...]
    chunks: Callable[[], Iterable[tuple[bytes, bool]]]


@dataclass(frozen=True)
class Dataset:
    """One dataset that is to be made.

    Attributes:
        dtype: of its values, as NumPy writes it.
        shape: of it.
        chunked: how it is compressed; None: it is contiguous.
        sources: where its values are; None: here.
    """

    dtype: str
    shape: tuple[int, ...]
    chunked: Chunked | None = None
    sources: tuple[Source, ...] | None = None


def write_hdf5(
    path: Path,
    user_block: int,
    datasets: Mapping[str, Dataset],
    attributes: Mapping[str, Mapping[str, str | int]],
) -> tuple[dict[str, Extent], dict[str, list[tuple[int, int]]]]:
    """Make the file; return each contiguous dataset's place, and each chunk's place and length.

    Args:
        path: of the file; one that is there is replaced.
        user_block: bytes left free in front of it.
        datasets: by their paths in the file.
        attributes: of groups and datasets by their path, "/" included.

    Raises:
        CacheError: it cannot be written.
        MissingDependency: h5py is not installed.
    """
    refuse_no_h5py()
    import h5py  # type: ignore[import-untyped]

    places, chunks = {}, {}
    is_chunked = any(each.chunked is not None for each in datasets.values())
    with _our_errors(h5py, path):
        path.unlink(missing_ok=True)  # who has the old file mapped keeps it
        with h5py.File(
            path,
            "w",
            libver=("earliest", "v110"),
            alignment_threshold=_UNALIGNED,
            alignment_interval=_CHUNK_ALIGNMENT if is_chunked else _ALIGNMENT,
            locking=False,  # some network file systems refuse locks
            userblock_size=user_block,
        ) as file:
            for name, each in datasets.items():
                made = _made(h5py, file, name, each)
                if each.chunked is not None:
                    chunks[name] = _written(made, each.chunked)
                elif each.sources is None:
                    size = int(np.prod(each.shape, dtype=np.uint64))
                    places[name] = Extent(int(made.get_offset()) if size else 0, size)
            for name, pairs in attributes.items():
                for key, value in pairs.items():
                    file[name].attrs[key] = (
                        np.bytes_(value.encode()) if isinstance(value, str) else np.uint64(value)
                    )
    return places, chunks


def _made(h5py: ModuleType, file: Any, name: str, dataset: Dataset) -> Any:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    created.set_obj_track_times(False)
    space = h5py.h5s.create_simple(dataset.shape)
    if dataset.sources is not None:
        for source in dataset.sources:
            flat = len(dataset.shape) == 1
            count = (int(np.prod(source.shape, dtype=np.uint64)),) if flat else source.shape
            space.select_hyperslab((source.first, *[0] * (len(count) - 1)), count)
            of = h5py.h5s.create_simple(source.shape)
            created.set_virtual(space, _verbatim(source.file), _verbatim(source.path), of)
        space.select_all()
    elif dataset.chunked is not None:
        created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        created.set_chunk(dataset.chunked.shape)
        for number, values in dataset.chunked.filters:
            created.set_filter(number, h5py.h5z.FLAG_OPTIONAL, values)
    else:
        created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        created.set_layout(h5py.h5d.CONTIGUOUS)
        created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # so that it has a place at once
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    kind = h5py.h5t.py_create(np.dtype(dataset.dtype), logical=True)
    return h5py.h5d.create(file.id, name.encode(), kind, space, created, links)


def _written(dataset: Any, chunked: Chunked) -> list[tuple[int, int]]:
    """Write the chunks; return where each begins, and how long it is."""
    step, as_it_is = chunked.shape[0], (1 << len(chunked.filters)) - 1  # a bit for each filter
    lengths: dict[int, tuple[int, int]] = {}
    for number, (data, encoded) in enumerate(chunked.chunks()):
        place = (number * step,) + (0,) * (len(chunked.shape) - 1)
        dataset.write_direct_chunk(place, data, 0 if encoded else as_it_is)

    def note(chunk: Any) -> None:
        lengths[chunk.chunk_offset[0] // step] = chunk.byte_offset, chunk.size

    dataset.chunk_iter(note)
    return [lengths[number] for number in sorted(lengths)]


def _verbatim(name: str) -> bytes:
    """``name`` as HDF5 takes it where %b would stand for a number."""
    return name.replace("%", "%%").encode()


@contextmanager
def _our_errors(h5py: ModuleType, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        # HDF5 tells the system's number of an error in its text only.
        found = re.search(r"\berrno = (\d+)", str(error))
        number = getattr(error, "errno", None) or (found and int(found[1]))
        if number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise OSError(number, os.strerror(number)) from error  # as of any other write
        raise CacheError(
            f"the cache {path} cannot be written by HDF5 {h5py.version.hdf5_version}: {reason}"
        ) from error


def refuse_no_h5py() -> None:
    """Nothing if h5py is installed.

    Raises:
        MissingDependency: it is not.
    """
    try:
        import h5py  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"building a cache needs h5py, which cannot be imported ({error}); install it with: "
            "pip install 'gpu-dataloaders[h5]'"
        ) from error
