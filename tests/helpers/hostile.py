"""Hostile caches: change an index and seal it again; read all that a damaged file has."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from hashlib import blake2b
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from dataloaders.cache import CachedDataset, verify
from dataloaders.errors import CacheError

from .processes import takes_less_than

# As docs/cache-format.md has them.
HEADER = 64
BLOCK = 1 << 16  # of which there is a checksum
MOST_ROWS = 22


def seal(text: bytes, block: int, version: int = 4) -> bytes:
    """Return the user block with this text and the right digest."""
    start = struct.pack("<12sIQQ", b"\x89DLCACHE\r\n\x1a\n", version, len(text), block)
    digest = blake2b(start + text, digest_size=16).digest()
    return ((start + digest).ljust(HEADER, b"\0") + text).ljust(block, b"\0")


class Whole:
    """A sound file: the fields of its index, and the body that follows its user block."""

    def __init__(self, data: bytes) -> None:
        length, self.block = struct.unpack_from("<QQ", data, 16)
        self.data, self.text, self.body = data, data[HEADER : HEADER + length], data[self.block :]
        self.fields: Any = json.loads(self.text)

    def with_text(self, text: bytes) -> bytes:
        """Return the file with another index and the right digest."""
        block = max(self.block, 1 << (HEADER + len(text) - 1).bit_length())
        return seal(text, block) + self.body

    def with_fields(self, fields: Any) -> bytes:
        """Return the file with another index, in which its length is right if it was."""
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        made = self.with_text(text.encode())
        if isinstance(fields, dict) and fields.get("file_bytes") == len(self.data) != len(made):
            return self.with_fields({**fields, "file_bytes": len(made)})
        return made

    def changed(self, values: dict[str, Any]) -> bytes:
        """Return the file with other values in its index, each at a path "columns.0.dtype"."""
        fields = copy.deepcopy(self.fields)
        for way, value in values.items():
            *keys, last = (int(key) if key.isdigit() else key for key in way.split("."))
            reduce(getitem, keys, fields)[last] = value
        return self.with_fields(fields)


def say_less(path: Path) -> None:
    """Remove the sizes of rows and images, and the classes, from a file's index."""
    whole = Whole(path.read_bytes())
    for column in whole.fields["columns"]:
        column.update(most_values=None, most_pixels=None)
    path.write_bytes(whole.changed({"attributes": None}))


def said_of(
    path: Path, data: bytes, rows: Sequence[int] | None = None, most: int = 30 << 20
) -> set[str]:
    """Read and verify everything in ``data`` in at most ``most`` bytes; return the messages."""
    path.write_bytes(data)
    with takes_less_than(most):
        for damage in verify(path):
            assert len(damage.what) < 3000
            assert damage.shard or 0 <= damage.offset <= damage.offset + damage.bytes <= len(data)
        found = set(_errors(path, rows))
    assert all(len(text) < 3000 and text.isprintable() for text in found), found
    return found


def _errors(path: Path, rows: Sequence[int] | None) -> Iterator[str]:
    """Yield the messages of all errors while rows (by default the first) are read in every way."""
    try:
        cached = CachedDataset(path)
    except CacheError as error:
        yield str(error)
        return
    rows = range(min(len(cached), MOST_ROWS)) if rows is None else rows
    reads = [partial(cached.__getitem__, row) for row in rows]
    for read in (*reads, partial(cached.__getitems__, rows)):
        try:
            read()
        except CacheError as error:
            yield str(error)
    cached.will_read(-(2**70), 2**70)  # says nothing, whatever the offsets are
    for column in cached.columns:
        if column.shape is not None and column.packing is None and not cached.shards:
            cached.column(column.name).reshape(-1)[:100].tobytes()
        else:
            with pytest.raises(CacheError, match=r"different shapes|is compressed|shards"):
                cached.column(column.name)
    try:
        assert set(cached.attributes) <= {"classes", "class_to_idx"}
        assert all(type(each) in (str, tuple) for each in cached.attributes.get("classes", ()))
        assert all(type(row) is int and type(text) is str for row, text in cached.failed)
    except CacheError as error:
        yield str(error)
