"""Spoils caches: JSON by its structure, arrays by their values, and bytes.

Each mutation is a function of the input, a random generator and ``raw``, which changes some bytes:
libFuzzer's own changes, that know which values the code compared, or those of `few_bytes`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

import numpy as np

from dataloaders.cache.sample.cell import _MODES, _PLAIN_KINDS, _TORCH, DTYPES, fits
from fuzz.sealed import LARGEST, Opened, block_of, encoded, opened, refitted
from helpers.hostile import KINDS, NUMBERS, ODD_DTYPES, places_in, seal

__all__ = ["few_bytes", "file", "folder", "json_text", "packed", "unpacked"]

Raw: TypeAlias = Callable[[bytes], bytes]

_DEEP = 400
_KINDS = (
    *KINDS, *_PLAIN_KINDS, *(f"tensor:{name}" for name in _TORCH),
    *(f"image:{mode}" for mode in _MODES),
    *(f"tv_tensor:{name}:uint8" for name in ("Image", "Mask", "Video", "BoundingBoxes")),
)  # fmt: skip
_TEXTS = (
    *_KINDS, *ODD_DTYPES, *sorted(DTYPES), "dict", "list", "tuple", "namedtuple", "lambda", "_x",
    "../../x", "/etc/passwd", "a" * 300, "\x1b[2J\x1b]0;x\x07", "\ud800", "é\u202e", "x,y):0#",
    "[red]", "[/x]", "\0", "\n", " ", ".",
)  # fmt: skip
_ODD_BYTES = (b"[" * 2000, b"9" * 5000, b"NaN", b"1e999", b"\xff\xfe", b"\xed\xa0\x80", b'{"a":')


def few_bytes(data: bytes, random: Random) -> bytes:
    """``data`` with a few bytes changed, inserted or deleted."""
    made = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(made) + 1)
        kind = random.randrange(4)
        if kind == 0:
            made[at : at + 1] = bytes([random.randrange(256)])
        elif kind == 1:
            made[at:at] = random.choice(_ODD_BYTES)[: random.choice((1, 4, 5000))]
        elif kind == 2:
            del made[at : at + random.choice((1, 1, 8, 100))]
        else:
            other = random.randrange(len(made) + 1)
            made[at:at] = made[other : other + random.randint(1, 40)]
    return bytes(made)


def _value(random: Random) -> Any:
    kind = random.randrange(7)
    if kind < 3:
        return random.choice((*NUMBERS, random.randrange(1 << random.choice((4, 8, 16, 40)))))
    if kind < 5:
        return random.choice(_TEXTS)
    if kind == 5:
        return random.choice((None, True, False, 0.5, float("inf"), float("nan"), -0.0, 1e300))
    deep: Any = [random.choice(NUMBERS) for _ in range(random.randrange(4))]
    for _ in range(random.choice((0, 0, 1, 3, 70, _DEEP))):
        deep = [deep] if random.random() < 0.5 else {random.choice(_TEXTS): deep}
    return deep


def _changed(value: Any, random: Random) -> Any:
    """Some JSON of which one place is another, or which is too deep to be changed."""
    try:
        return _changed_somewhere(value, random)
    except RecursionError:
        return value


def _changed_somewhere(value: Any, random: Random) -> Any:
    ways = list(places_in(value))
    way = random.choice(ways)
    if not way:
        return _value(random) if random.random() < 0.1 else value
    *keys, last = way
    inner = value
    for key in keys:
        inner = inner[key]
    kind = random.randrange(8)
    other = value
    for key in random.choice(ways):
        other = other[key]
    if kind == 0:
        del inner[last]
    elif kind == 1 and isinstance(inner, list):
        inner.insert(last, copy.deepcopy(random.choice((_value(random), inner[last]))))
    elif kind == 1:
        inner[random.choice(_TEXTS)] = _value(random)
    elif kind == 2:  # a part of the same document in another place
        inner[last] = copy.deepcopy(other)
    elif kind == 3 and isinstance(inner, dict):
        inner[random.choice(_TEXTS)] = inner.pop(last)
    elif kind == 4:
        name = random.choice(("list", "tuple", "dict", "namedtuple"))
        pair = [[random.choice(_TEXTS), inner[last]]]
        inside = {"dict": pair, "namedtuple": [random.choice(_TEXTS), pair]}
        inner[last] = {name: inside.get(name, [inner[last]])}
    elif kind == 5 and type(inner[last]) is int:
        inner[last] += random.choice((-9, -8, -1, 1, 2, 8, 9, 4096))
    else:
        inner[last] = _value(random)
    return value


def json_text(data: bytes, random: Random, raw: Raw) -> bytes:
    """Another text of some JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return raw(data)
    return raw(data) if random.random() < 0.2 else encoded(_changed(value, random))


def _retype(fields: Any, random: Random) -> None:
    """Give a column other kinds and another shape, which go together."""
    try:
        column = random.choice(fields["columns"])
    except (KeyError, TypeError, IndexError):
        return
    if not isinstance(column, dict):
        return
    sizes = (0, 1, 2, 3, 4, 5, 60, 1 << 17, 1 << 40)
    shape = [random.choice(sizes) for _ in range(random.choice((0, 1, 2, 3, 3, 3, 4, 31, 40)))]
    dtype = random.choice(sorted(DTYPES))
    variants = []
    for _ in range(random.choice((1, 1, 2, 3))):
        kind = random.choice(_KINDS)
        of = len(shape) if random.random() < 0.7 else random.choice((0, 1, 3, 64))
        if not variants:
            if kind.startswith("image:") and kind[6:] in _MODES:
                dtype, channels = _MODES[kind[6:]]
                shape = [channels, *(random.choice(sizes) for _ in range(2))]
                of = 3
            elif kind in _PLAIN_KINDS:
                dtype, of = _PLAIN_KINDS[kind]
                shape = [random.choice(sizes) for _ in range(of)]
            elif kind.rpartition(":")[2] in _TORCH:
                dtype = _TORCH[kind.rpartition(":")[2]]
        if fits(kind, dtype, of, None):
            variants.append([kind, of])
    column["dtype"] = dtype
    column["variants"] = variants or [["array", len(shape)]]
    column["shape"] = shape if random.random() < 0.5 else None


def file(data: bytes, random: Random, raw: Raw) -> bytes:
    """Another cache; most have an index whose digest is right."""
    whole = opened(data)
    kind = random.random()
    if whole is None or kind < 0.03:
        return raw(data)
    if kind < 0.06:
        return data[: random.randrange(len(data) + 1)]
    if kind < 0.12:
        text = raw(encoded(whole.fields))
        return seal(text, block_of(len(text))) + whole.body
    if kind < 0.5:
        if random.random() < 0.5:
            _retype(whole.fields, random)
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            whole.fields = _changed(whole.fields, random)
        if random.random() < 0.8:
            whole = refitted(whole, random)
    else:
        whole.body = _with_other_values(whole, random, raw)
    return whole.to_bytes()[:LARGEST]


def _with_other_values(whole: Opened, random: Random, raw: Raw) -> bytes:
    """Its bytes, with one or more arrays changed."""
    body, block = bytearray(whole.body), whole.block
    if body and random.random() < 0.2:  # the pieces of compressed columns: anywhere
        for _ in range(random.randint(1, 6)):
            body[random.randrange(len(body))] = random.randrange(256)
        return bytes(body)
    for _ in range(random.choice((1, 1, 2, 4))):
        place = _place(whole.fields, random)
        if place is None:
            return raw(bytes(body))
        (offset, size), width = place
        begin, end = offset - block, offset - block + size * width
        if not 0 <= begin < end <= len(body):
            continue
        if width == 8 and random.random() < 0.8:
            # Sums of a few offsets are small: rows of such sizes are read, not only refused.
            values = np.frombuffer(bytes(body[begin:end]), "<u8").copy()
            with np.errstate(over="ignore"):
                at = random.randrange(len(values))
                values[at] = random.choice((*NUMBERS[1:-2], int(values[at]) + 1)) % (1 << 64)
            if random.random() < 0.3:
                values.sort()
            body[begin:end] = values.tobytes()
        else:
            array = bytes(body[begin:end])
            new = random.choice(_ODD_BYTES) + array if random.random() < 0.1 else raw(array)
            body[begin:end] = new[: end - begin].ljust(end - begin, new[-1:] or b"\0")
    return bytes(body)


def _place(fields: Any, random: Random) -> tuple[list[int], int] | None:
    """Where an array stands, and the bytes of a value."""
    try:
        column = random.choice(fields["columns"])
        width = np.dtype(column["dtype"]).itemsize if column["dtype"] in DTYPES else 1
        places = [(column["values"], width), (column["codes"], 1)]
        if column["packing"] is not None:
            places[0] = (column["packing"]["pieces"], 8)
        places += [(column[part], 8) for part in ("offsets", "shapes")]
        if fields["failed"] is not None:
            places.append((fields["failed"]["messages"], 1))
        places.append((fields["attributes"], 1))
        place, width = random.choice([each for each in places if each[0] is not None])
        offset, size = place
        return ([offset, size], width) if type(offset) is type(size) is int else None
    except (LookupError, TypeError, ValueError):
        return None


def packed(folder: dict[str, bytes]) -> bytes:
    """The files of a folder as one input."""
    return json.dumps({name: data.hex() for name, data in folder.items()}).encode()


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files in an input of `packed`."""
    return {name: bytes.fromhex(text) for name, text in json.loads(data).items()}


def folder(data: bytes, random: Random, raw: Raw) -> bytes:
    """A build's folder of which a file is torn, garbage, missing, or says something else."""
    files = unpacked(data)
    if not files:
        return data
    name = random.choice(sorted(files))
    change = random.randrange(5)
    if change == 0:
        del files[name]
    elif change == 1:
        files[name] = files[name][: random.randrange(len(files[name]) + 1)]
    elif change == 2:
        others = ("00002.h5", "build.json", "00006.h5", "00004-0123abcd.h5")
        files[random.choice(others)] = files[name]
    elif change == 3:
        files["build.json"] = json_text(files.get("build.json", b"{}"), random, raw)
    else:
        files[name] = raw(files[name])
    return packed(files)
