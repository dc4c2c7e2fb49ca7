"""Digests of what a dataset holds for each sample: labels, paths, boxes, arrays, a table.

ImageFolder of 1,000 samples ──attributes of length 1,000──> {"values of targets": "5e1f...", ...}

The few samples that a study reads do not show that other samples have new labels. These do.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from dataloaders.transforms.find import find_values

_HASHED_BYTES = 16 << 20  # of an array: of a larger one, rows evenly spread
_HASHED_INSIDE = 1 << 12  # of an array in a list
_HASHED_ENTRIES = 100_000  # of a list


def digests_of_values(dataset: Any) -> dict[str, str]:
    """Return a digest of each attribute of ``dataset`` with one entry a sample, by its name.

    Attributes of one name, as in a ConcatDataset, share a digest. Left out are those that hold
    anything but numbers, text, paths, dates, arrays and containers of these, and lists with a
    None, which may be filled as samples are read. The folder that all paths are in does not count:
    a dataset may be moved.
    """
    found: dict[str, Any] = {}
    for name, value in find_values(dataset):
        with suppress(Exception):  # whatever a user's attribute holds
            data = _bytes_of(value, _HASHED_BYTES)
            key = f"values of {name[:64]}"
            found.setdefault(key, hashlib.blake2b(digest_size=16)).update(data)
    return {key: digest.hexdigest() for key, digest in found.items()}


def _bytes_of(value: Any, most: int) -> bytes:
    if isinstance(value, torch.Tensor):
        is_brain = value.dtype == torch.bfloat16  # which NumPy does not have; nor has it a GPU's
        value = (value.detach().view(torch.int16) if is_brain else value.detach()).numpy()
    elif hasattr(value, "to_numpy"):  # pandas, polars
        value = value.to_numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        every = max(1, -(-value.nbytes // most))
        spread = np.atleast_1d(value)[::every]
        return f"{value.dtype} {value.shape}".encode() + spread.tobytes()
    entries = value.tolist() if isinstance(value, np.ndarray) else value
    entries = list(entries.items() if isinstance(entries, dict) else entries)
    if any(entry is None for entry in entries):
        raise TypeError("not complete yet")
    entries = entries[:: max(1, -(-len(entries) // _HASHED_ENTRIES))]
    texts = list(map(_first_text, entries))
    folder, slash, _ = os.path.commonprefix(texts).rpartition("/")  # noqa: RUF071
    text = json.dumps(entries, default=_plain)
    return text.replace(json.dumps(folder + slash)[1:-1], "").encode() if slash else text.encode()


def _first_text(entry: Any) -> str:
    if isinstance(entry, (str, os.PathLike)):
        return os.fspath(entry)
    members = entry.values() if isinstance(entry, dict) else entry
    is_nested = isinstance(entry, (list, tuple, dict))
    return next(filter(None, map(_first_text, members)), "") if is_nested else ""


def _plain(value: Any) -> Any:
    """Return something that JSON has in place of ``value``; TypeError: there is nothing."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return hashlib.blake2b(_bytes_of(value, _HASHED_INSIDE), digest_size=16).hexdigest()
    if isinstance(value, np.generic):
        return value.item()
    return value.isoformat() if hasattr(value, "isoformat") else os.fspath(value)
