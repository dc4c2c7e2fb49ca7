"""Codecs of compressed columns, by name: the bytes of a piece into fewer, and back.

    values ──> piece ──Codec.encode──> bytes in the file ──Codec.decode──> piece ──> values

    codec.py    what a codec is, and shuffling      zstd.py     Zstandard, shuffled
                                                    blosc.py    Blosc: LZ4, shuffled

What is encoded is what HDF5's filter of that name makes, so that the HDF5 library reads it, and
nothing of that library is needed to decode it.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from dataloaders.cache.codecs.codec import Codec
from dataloaders.errors import MissingDependency

__all__ = ["CODECS", "LEVELS", "Codec", "codec_of", "refuse_missing"]

CODECS = {
    "zstd": ("zstd:Zstd", "zstandard"),
    "blosc": ("blosc:Blosc", "lz4"),
}
"""A codec's name, to its module and class, and to the package that it stands on."""

LEVELS = {"zstd": (range(1, 23), 3), "blosc": (range(1, 10), 9)}
"""The levels that a codec has, and the one that it is used with."""

_INSTALL = "install it with: pip install 'gpu-dataloaders[compressed]'"


def codec_of(name: str, width: int) -> Codec:
    """The codec of this name, for values of so many bytes.

    Raises:
        MissingDependency: its package is not installed.
    """
    target, package = CODECS[name]
    module, _, kind = target.partition(":")
    try:
        found: type[Codec] = getattr(importlib.import_module(f"{__name__}.{module}"), kind)
    except ImportError as error:
        raise MissingDependency(
            f"columns compressed with {name} need {package}, which cannot be imported ({error}); "
            f"{_INSTALL}"
        ) from error
    return found(width)


def refuse_missing(name: str) -> None:
    """Nothing if all that compressing takes is installed.

    Raises:
        MissingDependency: something is not.
    """
    for package in ("h5py", "hdf5plugin", CODECS[name][1]):
        if find_spec(package) is None:
            raise MissingDependency(
                f"building a cache with compress={name!r} needs {package}, which is not installed; "
                f"{_INSTALL}"
            )
