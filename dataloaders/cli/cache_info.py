"""What ``dataloaders cache info`` prints.

Texts of a file are escaped: none of them reaches the terminal as a control character.
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
    rows = []
    for column in cached.columns:
        shape = " x ".join(map(str, column.shape or ())) or "one"
        sizes = (np.dtype(dtype).itemsize * size for _, dtype, (_, size) in column.sized())
        rows.append(
            [
                printable(column.name, 200),
                ", ".join(dict.fromkeys(kind for kind, _ in column.variants)),
                np.dtype(column.dtype).name,
                "it varies" if column.shape is None else shape,
                size_of(sum(sizes)),
            ]
        )
    return table(["column", "kind", "values", "shape of a row", "size"], rows, right=("size",))
