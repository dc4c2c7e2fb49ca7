"""Draw random bits as a pure function of where they are used: no state, in any order.

    (seed, epoch, index, occurrence, draw) ──BLAKE2b──> 128 bits, four words

A sample's bits depend only on its own five numbers, so they are the same in any worker, batch, rank
or backend.
"""

from __future__ import annotations

import hashlib
import operator
import re
import struct
from collections.abc import Mapping, Set
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FIRST_RESERVED_DRAW = 2**32 - 16
"""Draws from here to 2**32 - 1 seed samplers, workers and user code; the rest is free."""

Words: TypeAlias = tuple[int, int, int, int]
"""128 random bits: four ints below 2**32."""

_MASK64 = 0xFFFFFFFFFFFFFFFF
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def words_of(seed: int, epoch: int, index: int, occurrence: int = 0, draw: int = 0) -> Words:
    """Return 128 random bits for these numbers, which count modulo 2**64."""
    numbers = [number & _MASK64 for number in (seed, epoch, index, occurrence, draw)]
    digest = hashlib.blake2b(struct.pack("<5Q", *numbers), digest_size=16).digest()
    a, b, c, d = struct.unpack("<4I", digest)
    return a, b, c, d


def words(
    seed: int, epoch: int, index: npt.ArrayLike, occurrence: npt.ArrayLike = 0, draw: int = 0
) -> npt.NDArray[np.uint32]:
    """Return uint32 [n, 4]: `words_of` for n indices and their occurrences, below 2**63."""
    pairs = np.broadcast(np.atleast_1d(index), occurrence)
    made = [words_of(seed, epoch, int(one), int(other), draw) for one, other in pairs]
    return np.array(made, np.uint32).reshape(-1, 4)


def stable_key(key: object) -> int:
    """Return an int in [-2**63, 2**63) for a sampler's ``key``, the same in every process.

    Integers that fit (Python's, NumPy's, tensors with one integer: whatever has ``__index__``)
    stand for themselves. Other keys are hashed by their ``repr``, and tuples, lists, sets, dicts,
    arrays and tensors by those of their members.

    Raises:
        TypeError: the ``repr`` of an object contains its address, which changes from run to run.
    """
    try:
        value = operator.index(key)  # type: ignore[arg-type]
        if -(2**63) <= value < 2**63:
            return value
    except (TypeError, ValueError):
        pass
    text = _text(key).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _text(key: Any) -> str:
    """Return a text of ``key`` that differs where keys differ."""
    if hasattr(key, "tolist"):  # an array or a tensor
        key = key.tolist()
    if isinstance(key, (tuple, list)):
        return f"({','.join(map(_text, key))})"
    if isinstance(key, Mapping):
        key = key.items()
    if isinstance(key, Set):
        return f"{{{','.join(sorted(map(_text, key)))}}}"
    text = repr(key)
    if not isinstance(key, (str, bytes)) and _ADDRESS.search(text):
        raise TypeError(
            f"a sampler's key {text} shows only its address, which changes from run to run, so "
            "seed= cannot tie random numbers to it; give its class a __repr__ of its content, "
            "or let the sampler yield ints, strings or tuples"
        )
    return text
