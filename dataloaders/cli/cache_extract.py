"""``dataloaders cache extract``: samples as plain files, that need nothing of ours.

row ──> leaves ──┬──> images: PNG, TIFF             00000003-photo.png
                 ├──> bytes, arrays: .bin, .npy     00000003-mask.npy
                 └──> the rest, and these names: a line of samples.jsonl
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataloaders.cache.read.reader import CachedDataset
from dataloaders.cache.sample.file import FORMATS, SUFFIXES, opened
from dataloaders.errors import CacheError, OptionError

__all__ = ["extract"]

# What Pillow writes and reads again without a loss; of other modes the array is kept.
_SUFFIXES = {
    **dict.fromkeys(("1", "L", "LA", "RGB", "RGBA", "I;16"), "png"),
    **dict.fromkeys(("CMYK", "YCbCr", "LAB", "I", "F"), "tiff"),
}
_UNKNOWN_TO_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_FEW = 16
_MOST_IN_LINE = 64  # values of an array
_LONGEST_NAME = 120  # bytes of a column's name in that of a file, which may have 255 in all


def extract(path: str, folder: str, *, rows: str | None, overwrite: bool = False) -> int:
    """Write rows ``A:B``, or one, as files into ``folder``; None: the first 16.

    Encoded images are written as the files that they are, others as PNG, the rest as one line of
    JSON each. ``overwrite``: there may be something in the folder, which files may replace.

    Raises:
        OptionError: there are no such rows; or there is something in the folder.
        CacheError: the cache, or the folder, cannot be used.
    """
    cached = CachedDataset(path)
    wanted = range(len(cached))[:_FEW] if rows is None else _wanted(rows, len(cached))
    target = Path(folder)
    names = [column.name for column in cached.columns]
    files = _file_names(names)
    try:
        if not overwrite and target.is_dir() and any(target.iterdir()):
            raise OptionError(
                f"{folder} is not empty, and files in it could be replaced; give a new folder, or "
                "--overwrite"
            )
        target.mkdir(parents=True, exist_ok=True)
        with open(target / "samples.jsonl", "w", encoding="utf-8") as lines:
            for row in wanted:
                told: dict[str, Any] = {"row": row}
                for name, file, reader in zip(names, files, cached.readers, strict=True):
                    stem = f"{row:08d}-{file}"
                    encoded = reader.file(row)
                    if encoded is None:
                        told[name] = _written(reader.leaf(row), target, stem)
                    else:
                        told[name] = f"{stem}.{_suffix(encoded)}"
                        (target / told[name]).write_bytes(encoded)
                lines.write(_line(told) + "\n")
    except OSError as error:
        raise CacheError(
            f"{folder} cannot be written to: {error.strerror or error}; make room, or give another "
            "folder"
        ) from error
    of_all = f" of {len(cached):,}" if len(wanted) < len(cached) else ""
    print(f"{folder}: {len(wanted)}{of_all} samples")
    return 0


def _wanted(text: str, count: int) -> range:
    """The rows that ``text`` names, of so many; negative ones are counted from the end."""
    first, colon, last = text.partition(":")
    try:
        begin = int(first) if first else 0
        end = (int(last) if last else count) if colon else begin + 1
        if not colon and not first:
            raise ValueError
    except ValueError:
        raise OptionError(f"--rows {text}: give A:B, such as 0:16, or one number") from None
    begin += count if begin < 0 else 0
    end += count if end < 0 or (end == 0 and not colon) else 0
    if not 0 <= begin <= end <= count:
        what = f"rows 0 to {count - 1}" if count else "no rows"
        raise OptionError(f"--rows {text}: there are no such rows, since the cache has {what}")
    return range(begin, end)


def _file_names(columns: list[str]) -> list[str]:
    """A part of a file's name for each column: short, without folders, each another one."""
    found: list[str] = []
    taken: set[str] = set()
    for number, column in enumerate(columns):
        flat = column.replace("/", "-")
        name = flat.encode()[:_LONGEST_NAME].decode("utf-8", "ignore")
        if name != flat or name.casefold() in taken:  # of some file systems Image and image are one
            name = f"{name}~~{number}"  # no column's name has two tildes
        taken.add(name.casefold())
        found.append(name)
    return found


def _line(told: dict[str, Any]) -> str:
    try:
        return json.dumps(told)
    except RecursionError as error:
        raise CacheError(
            f"a sample is nested too deep to be written as JSON ({error}); read it with "
            "CachedDataset"
        ) from error


def _written(leaf: Any, folder: Path, name: str) -> Any:
    """The leaf as JSON has it; or the name of the file to which it is written."""
    if callable(getattr(leaf, "save", None)):
        suffix = _SUFFIXES.get(leaf.mode)
        if suffix is None or 0 in leaf.size:
            return _saved(np.asarray(leaf), folder, name)
        leaf.save(folder / f"{name}.{suffix}")
        return f"{name}.{suffix}"
    if isinstance(leaf, (bytes, bytearray)):
        (folder / f"{name}.bin").write_bytes(leaf)
        return f"{name}.bin"
    if isinstance(leaf, torch.Tensor):
        leaf = (leaf.float() if leaf.dtype in _UNKNOWN_TO_NUMPY else leaf).numpy()
    if isinstance(leaf, np.ndarray):
        # Of an array without values, a list may have as many empty lists as somebody wrote there.
        if math.prod(filter(None, leaf.shape)) > _MOST_IN_LINE or leaf.dtype.kind == "c":
            return _saved(leaf, folder, name)
        return leaf.tolist()
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, complex):
        return [leaf.real, leaf.imag]
    return leaf


def _suffix(file: bytes) -> str:
    try:
        return SUFFIXES[str(opened(file, FORMATS).format)]
    except (ValueError, KeyError):  # damaged: its bytes may still be of use
        return "bin"


def _saved(array: Any, folder: Path, name: str) -> str:
    np.save(folder / f"{name}.npy", array, allow_pickle=False)
    return f"{name}.npy"
