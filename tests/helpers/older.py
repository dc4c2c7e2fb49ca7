"""Files that say less than this package writes."""

from __future__ import annotations

import json
from pathlib import Path

from .hostile import HEADER, seal


def say_less(path: Path) -> None:
    """Have the file at ``path`` say nothing of the size of rows and images, nor of classes."""
    data = path.read_bytes()
    length, block = (int.from_bytes(data[at : at + 8], "little") for at in (16, 24))
    fields = json.loads(data[HEADER : HEADER + length])
    fields["attributes"] = None
    for column in fields["columns"]:
        column.update(most_values=None, most_pixels=None)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")
    path.write_bytes(seal(text, block) + data[block:])
