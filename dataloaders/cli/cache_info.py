"""What ``dataloaders cache info`` prints, and its contact sheet.

What a file says of itself is shown as text: none of it reaches the terminal as a control character.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataloaders.cache.format.attributes import told
from dataloaders.cache.format.disk import size_of
from dataloaders.cache.format.entries import ColumnEntry
from dataloaders.cache.printable import printable
from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cli.table import table
from dataloaders.errors import CacheError, OptionError

__all__ = ["info"]

_SHOWN_FAILURES = 20
_SHOWN_SHARDS = 20
_SHEET = 64
_THUMBNAIL = 128
_LONGEST = 10_000  # characters of a line


def info(path: str, *, sheet: str | None = None) -> int:
    """Print what the cache at ``path`` holds, and draw its first images into ``sheet``.

    Raises:
        OptionError: ``sheet`` is not the name of a PNG file.
        CacheError: the cache cannot be used, or ``sheet`` cannot be written.
    """
    if sheet is not None and Path(sheet).suffix.lower() != ".png":
        raise OptionError(f"--sheet {sheet}: a PNG file is drawn; give a name that ends in .png")
    cached = CachedDataset(path)
    if sheet is not None and os.path.exists(sheet) and os.path.samefile(sheet, path):
        raise OptionError(f"--sheet {sheet} is the cache itself; give another name")

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
    if sheet is not None:
        _draw(cached, Path(sheet))
        print_(f"the first images: {sheet}")
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
        packed = reader.packed_bytes() if may_be_packed else None
        taken = _bytes(column) + (packed or 0)
        if packed is not None and column.packing is None:  # of a joined cache: in its shards
            taken -= column.values.size * np.dtype(column.dtype).itemsize
        cells.append(size_of(taken))
        if packed is not None and column.packing is not None:
            values = column.values.size * np.dtype(column.dtype).itemsize
            cells.append(f"{column.packing.codec}, to 1/{values / max(1, packed):.1f}")
        elif some_packed:
            cells.append("")
        rows.append(cells)
    return table(headings, rows, right="in the file")


def _bytes(column: ColumnEntry) -> int:
    return sum(np.dtype(dtype).itemsize * place.size for _, dtype, place in column.parts())


def _draw(cached: CachedDataset, path: Path) -> None:
    """A contact sheet: the first images, in rows, each with its number's order."""
    from PIL import Image

    numbers = [
        number
        for number, column in enumerate(cached.index.columns)
        if any(_is_image(kind, dimensions) for kind, dimensions in column.variants)
    ]
    if not numbers:
        raise CacheError("this cache holds no images to draw; leave out --sheet")
    thumbnails = []
    for row in range(min(_SHEET, len(cached))):
        image = _as_image(cached.leaves(row)[numbers[0]])
        if image is not None:
            image.thumbnail((_THUMBNAIL, _THUMBNAIL))
            thumbnails.append(image)
    across = max(1, math.ceil(math.sqrt(len(thumbnails))))
    down = max(1, math.ceil(len(thumbnails) / across))
    canvas = Image.new("RGB", (across * _THUMBNAIL, down * _THUMBNAIL), "white")
    for place, image in enumerate(thumbnails):
        canvas.paste(image, (place % across * _THUMBNAIL, place // across * _THUMBNAIL))
    try:
        canvas.save(path, "PNG")
    except OSError as error:
        raise CacheError(f"--sheet {path} cannot be written: {error.strerror or error}") from error


def _is_image(kind: str, dimensions: int) -> bool:
    return kind.startswith(("image:", "encoded:", "file:", "tv_tensor:Image")) or (
        kind in ("tensor:uint8", "tensor:float32") and dimensions == 3
    )


def _as_image(leaf: Any) -> Any:
    from PIL import Image

    if isinstance(leaf, Image.Image):
        if leaf.mode == "P":  # whose transparency Pillow warns of on the way to RGB
            leaf = leaf.convert("RGBA")
        return leaf.convert("RGB")
    if not isinstance(leaf, torch.Tensor) or leaf.ndim != 3 or leaf.shape[0] not in (1, 3):
        return None
    if not leaf.numel():
        return None
    if leaf.is_floating_point():  # of any range: normalised ones too
        low, high = leaf.min(), leaf.max()
        leaf = ((leaf - low) / (high - low).clamp_min(1e-12) * 255).to(torch.uint8)
    pixels = leaf.as_subclass(torch.Tensor).expand(3, -1, -1).permute(1, 2, 0)
    return Image.fromarray(np.ascontiguousarray(pixels.numpy()))
