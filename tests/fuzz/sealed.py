"""A cache file as its index and its bytes; put together so that the parser gets to the end.

bytes ──opened──> Opened(fields, block, body) ──mutation──> Opened ──bytes──> digest made right
                                                   └─refitted: each array has the size and place
                                                     that the index needs, so that rows are read
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from dataloaders.cache.sample.sample import DTYPES, column_names
from dataloaders.errors import CacheError
from helpers.hostile import BLOCK, HEADER, seal

__all__ = ["LARGEST", "Opened", "opened", "refitted"]

LARGEST = 1 << 17
"""Bytes of a file, at most: small files are run often."""

_SMALLEST_BLOCK = 4096
_BLOCKS = (4096, 8192, 16384)


@dataclass
class Opened:
    """A cache in parts.

    Attributes:
        fields: what the index says, of any type.
        body: the bytes behind the block in front.
        least: bytes of this block, at least: it may be larger than its text takes.
    """

    fields: Any
    body: bytes
    least: int = _SMALLEST_BLOCK

    @property
    def block(self) -> int:
        """Bytes of the block in front."""
        return max(self.least, block_of(len(encoded(self.fields))))

    def to_bytes(self) -> bytes:
        """The file, its digest and its length right."""
        for _ in range(3):  # the length's digits are part of the length
            if isinstance(self.fields, dict) and type(self.fields.get("file_bytes")) is int:
                self.fields["file_bytes"] = self.block + len(self.body)
        return seal(encoded(self.fields), self.block) + self.body


def encoded(fields: Any) -> bytes:
    """The text of an index."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")


def block_of(text: int) -> int:
    """The size of the block for a text of so many bytes."""
    return max(_SMALLEST_BLOCK, 1 << (HEADER + text - 1).bit_length())


def opened(data: bytes) -> Opened | None:
    """The parts of a file whose index is JSON; None of any other."""
    length = int.from_bytes(data[16:24], "little")
    block = int.from_bytes(data[24:32], "little")
    try:
        fields = json.loads(data[HEADER : HEADER + length])
    except (ValueError, RecursionError):
        return None
    if block > len(data):
        return None
    return Opened(fields, data[block:], block if block in _BLOCKS else _SMALLEST_BLOCK)


def refitted(file: Opened, random: Random) -> Opened:
    """The same with the sizes, names and places that follow from its rows and shapes.

    What cannot be made to fit is left as it is.
    """
    try:
        return _refitted(file, random)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return file
    except (CacheError, RecursionError):
        return file


def _refitted(file: Opened, random: Random) -> Opened:
    fields, rows = file.fields, file.fields["rows"]
    names = column_names(fields["structure"])
    columns = fields["columns"]
    if type(rows) is not int:
        return file
    while len(columns) < len(names):
        columns.append(json.loads(json.dumps(random.choice(columns))))
    del columns[len(names) :]
    wanted = [(fields["checksums"], "values", 4, 0)]
    for name, column in zip(names, columns, strict=True):
        column["name"] = name
        wanted += _wanted(column, rows, random)
    if fields["failed"] is not None:
        wanted += [
            (fields["failed"], part, width, fields["failed"][part][1])
            for part, width in (("rows", 8), ("messages", 1))
        ]
    if fields["attributes"] is not None:
        wanted.append((fields, "attributes", 1, fields["attributes"][1]))
    # The table of checksums depends on the length, and that on the table.
    body = sum(size * width for _, _, width, size in wanted)
    if body > LARGEST:
        return file
    body = max(body + 8 * (body // BLOCK + 1), len(file.body) % LARGEST)
    wanted[0] = (*wanted[0][:3], -(-body // BLOCK))
    for _ in range(2):  # places take digits, which may make the block larger
        at = file.block
        for holder, key, width, size in wanted:
            holder[key] = [at if size else 0, size]
            at += width * size
    repeated = file.body * (body // max(len(file.body), 1) + 1)
    return Opened(fields, repeated[:body].ljust(body, b"\0"), file.least)


def _wanted(column: Any, rows: int, random: Random) -> list[tuple[Any, str, int, int]]:
    """The arrays of a column: where their place is kept, its key, bytes of a value, values."""
    variants, shape = column["variants"], column["shape"]
    width = np.dtype(column["dtype"]).itemsize if column["dtype"] in DTYPES else 1
    column["dimensions"] = most = max(of for _, of in variants)
    column["offsets"] = column["shapes"] = column["codes"] = None
    if shape is not None:
        column["most_values"] = None
    if not any(kind.startswith(("encoded", "file")) for kind, _ in variants):
        column["most_pixels"] = None
    found = []
    if len(variants) > 1:
        found.append((column, "codes", 1, rows))
    if any(type(each) is not int for each in shape or ()):
        raise TypeError("a text times a number is a large text")
    size, packing = column["values"][1], column["packing"]
    if shape is not None:
        size = rows * math.prod(shape)
    if packing is not None:
        column["values"] = [0, size]
        packing["piece"] = min(size, math.prod(shape or [99]) * random.randint(1, 9))
        found.append((packing, "pieces", 8, 2 * -(-size // packing["piece"])))
    elif shape is not None or size < 1 << 12:
        found.append((column, "values", width, size))
    else:
        found.append((column, "values", width, random.randrange(64)))
    if shape is not None:
        return found
    found.append((column, "offsets", 8, rows + 1))
    if most > 1:
        found.append((column, "shapes", 8, rows * most))
    return found
