"""Blosc: LZ4 behind a shuffle, which decodes faster than Zstandard.

    version 2, LZ4 1, flags, width (a byte each), piece, block, all bytes (uint32 each),
    place of the block: 20, its length (uint32 each), LZ4

A piece is one block of one stream, which is among what Blosc 1 writes, and HDF5's filter 32001
reads. Packing it here and not in libblosc leaves LZ4 as all that ever sees a stranger's bytes, and
there are no threads, locks and settings of a whole process to get along with.
"""

from __future__ import annotations

import struct

import lz4.block
import numpy as np

from dataloaders.cache.codecs.codec import Bytes, Codec, Filter, Undecodable, shuffled, unshuffled

__all__ = ["Blosc"]

_BLOSC = 32001
_FILTER_REVISION, _FORMAT, _LZ4_CODE = 2, 2, 1
_VERSION, _LZ4_FORMAT = 2, 1
_SHUFFLED, _NOT_SPLIT, _LZ4 = 0x01, 0x10, 0x20
_HEAD = struct.Struct("<4B3I2I")
_BLOCK_AT = 20  # where a block's length stands, behind the header and the place of the only block


class Blosc(Codec):
    """Blosc 1 with LZ4 inside."""

    def filters(self, level: int, size: int) -> tuple[Filter, ...]:
        """The filter, which shuffles by itself."""
        shuffle = int(self.width > 1)
        values = (_FILTER_REVISION, _FORMAT, self.width, size, level, shuffle, _LZ4_CODE)
        return ((_BLOSC, values),)

    def encode(self, piece: Bytes, level: int) -> bytes:
        """A header and one block."""
        found = lz4.block.compress(
            shuffled(piece, self.width).data,
            mode="fast",
            acceleration=10 - level,  # as Blosc does
            store_size=False,
        )
        return self._head(piece.size, len(found)) + bytes(found)

    def decode(self, data: Bytes, size: int) -> Bytes:
        """The piece in the block; see `Codec.decode`."""
        length = data.size - _HEAD.size
        if length < 0 or data[: _HEAD.size].tobytes() != self._head(size, length):
            raise Undecodable("it does not begin as a Blosc buffer of one LZ4 block of its length")
        try:
            found = lz4.block.decompress(data[_HEAD.size :].data, uncompressed_size=size)
        except lz4.block.LZ4BlockError as error:
            raise Undecodable(str(error)) from error
        if len(found) != size:
            raise Undecodable(f"its block has {len(found)} bytes")
        return unshuffled(np.frombuffer(found, np.uint8), self.width)

    def _head(self, size: int, length: int) -> bytes:
        flags = _LZ4 | _NOT_SPLIT | (_SHUFFLED if self.width > 1 else 0)
        return _HEAD.pack(
            _VERSION, _LZ4_FORMAT, flags, self.width,
            size, size, _HEAD.size + length, _BLOCK_AT, length,
        )  # fmt: skip
