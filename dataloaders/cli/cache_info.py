"""What ``dataloaders cache info`` prints.

What a file says of itself is shown as text: none of it reaches the terminal as a control character.
"""

from __future__ import annotations

import json

import numpy as np

from dataloaders.cache.format.attributes import told
from dataloaders.cache.format.disk import size_of
from dataloaders.cache.printable import printable
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.measuring.table import table

__all__ = ["info"]

_SHOWN_FAILURES = 20
_SHOWN_SHARDS = 20
_LONGEST = 10_000  # characters of a line


def info(path: str) -> int:
    """Print what the cache at ``path`` holds.

    Raises:
        CacheError: it cannot be used.
    """
    cached = CachedDataset(path)

    def print_(text: str) -> None:
        print(printable(text, _LONGEST))

    index = cached.index
    print_(f"{path}: {index.rows:,} samples, {size_of(index.all_bytes)}")
    if index.shards:
        print_(f"in {len(index.shards)} parts:")
        for shard in index.shards[:_SHOWN_SHARDS]:
            print_(f"  {shard.name}: {shard.rows:,} samples, {size_of(shard.file_bytes)}")
        if len(index.shards) > _SHOWN_SHARDS:
            print_(f"  and {len(index.shards) - _SHOWN_SHARDS} more")
    print(_columns_table(cached))
    for name, members in (("computed", index.head), ("left to run live", index.tail)):
        print_(f"transforms {name}: {' -> '.join(members) if members else 'none'}")
    for key, value in cached.attributes.items():
        print_(f"{key}: {told(value)}")
    for key, value in index.fingerprint.items():
        if key in ("head", "calls") or key.startswith("sample ") or value is None:
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        print_(f"built from {printable(key, 200)}: {printable(text, 200)}")
    if cached.failed:
        print_(f"left out, since reading them failed: {len(cached.failed):,} samples")
        for number, message in cached.failed[:_SHOWN_FAILURES]:
            print_(f"  sample {number}: {message}")
    return 0


def _columns_table(cached: CachedDataset) -> str:
    columns = cached.index.columns
    headings = ["column", "kind", "values", "shape of a row", "in the file"]
    some_packed = any(column.packing is not None for column in columns)
    # Only its parts say what compressed columns of a cache take: all of them are opened then.
    may_be_packed = cached.index.fingerprint.get("compress", "") is not None
    if some_packed:
        headings.append("compressed")
    rows = []
    for reader in cached.readers:
        column = reader.entry
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in column.variants))
        shape = "it varies" if column.shape is None else " x ".join(map(str, column.shape)) or "one"
        cells = [printable(column.name, 200), kinds, np.dtype(column.dtype).name, shape]
        values = column.values.size * np.dtype(column.dtype).itemsize
        packed = reader.packed_bytes() if may_be_packed else None
        others = sum(
            np.dtype(dtype).itemsize * extent.size
            for name, dtype, extent in column.parts()
            if name != "values"
        )
        cells.append(size_of(others + (values if packed is None else packed)))
        if some_packed:
            packing = column.packing
            ratio = values / max(1, packed or 1)
            cells.append("" if packing is None else f"{packing.codec}, to 1/{ratio:.1f}")
        rows.append(cells)
    return table(headings, rows, right=("in the file",))
