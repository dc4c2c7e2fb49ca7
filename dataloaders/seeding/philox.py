"""Draw random numbers as a pure function of where they are used: no state, in any order.

    (seed, epoch) ──one Philox block──> 64-bit key  ┐
    (index, occurrence, draw) ────> 128-bit counter ┴─ Philox4x32-10 ──> four words

A sample's draws depend only on its own five numbers, so they are the same in any worker, batch,
rank or backend, and those of a whole batch are made at once.

Philox4x32-10 is from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011). NumPy's generator of that name is another one, of 64-bit words.
"""

from __future__ import annotations

import functools
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

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
# The keys of the two blocks that make keys; any constants will do ("data", "load" and "wide").
_KEY_OF_STREAM = (0x64617461, 0x6C6F6164)
_KEY_OF_WIDE = (0x77696465, 0x6C6F6164)

_Words: TypeAlias = tuple[int, int, int, int]


def words(
    seed: int, epoch: int, index: npt.ArrayLike, occurrence: npt.ArrayLike = 0, draw: int = 0
) -> npt.NDArray[np.uint32]:
    """Return uint32 [n, 4]: `words_of` for n indices and their occurrences, below 2**32."""
    indices = np.atleast_1d(index).astype(np.uint64)
    counter = (
        indices & np.uint64(_MASK32),
        indices >> np.uint64(32),
        np.full_like(indices, occurrence),
        np.full_like(indices, draw),
    )
    result = _rounds(counter, _stream_key(seed & _MASK64, epoch & _MASK64))
    return np.stack(result, axis=-1).astype(np.uint32)


def words_of(seed: int, epoch: int, index: int, occurrence: int = 0, draw: int = 0) -> _Words:
    """Return 128 random bits, four ints below 2**32; all numbers count modulo 2**64.

    The five 64-bit values become one 128-bit counter and one 64-bit key. The low half of the
    counter is ``index``; its high half is the low 32 bits of ``occurrence`` and of ``draw``. The
    key is half a Philox block of the counter (seed, epoch). If the upper 32 bits of ``occurrence``
    or ``draw`` are not zero, one more block mixes them into the key. So within one (seed, epoch),
    two tuples with occurrence and draw below 2**32 never share a counter, and two keys are equal
    with probability 2**-64.
    """
    key = _stream_key(seed & _MASK64, epoch & _MASK64)
    occurrence_high, draw_high = (occurrence >> 32) & _MASK32, (draw >> 32) & _MASK32
    if occurrence_high or draw_high:
        key = _rounds((*key, occurrence_high, draw_high), _KEY_OF_WIDE)[:2]
    counter = (index & _MASK32, (index >> 32) & _MASK32, occurrence & _MASK32, draw & _MASK32)
    return _rounds(counter, key)  # type: ignore[no-any-return]


def stable_key(key: object) -> int:
    """Return an int in [-2**63, 2**63) for a sampler's ``key``, the same in every process.

    Integers that fit (Python's, NumPy's, tensors with one integer: whatever has ``__index__``)
    stand for themselves. Strings, bytes, None, floats, larger integers, arrays and any nesting of
    these in tuples, lists, sets and dicts are hashed (blake2b of a canonical encoding; a list
    counts as the tuple of its members). Other objects are hashed by type name and ``repr``.

    Raises:
        TypeError: the ``repr`` of an object contains its address, which changes from run to run.
    """
    if type(key) is int:
        value = key
    else:
        try:
            value = operator.index(key)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return _digest(_encode(key))
    return value if -(2**63) <= value < 2**63 else _digest(_encode(value))


def _rounds(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> Any:
    """Compute ten rounds on ints, or on uint64 arrays, that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = _MULTIPLIERS
    w0, w1 = _WEYL
    for _ in range(_ROUNDS):
        product0, product1 = c0 * m0, c2 * m1
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK32
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = (k0 + w0) & _MASK32, (k1 + w1) & _MASK32
    return c0, c1, c2, c3


@functools.lru_cache(maxsize=64)
def _stream_key(seed: int, epoch: int) -> tuple[int, int]:
    counter = (seed & _MASK32, seed >> 32, epoch & _MASK32, epoch >> 32)
    return _rounds(counter, _KEY_OF_STREAM)[:2]  # type: ignore[no-any-return]


def _digest(encoded: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little", signed=True)


_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def _encode(key: object) -> bytes:
    """Encode a key, so that different keys differ: a letter for the type, a length, the content."""
    if key is None:
        return b"n"
    if isinstance(key, str):
        return _framed(b"s", key.encode("utf-8", "surrogatepass"))
    if isinstance(key, (bytes, bytearray)):
        return _framed(b"b", bytes(key))
    if isinstance(key, (float, np.floating)):
        # One encoding for -0.0 and 0.0, and one for every NaN.
        number = float(key)
        return b"f" + (b"nan" if number != number else struct.pack("<d", number + 0.0))
    if isinstance(key, complex):
        return b"c" + struct.pack("<dd", key.real + 0.0, key.imag + 0.0)
    if isinstance(key, (tuple, list)):
        return _framed(b"t", b"".join(map(_encode, key)), len(key))
    if isinstance(key, Mapping):
        items = sorted(_encode(name) + _encode(value) for name, value in key.items())
        return _framed(b"m", b"".join(items), len(items))
    if isinstance(key, Set):
        members = sorted(map(_encode, key))
        return _framed(b"u", b"".join(members), len(members))
    try:
        return _framed(b"i", str(operator.index(key)).encode())  # type: ignore[arg-type]
    except (TypeError, ValueError):
        pass  # not one integer
    if hasattr(key, "__array__"):
        array = np.asarray(key)
        if array.dtype.kind != "O":
            shape = ",".join(map(str, array.shape))
            return _framed(b"a" + f"{array.dtype.str}({shape})".encode(), array.tobytes())
        return _encode(array.tolist())
    text = repr(key)
    if type(key).__repr__ is object.__repr__ or _ADDRESS.search(text):
        raise TypeError(
            f"a sampler's key {text} shows only its address, which changes from run to run, so "
            "seed= cannot tie random numbers to it; give its class a __repr__ of its content, "
            "or let the sampler yield ints, strings or tuples"
        )
    name = f"{type(key).__module__}.{type(key).__qualname__}"
    return _framed(b"r", f"{name}:{text}".encode("utf-8", "surrogatepass"))


def _framed(kind: bytes, content: bytes, count: int | None = None) -> bytes:
    return kind + str(len(content) if count is None else count).encode() + b":" + content
