"""What ``dataloaders cache info`` prints.

What a file says of itself is shown as text: none of it reaches the terminal as a control character.
"""

from __future__ import annotations

import json

import numpy as np

from dataloaders.cache.format.attributes import summary
from dataloaders.cache.format.disk import size_of
from dataloaders.cache.printable import printable
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.measuring.table import table

__all__ = ["info"]

_SHOWN = 20  # parts, and samples that were left out
_LONGEST = 10_000  # characters of a line


def info(path: str) -> int:
    """Print what the cache at ``path`` holds.

    Raises:
        CacheError: it cannot be used.
    """
    cached = CachedDataset(path)
    index, failed = cached.index, cached.failed
    lines = [f"{path}: {index.rows:,} samples, {size_of(index.all_bytes)}"]
    if index.shards:
        lines.append(f"in {len(index.shards)} parts:")
    for shard in index.shards[:_SHOWN]:
        lines.append(f"  {shard.name}: {shard.rows:,} samples, {size_of(shard.file_bytes)}")
    if len(index.shards) > _SHOWN:
        lines.append(f"  and {len(index.shards) - _SHOWN} more")
    lines += _columns_table(cached).splitlines()
    for name, members in (("computed", index.head), ("left to run live", index.tail)):
        lines.append(f"transforms {name}: {' -> '.join(members) if members else 'none'}")
    lines += [f"{key}: {summary(value)}" for key, value in cached.attributes.items()]
    for key, value in index.fingerprint.items():
        if key not in ("head", "calls") and not key.startswith("sample ") and value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            lines.append(f"built from {printable(key, 200)}: {printable(text, 200)}")
    if failed:
        lines.append(f"left out, since reading them failed: {len(failed):,} samples")
    lines += [f"  sample {number}: {message}" for number, message in failed[:_SHOWN]]
    for line in lines:
        print(printable(line, _LONGEST))
    return 0


def _columns_table(cached: CachedDataset) -> str:
    headings = ["column", "kind", "values", "shape of a row", "in the file", "compressed"]
    # Only its parts say what compressed columns of a cache take: all of them are opened then.
    may_be_compressed = cached.index.fingerprint.get("compress", "") is not None
    rows = []
    for reader in cached.readers:
        column = reader.entry
        values = column.values.size * np.dtype(column.dtype).itemsize
        found = reader.compressed() if may_be_compressed else None
        codec, size = found or ("", values)
        how = f"{codec}, to 1/{values / max(1, size):.1f}" if codec else ""
        for name, dtype, extent in column.parts():
            size += np.dtype(dtype).itemsize * extent.size * (name != "values")
        cells = [
            printable(column.name, 200),
            ", ".join(dict.fromkeys(kind for kind, _ in column.variants)),
            np.dtype(column.dtype).name,
            "it varies" if column.shape is None else " x ".join(map(str, column.shape)) or "one",
            size_of(size),
            how,
        ]
        rows.append(cells)
    if not any(cells[-1] for cells in rows):
        headings, rows = headings[:-1], [cells[:-1] for cells in rows]
    return table(headings, rows, right=("in the file",))
