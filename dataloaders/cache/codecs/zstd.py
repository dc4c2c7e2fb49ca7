"""Zstandard, behind HDF5's own shuffle where a value has several bytes: small files.

A piece is one frame that says how long it is, as HDF5's filter 32015 writes it.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard

from dataloaders.cache.codecs.codec import Bytes, Codec, Filter, Undecodable, shuffled, unshuffled

__all__ = ["Zstd"]

_SHUFFLE, _ZSTD = 2, 32015
_SMALLEST_WINDOW = 1 << 10


class Zstd(Codec):
    """Zstandard, with an object a thread."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._own = threading.local()  # zstandard's objects must not be shared by threads

    def filters(self, level: int, size: int) -> tuple[Filter, ...]:
        """HDF5's own shuffle, and the filter."""
        shuffle: tuple[Filter, ...] = () if self.width == 1 else ((_SHUFFLE, (self.width,)),)
        return (*shuffle, (_ZSTD, (level,)))

    def encode(self, piece: Bytes, level: int) -> bytes:
        """One frame, with the length of the piece in it."""
        compressor = getattr(self._own, "compressor", None)
        if compressor is None or self._own.level != level:
            compressor = self._own.compressor = zstandard.ZstdCompressor(level=level)
            self._own.level = level
        encoded: bytes = compressor.compress(shuffled(piece, self.width).data)
        return encoded

    def decode(self, data: Bytes, size: int) -> Bytes:
        """The piece in the frame; see `Codec.decode`."""
        decompressor = getattr(self._own, "decompressor", None)
        if decompressor is None:
            decompressor = self._own.decompressor = zstandard.ZstdDecompressor()
        try:
            frame = zstandard.get_frame_parameters(data.data)
            # Before anything is allocated: both are what the frame says, and zstandard believes it.
            if frame.content_size != size:
                raise Undecodable(f"its frame has {frame.content_size} bytes")
            if frame.window_size > max(size, _SMALLEST_WINDOW):
                raise Undecodable(f"its frame needs a window of {frame.window_size} bytes")
            found = decompressor.decompress(data.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Undecodable(str(error)) from error
        if len(found) != size:
            raise Undecodable(f"its frame has {len(found)} bytes")
        return unshuffled(np.frombuffer(found, np.uint8), self.width)
