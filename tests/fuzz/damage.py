"""Spoils caches: the index by its structure, arrays by their values, and bytes.

Most results have the digest and the length that they say, or are written by this package itself,
of leaves that no sample has: they are read.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dataloaders.cache.sample.leaf import Leaf
from dataloaders.errors import CacheError
from helpers.cached import DTYPES, build_of_leaves
from helpers.hostile import Whole

LARGEST = 1 << 17  # bytes of a file: small files are run often
_NUMBERS = (
    -1, 0, 1, 2, 3, 7, 8, 10, 11, 12, 16, 63, 64, 65, 255, 256, 4095, 4096, 4104, 2**31, 2**32,
    2**47, 2**48, 2**48 + 1, 2**52, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64, 10**30,
)  # fmt: skip
_SIZES = (0, 1, 2, 3, 4, 5, 60, 1 << 40)
_TEXTS = (
    "int", "float", "bool", "str", "none", "json", "array", "scalar", "tensor:float32", "image:L",
    "image:RGB", "encoded:PNG:RGB", "encoded:JPEG:P", "file:RGB", "encoded:PNG:P", "pickle", "|O",
    "tv_tensor:BoundingBoxes:uint8", "<U4", "|V8", "u1,f4", "<f16", *sorted(DTYPES), "dict",
    "list", "tuple", "namedtuple", "lambda", "_x", "../../x", "/etc/passwd", "a" * 300,
    "\x1b[2J\x1b]0;x\x07", "\ud800", "é\u202e", "x,y):0#", "[red]", "\0", "\n", "", " ", ".",
)  # fmt: skip
_ODD_BYTES = (b"[" * 2000, b"9" * 5000, b"NaN", b"1e999", b"\xff\xfe", b"\xed\xa0\x80", b'{"a":')


def raw(data: bytes, random: Random) -> bytes:
    """``data`` with a few bytes changed, inserted or deleted."""
    made = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at, other = (random.randrange(len(made) + 1) for _ in "ab")
        some = random.choice(_ODD_BYTES)[: random.choice((1, 4, 5000))]
        begin, end, new = random.choice([
            (at, at + 1, bytes([random.randrange(256)])),
            (at, at, some),
            (at, at + random.choice((1, 1, 8, 100)), b""),
            (at, at, made[other : other + random.randint(1, 40)]),
        ])  # fmt: skip
        made[begin:end] = new
    return bytes(made)


def damaged(data: bytes, random: Random) -> bytes:
    """Another cache; most have an index whose digest is right."""
    try:
        whole = Whole(data)
    except (ValueError, RecursionError, struct.error):
        return raw(data, random)
    kind = random.random()
    if kind < 0.03:
        return raw(data, random)
    if kind < 0.06:
        return data[: random.randrange(len(data) + 1)]
    if kind < 0.12:
        return whole.with_text(raw(whole.text, random))
    try:
        if kind < 0.3:
            for _ in range(random.choice((1, 1, 2, 3))):
                whole.fields = _changed(whole.fields, random)
        elif kind < 0.5:
            return _rebuilt(whole.fields, random)[:LARGEST]
        else:
            whole.body = _with_other_values(whole, random)
        return whole.with_fields(whole.fields)[:LARGEST]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
        return raw(data, random)  # what cannot be changed so
    except (CacheError, OSError):
        return raw(data, random)


# The index


def _value(random: Random) -> Any:
    kind = random.randrange(7)
    if kind < 3:
        return random.choice((*_NUMBERS, random.randrange(1 << random.choice((4, 8, 16, 40)))))
    if kind < 5:
        return random.choice(_TEXTS)
    if kind == 5:
        return random.choice((None, True, False, 0.5, float("inf"), float("nan"), -0.0, 1e300))
    deep: Any = [random.choice(_NUMBERS) for _ in range(random.randrange(4))]
    for _ in range(random.choice((0, 0, 1, 3, 70, 400))):
        deep = [deep] if random.random() < 0.5 else {random.choice(_TEXTS): deep}
    return deep


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in some JSON, with each of its keys."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _changed(value: Any, random: Random) -> Any:
    """Some JSON of which one place is another."""
    places = list(_places(value))
    if not places or random.random() < 0.01:
        return _value(random)
    (inner, key), (other, others) = random.choice(places), random.choice(places)
    kind = random.randrange(8)
    if kind == 0:
        del inner[key]
    elif kind == 1 and isinstance(inner, list):
        inner.insert(key, copy.deepcopy(random.choice((_value(random), inner[key]))))
    elif kind == 1:
        inner[random.choice(_TEXTS)] = _value(random)
    elif kind == 2:  # a part of the same document in another place
        inner[key] = copy.deepcopy(other[others])
    elif kind == 3 and isinstance(inner, dict):
        inner[random.choice(_TEXTS)] = inner.pop(key)
    elif kind == 4:
        name = random.choice(("list", "tuple", "dict", "namedtuple"))
        pair = [[random.choice(_TEXTS), inner[key]]]
        inside = {"dict": pair, "namedtuple": [random.choice(_TEXTS), pair]}
        inner[key] = {name: inside.get(name, [inner[key]])}
    elif kind == 5 and type(inner[key]) is int:
        inner[key] += random.choice((-9, -8, -1, 1, 2, 8, 9, 4096))
    else:
        inner[key] = _value(random)
    return value


def _rebuilt(fields: Any, random: Random) -> bytes:
    """A sound file of such leaves, in columns of other kinds, with other shapes and values."""
    columns = [random.choice(fields["columns"]) for _ in fields["columns"]]
    shapes = [_shape(column, random) if random.random() < 0.5 else None for column in columns]
    samples = []
    for _ in range(random.choice((1, 2, 5))):
        leaves = []
        for column, one in zip(columns, shapes, strict=True):
            kind, dimensions = random.choice(column["variants"])
            shape = _shape(column, random) if one is None else one
            values = np.zeros(shape[:dimensions], column["dtype"])
            if values.size:
                values = np.frombuffer(random.randbytes(values.nbytes), values.dtype)
            leaves.append(Leaf(kind, values.reshape(shape[:dimensions])))
        samples.append((fields["structure"], leaves))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.h5"
        with suppress(CacheError):  # the index is refused when it is read again
            build_of_leaves(path, samples)
        return path.read_bytes()


def _shape(column: Any, random: Random) -> list[int]:
    """A shape like that of the column, of a few values or, by its zeros, of none."""
    like = column["shape"] or [3] * max(of for _, of in column["variants"])
    shape = [random.choice((size, random.choice(_SIZES))) for size in like]
    return shape if 0 in shape or np.prod(shape) < 1 << 12 else [min(size, 3) for size in shape]


# The arrays


def _with_other_values(whole: Whole, random: Random) -> bytes:
    """The body, with one or more arrays changed."""
    body = bytearray(whole.body)
    if body and random.random() < 0.2:  # the pieces of compressed columns: anywhere
        for _ in range(random.randint(1, 6)):
            body[random.randrange(len(body))] = random.randrange(256)
        return bytes(body)
    for _ in range(random.choice((1, 1, 2, 4))):
        (offset, size), width = random.choice(list(_arrays(whole.fields)))
        begin, end = offset - whole.block, offset - whole.block + size * width
        if not 0 <= begin < end <= len(body):
            continue
        if width == 8 and random.random() < 0.8:
            # Sums of a few offsets are small: rows of such sizes are read, not only refused.
            values = np.frombuffer(bytes(body[begin:end]), "<u8").copy()
            at = random.randrange(len(values))
            values[at] = random.choice((*_NUMBERS[1:-2], int(values[at]) + 1)) % (1 << 64)
            if random.random() < 0.3:
                values.sort()
            body[begin:end] = values.tobytes()
        else:
            array = bytes(body[begin:end])
            new = random.choice(_ODD_BYTES) + array if random.random() < 0.1 else raw(array, random)
            body[begin:end] = new[: end - begin].ljust(end - begin, new[-1:] or b"\0")
    return bytes(body)


def _arrays(fields: Any) -> Iterator[tuple[list[int], int]]:
    """Where each array stands, and the bytes of a value."""
    for column in fields["columns"]:
        width = np.dtype(column["dtype"]).itemsize if column["dtype"] in DTYPES else 1
        places = [(column["values"], width), (column["codes"], 1)]
        if column["packing"] is not None:
            places[0] = (column["packing"]["pieces"], 8)
        places += [(column[part], 8) for part in ("offsets", "shapes")]
        yield from (each for each in places if each[0] is not None)
    if fields["failed"] is not None:
        yield fields["failed"]["messages"], 1
    if fields["attributes"] is not None:
        yield fields["attributes"], 1
