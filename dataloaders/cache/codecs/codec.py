"""What a codec does with the bytes of one piece; it holds no state that threads would share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Bytes", "Codec", "Filter", "Undecodable", "shuffled", "unshuffled"]

Bytes: TypeAlias = npt.NDArray[np.uint8]

Filter: TypeAlias = tuple[int, tuple[int, ...]]
"""HDF5's number of a filter, and its parameters."""


class Undecodable(Exception):
    """What is wrong with the bytes of a piece."""


class Codec(ABC):
    """Encodes and decodes pieces, in any thread.

    Args:
        width: bytes of a value.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    @abstractmethod
    def filters(self, level: int, size: int) -> tuple[Filter, ...]:
        """HDF5's filters that do the same, in the order in which they encode.

        Args:
            level: that `encode` is given.
            size: bytes of a piece.
        """

    @abstractmethod
    def encode(self, piece: Bytes, level: int) -> bytes:
        """What stands in the file; always the same for the same bytes."""

    @abstractmethod
    def decode(self, data: Bytes, size: int) -> Bytes:
        """The piece of ``size`` bytes that ``data`` was made of. It must not be written to.

        ``data`` may be anything: no more than a piece is ever allocated.

        Raises:
            Undecodable: it is no such piece.
        """


def shuffled(piece: Bytes, width: int) -> Bytes:
    """The first bytes of all values, then their second ones, and so on: alike stands by alike."""
    return piece if width == 1 else np.ascontiguousarray(piece.reshape(-1, width).T).reshape(-1)


def unshuffled(piece: Bytes, width: int) -> Bytes:
    """What `shuffled` was given."""
    if width == 1:
        return piece
    planes = piece.reshape(width, -1)
    values = np.empty((planes.shape[1], width), np.uint8)
    for number, plane in enumerate(planes):  # several times as fast as copying the transpose
        values[:, number] = plane
    values.flags.writeable = False
    return values.reshape(-1)
