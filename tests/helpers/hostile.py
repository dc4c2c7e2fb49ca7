"""What the tests of hostile files and the fuzzer share: odd values, and reading to the last row."""

from __future__ import annotations

import copy
import json
import math
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataloaders.cache import CachedDataset, verify
from dataloaders.cache.format.block import HEADER, SMALLEST_BLOCK, seal
from dataloaders.cache.format.checksums import BLOCK
from dataloaders.errors import CacheError

__all__ = ["BLOCK", "HEADER", "SMALLEST_BLOCK", "seal"]

NUMBERS = (
    -1, 0, 1, 2, 3, 7, 8, 10, 11, 12, 16, 63, 64, 65, 255, 256, 4095, 4096, 4104, 2**31, 2**32,
    2**47, 2**48, 2**48 + 1, 2**52, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64, 10**30,
)  # fmt: skip
KINDS = (
    "int", "float", "complex", "bool", "str", "bytes", "bytearray", "none", "json", "array",
    "scalar", "tensor:float32", "tensor:uint8", "tensor:bool", "tensor:bfloat16", "image:RGB",
    "image:L", "image:1", "encoded:PNG:RGB", "encoded:JPEG:P", "file:RGB", "image:P",
    "encoded:PNG:P", "tv_tensor:Image:uint8", "pickle", "", "object",
)  # fmt: skip
ODD_DTYPES = (
    "|u1", "|b1", "<u2", ">f4", "<f8", "<u8", "<c16", "|O", "O", "<U4", "|V8", "<M8", "u1,f4",
    "object", "{}", "<f16",
)  # fmt: skip
MOST_ROWS = 22


class Whole:
    """A sound file, and the parts of it that tests spoil."""

    def __init__(self, path: Path) -> None:
        self.index = CachedDataset(path).index
        self.data = path.read_bytes()
        self.text = self.index.text()
        self.fields: dict[str, Any] = json.loads(self.text)

    def with_text(self, text: bytes) -> bytes:
        """The file with another index, its digest right."""
        block = self.index.user_block
        while len(text) + HEADER > block:
            block *= 2
        return seal(text, block) + self.data[self.index.user_block :]

    def with_fields(self, fields: Any) -> bytes:
        """The file with another index; its length in there is right if it was."""
        made = self.with_text(_text(fields))
        if isinstance(fields, dict) and fields.get("file_bytes") == len(self.data) != len(made):
            return self.with_text(_text({**fields, "file_bytes": len(made)}))
        return made

    def changed(self, values: dict[str, Any]) -> bytes:
        """The file in whose index the value at each "columns.0.dtype" is another one."""
        fields = copy.deepcopy(self.fields)
        for way, value in values.items():
            *keys, last = (int(key) if key.isdigit() else key for key in way.split("."))
            inner = fields
            for key in keys:
                inner = inner[key]
            inner[last] = value
        return self.with_fields(fields)


def _text(fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def say_less(path: Path) -> None:
    """Have a file say nothing of the size of rows and images, nor of classes."""
    whole = Whole(path)
    for column in whole.fields["columns"]:
        column.update(most_values=None, most_pixels=None)
    path.write_bytes(whole.changed({"attributes": None}))


def attempts(cached: CachedDataset, rows: Sequence[int] | None = None) -> Iterator[str]:
    """The messages of all errors while rows, the first ones by default, are read in every way."""
    rows = range(min(len(cached), MOST_ROWS)) if rows is None else rows
    for row in rows:
        try:
            cached[row]
        except CacheError as error:
            yield str(error)
    try:
        cached.__getitems__(rows)
    except CacheError as error:
        yield str(error)
    cached.will_read(-(2**70), 2**70)  # says nothing, whatever the offsets are
    for column in cached.columns:
        if column.fixed and column.packing is None and not cached.shards:
            cached.column(column.name).reshape(-1)[:100].tobytes()
        else:
            with pytest.raises(CacheError, match=r"different shapes|is compressed|shards"):
                cached.column(column.name)
    try:
        assert set(cached.attributes) <= {"classes", "class_to_idx"}
        assert all(type(each) in (str, tuple) for each in cached.attributes.get("classes", ()))
    except CacheError as error:
        yield str(error)
    try:
        assert all(type(row) is int and type(text) is str for row, text in cached.failed)
    except CacheError as error:
        yield str(error)


def said_of(
    path: Path, data: bytes, rows: Sequence[int] | None = None, most: int = 30 << 20
) -> set[str]:
    """Everything in ``data`` is read and verified in so many bytes of memory: what errors say."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        for damage in verify(path):
            assert len(damage.what) < 1000
            assert damage.shard or 0 <= damage.offset <= damage.offset + damage.bytes <= len(data)
        found = set(_errors(path, len(data), rows))
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert all(len(text) < 3000 for text in found)
    return found


def _errors(path: Path, size: int, rows: Sequence[int] | None) -> Iterator[str]:
    try:
        cached = CachedDataset(path)
    except CacheError as error:
        yield str(error)
        return
    if not cached.shards:
        check_places(cached.index, size)
    yield from attempts(cached, rows)


def check_places(index: Any, length: int) -> None:
    """Nothing stands outside the file, or has more values than there is room for."""
    places = [("<u4", index.checksums)]
    for column in index.columns:
        places += [(dtype, extent) for _, dtype, extent in column.parts()]
        check_counts(column, index.rows)
    if index.failed is not None:
        places += [("<u8", index.failed[0]), ("|u1", index.failed[1])]
    if index.attributes is not None:
        places.append(("|u1", index.attributes))
    taken: list[tuple[int, int]] = []
    for dtype, (offset, size) in places:
        if size:
            end = offset + size * np.dtype(dtype).itemsize
            assert index.user_block <= offset < end <= length
            assert all(end <= low or high <= offset for low, high in taken)
            taken.append((offset, end))


def check_counts(column: Any, rows: int) -> None:
    if column.shape is not None:
        assert column.values.size == rows * math.prod(column.shape)
    else:
        assert column.offsets is not None
        assert column.offsets.size == rows + 1


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in some JSON."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places_in(value[key], (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from places_in(inner, (*path, number))
