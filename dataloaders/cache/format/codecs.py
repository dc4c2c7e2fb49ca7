"""Compress and decompress chunks of a column, as HDF5's own filters do: shuffle, then zstd or gzip.

    values ──Codec.encode──> bytes in the file ──Codec.decode──> values

HDF5's own library reads what is encoded (zstd with hdf5plugin), and is not needed to decode it.
Whatever is decoded, no more than a chunk is allocated.
"""

from __future__ import annotations

import threading
import zlib
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dataloaders.errors import MissingDependency
from dataloaders.options import option

Bytes: TypeAlias = npt.NDArray[np.uint8]

CODECS = ("zstd", "gzip")

_ZSTD = 32015  # HDF5's number of the filter
_SMALLEST_WINDOW = 1 << 10

_own = threading.local()  # each thread's zstd context: a new one takes 5 to 10 us a piece


class Undecodable(Exception):
    """What is wrong with the bytes of a chunk."""


def refuse_missing(name: str) -> None:
    """Raise MissingDependency if a package that this codec takes is not installed."""
    if name == "zstd" and find_spec("zstandard") is None:
        raise MissingDependency(
            "columns compressed with zstd need zstandard, which is not installed; install it with: "
            "pip install 'gpu-dataloaders[compressed]', or build with "
            f"{option('compress', 'gzip')}"
        )


class Codec:
    """zstd or gzip, after HDF5's shuffle where a value has several bytes (``width``)."""

    def __init__(self, name: str, width: int) -> None:
        refuse_missing(name)
        self._name, self._width = name, width

    def filters(self, level: int) -> dict[str, Any]:
        """Return the filters of HDF5 that do the same, as h5py's `create_dataset` takes them."""
        own = {"compression": "gzip", "compression_opts": level}
        if self._name == "zstd":  # which this HDF5 need not have
            own = {"compression": _ZSTD, "compression_opts": (level,), "allow_unknown_filter": True}
        return {"shuffle": self._width > 1, **own}

    def encode(self, chunk: Bytes, level: int) -> bytes:
        """Return what stands in the file; always the same for the same bytes."""
        if self._width > 1:  # the first bytes of all values, then their second ones, and so on
            chunk = np.ascontiguousarray(chunk.reshape(-1, self._width).T).reshape(-1)
        if self._name == "gzip":
            return zlib.compress(chunk.data, level)
        import zstandard

        return bytes(zstandard.ZstdCompressor(level=level).compress(chunk.data))

    def decode(self, data: Bytes, size: int) -> Bytes:
        """Return the chunk of ``size`` bytes that ``data`` was made of, not to be written to."""
        found = _gunzipped(data, size) if self._name == "gzip" else _unpacked(data, size)
        if len(found) != size:
            raise Undecodable(f"it has {len(found)} bytes")
        chunk = np.frombuffer(found, np.uint8)
        if self._width == 1:
            return chunk
        planes = chunk.reshape(self._width, -1)
        values = np.empty((planes.shape[1], self._width), np.uint8)
        for number, plane in enumerate(planes):  # several times as fast as copying the transpose
            values[:, number] = plane
        values.flags.writeable = False
        return values.reshape(-1)


def _unpacked(data: Bytes, size: int) -> bytes:
    import zstandard

    try:
        frame = zstandard.get_frame_parameters(data.data)
        # Before anything is allocated: zstandard believes what the frame says.
        if frame.content_size != size:
            raise Undecodable(f"its frame has {frame.content_size} bytes")
        if frame.window_size > max(size, _SMALLEST_WINDOW):
            raise Undecodable(f"its frame needs a window of {frame.window_size} bytes")
        if not hasattr(_own, "decompressor"):
            _own.decompressor = zstandard.ZstdDecompressor()
        found: bytes = _own.decompressor.decompress(data.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Undecodable(str(error)) from error
    return found


def _gunzipped(data: Bytes, size: int) -> bytes:
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(data.data, size)
        more = b"" if reader.eof else reader.decompress(reader.unconsumed_tail, 1)
    except zlib.error as error:
        raise Undecodable(str(error)) from error
    if more or not reader.eof or reader.unused_data:
        raise Undecodable(f"it does not end after {size} bytes")
    return found
