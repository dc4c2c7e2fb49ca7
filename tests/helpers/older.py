"""Files as older versions of the package wrote them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from dataloaders.cache.format.block import HEADER

_SINCE_3 = ("attributes",)
_COLUMNS_SINCE_3 = ("most_values", "most_pixels")


def as_version_2(path: Path, *, keep: Sequence[str] = ()) -> None:
    """Make the file at ``path`` one of version 2: it says less, and all values are where they were.

    Args:
        path: of a cache.
        keep: what it says all the same, which no such file does.
    """
    data = path.read_bytes()
    length, block = (int.from_bytes(data[at : at + 8], "little") for at in (16, 24))
    fields = json.loads(data[HEADER : HEADER + length])
    for name in _SINCE_3:
        if name not in keep:
            del fields[name]
    for column in fields["columns"]:
        for name in _COLUMNS_SINCE_3:
            del column[name]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")
    start = data[:12] + (2).to_bytes(4, "little") + len(text).to_bytes(8, "little") + data[24:32]
    header = start + blake2b(start + text, digest_size=16).digest()
    path.write_bytes((header.ljust(HEADER, b"\0") + text).ljust(block, b"\0") + data[block:])
