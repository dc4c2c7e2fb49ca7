"""The HDF5 file around the values: names, types and places.

h5py (and with it libhdf5) makes this skeleton, of datasets that have a place from the beginning
and are never filled. The values are then written at these places as into any file. Compressed
values are the exception: where a piece of them stands shows only when libhdf5 is handed it, ready
made. Reading a cache needs none of this.

A virtual dataset has no values of its own: HDF5 reads them from the files that it names, which
stand beside this one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataloaders.cache.codecs.codec import Filter
from dataloaders.cache.entries import Extent
from dataloaders.errors import CacheError, MissingDependency

__all__ = [
    "Chunked",
    "Datasets",
    "Piece",
    "PieceWriter",
    "Virtual",
    "add_dataset",
    "skeleton",
    "writing_pieces",
]

_ALIGNMENT = 4096
_PIECE_ALIGNMENT = 64
_UNALIGNED = 2048  # bytes up to which a dataset is not worth a page of its own

Datasets = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Chunked:
    """A dataset that is compressed in pieces.

    Attributes:
        shape: of a piece.
        filters: HDF5's, in the order in which they encode.
    """

    shape: tuple[int, ...]
    filters: tuple[Filter, ...]


class Piece(NamedTuple):
    """A dataset of another file, all of it.

    Attributes:
        file: its name, in the same folder.
        path: of the dataset in it.
        shape: of the dataset.
        first: where its first value, or row, stands in the whole.
    """

    file: str
    path: str
    shape: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class Virtual:
    """A dataset whose values stand in other files, one piece behind the other.

    Attributes:
        dtype: of its values.
        shape: of the whole; if it has one dimension, so have the pieces, whatever their shape is.
        pieces: where there are none, it has zeros.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def skeleton(
    path: str,
    datasets: Datasets,
    user_block: int,
    attributes: Mapping[str, Mapping[str, str | int]],
    chunked: Mapping[str, Chunked] | None = None,
    virtual: Mapping[str, Virtual] | None = None,
) -> dict[str, Extent]:
    """The places of the values of each dataset in the HDF5 file made at ``path``.

    Args:
        path: of the file; one that is there is replaced.
        datasets: path within the file to dtype and shape.
        user_block: bytes left free in front of it.
        attributes: of groups and datasets by their path, "/" included.
        chunked: those among the datasets that are compressed; they have no place yet.
        virtual: datasets that have no place, by their path.

    Raises:
        CacheError: it cannot be written.
        MissingDependency: h5py, or hdf5plugin for compressed datasets, is not installed.
    """
    h5py, chunked = _h5py(), chunked or {}
    if chunked:
        _have_filters()
    with _hdf5(h5py, path):
        # A file of its own: cutting the old one to nothing would kill whoever has it mapped.
        Path(path).unlink(missing_ok=True)
        with _open(h5py, path, "w", _ALIGNMENT, userblock_size=user_block) as file:
            places = {
                name: _create(h5py, file, name, dtype, shape, chunked.get(name))
                for name, (dtype, shape) in datasets.items()
            }
            for name, each in (virtual or {}).items():
                _create_virtual(h5py, file, name, each)
            for name, pairs in attributes.items():
                for key, value in pairs.items():
                    file[name].attrs[key] = (
                        np.bytes_(value.encode()) if isinstance(value, str) else np.uint64(value)
                    )
    return places


def add_dataset(path: str, name: str, dtype: str, shape: tuple[int, ...]) -> Extent:
    """The place of one more dataset in the file, which takes the place of one of its name.

    Raises:
        CacheError: it cannot be written.
    """
    h5py = _h5py()
    with _hdf5(h5py, path), _open(h5py, path, "r+", _ALIGNMENT) as file:
        if name in file:
            del file[name]
        return _create(h5py, file, name, dtype, shape, None)


class PieceWriter:
    """Hands pieces to a file that `skeleton` made; see `writing_pieces`."""

    def __init__(self, h5py: ModuleType, path: str, file: Any, names: Sequence[str]) -> None:
        self._h5py = h5py
        self._path = path
        self._datasets = {name: file[name].id for name in names}
        self._chunks = {name: file[name].chunks for name in names}
        self._as_it_is = {
            name: (1 << dataset.get_create_plist().get_nfilters()) - 1
            for name, dataset in self._datasets.items()
        }

    def write(self, name: str, number: int, data: bytes, *, encoded: bool) -> None:
        """Put a piece into the dataset: the one of this number along its first dimension."""
        chunk = self._chunks[name]
        place = (number * chunk[0],) + (0,) * (len(chunk) - 1)
        left_out = 0 if encoded else self._as_it_is[name]  # a bit for each filter
        with _hdf5(self._h5py, self._path):
            self._datasets[name].write_direct_chunk(place, data, left_out)

    def table(self, name: str) -> npt.NDArray[np.uint64]:
        """Each piece's place in the file, and its length."""
        dataset, step = self._datasets[name], self._chunks[name][0]
        found = np.zeros((-(-dataset.shape[0] // step), 2), "<u8")

        def note(chunk: Any) -> None:
            found[chunk.chunk_offset[0] // step] = chunk.byte_offset, chunk.size

        with _hdf5(self._h5py, self._path):
            dataset.chunk_iter(note)
        return found


@contextmanager
def writing_pieces(path: str, names: Sequence[str]) -> Iterator[PieceWriter]:
    """What writes pieces into these datasets of the file.

    Raises:
        CacheError: it cannot be written.
    """
    h5py = _h5py()
    with _hdf5(h5py, path):
        file = _open(h5py, path, "r+", _PIECE_ALIGNMENT)
        pieces = PieceWriter(h5py, path, file, names)
    try:
        yield pieces
    except BaseException:
        with suppress(Exception):  # a full disk is told once
            file.close()
        raise
    with _hdf5(h5py, path):
        file.close()


def _number_in(text: str) -> int | None:
    """The system's number of an error that HDF5 tells only in its text, if there is one."""
    found = re.search(r"\berrno = (\d+)", text)
    return None if found is None else int(found[1])


@contextmanager
def _hdf5(h5py: ModuleType, path: str) -> Iterator[None]:
    """Turn errors of HDF5 into ours."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        number = getattr(error, "errno", None) or _number_in(str(error))
        if number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            reason = f"{os.strerror(number)}; make room, or give a path elsewhere"
        raise CacheError(
            f"the cache {path} cannot be laid out by HDF5 {h5py.version.hdf5_version}: {reason}"
        ) from error


def _open(h5py: ModuleType, path: str, mode: str, interval: int, **options: Any) -> Any:
    return h5py.File(
        path,
        mode,
        libver=("earliest", "v110"),
        alignment_threshold=_UNALIGNED,
        alignment_interval=interval,
        locking=False,  # some network file systems refuse locks
        **options,
    )


def _create(
    h5py: ModuleType,
    file: Any,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    chunked: Chunked | None,
) -> Extent:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if chunked is None:
        created.set_layout(h5py.h5d.CONTIGUOUS)
        created.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    else:
        created.set_chunk(chunked.shape)
        for number, values in chunked.filters:
            created.set_filter(number, h5py.h5z.FLAG_OPTIONAL, values)
    created.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    dataset = _made(h5py, file, name, dtype, h5py.h5s.create_simple(shape), created)
    size = int(np.prod(shape, dtype=np.uint64))
    if chunked is not None:
        return Extent(0, size)
    offset = dataset.get_offset() if size else 0  # from the file's beginning, user block included
    return Extent(int(offset), size)


def _create_virtual(h5py: ModuleType, file: Any, name: str, virtual: Virtual) -> None:
    created = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    whole = h5py.h5s.create_simple(virtual.shape)
    for piece in virtual.pieces:
        flat = len(virtual.shape) == 1
        count = (int(np.prod(piece.shape, dtype=np.uint64)),) if flat else piece.shape
        whole.select_hyperslab((piece.first, *[0] * (len(count) - 1)), count)
        created.set_virtual(
            whole, _verbatim(piece.file), _verbatim(piece.path), h5py.h5s.create_simple(piece.shape)
        )
    whole.select_all()
    _made(h5py, file, name, virtual.dtype, whole, created)


def _verbatim(name: str) -> bytes:
    """``name`` as HDF5 takes it where %b would stand for a number."""
    return name.replace("%", "%%").encode()


def _made(h5py: ModuleType, file: Any, name: str, dtype: str, space: Any, created: Any) -> Any:
    created.set_obj_track_times(False)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    kind = h5py.h5t.py_create(np.dtype(dtype), logical=True)
    return h5py.h5d.create(file.id, name.encode(), kind, space, created, links)


def _have_filters() -> None:
    """Have libhdf5 know the filters: it writes their names into the file, if it knows them."""
    try:
        import hdf5plugin  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"compressing a cache needs hdf5plugin, which cannot be imported ({error}); install it "
            "with: pip install 'gpu-dataloaders[compressed]'"
        ) from error


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
