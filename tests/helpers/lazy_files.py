"""Datasets that open their file when they are first read, as is usual with HDF5, LMDB and zip.

Where the handle is kept (`PLACES`) and what it is a handle of (`STORES`) vary. Sample i is an image
whose every byte is i, so that a sample read at another's place shows.
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import Compose, Normalize, ToTensor

COUNT = 120
_SIDE = 8
_BYTES = _SIDE * _SIDE * 3

_OPENED: list[tuple[int, Any]] = []
_GLOBAL: dict[str, Any] = {}
_LOCAL = threading.local()


def opened_here() -> bool:
    """Whether a dataset has opened its file in this process."""
    return any(process == os.getpid() for process, _ in _OPENED)


def forget() -> None:
    """Close what was opened here, and drop what modules and threads hold: for the next test."""
    for process, handle in _OPENED:
        if process == os.getpid():
            handle.close()
    _OPENED.clear()
    _GLOBAL.clear()
    _LOCAL.__dict__.clear()


def _write_plain(path: Path) -> None:
    path.write_bytes(b"".join(bytes([index]) * _BYTES for index in range(COUNT)))


def _read_plain(handle: Any, index: int) -> Any:
    handle.seek(index * _BYTES)
    return handle.read(_BYTES)


def _write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(COUNT):
            archive.writestr(str(index), bytes([index]) * _BYTES)


def _open_hdf5(path: Path) -> Any:
    import h5py

    return h5py.File(path)


def _write_hdf5(path: Path) -> None:
    import h5py

    rows = np.arange(COUNT, dtype=np.uint8)[:, None].repeat(_BYTES, 1)
    with h5py.File(path, "w") as file:
        file.create_dataset("rows", data=rows, chunks=(4, _BYTES), compression="gzip")


def _open_lmdb(path: Path) -> Any:
    import lmdb

    return lmdb.open(str(path), readonly=True, lock=False)


def _write_lmdb(path: Path) -> None:
    import lmdb

    with lmdb.open(str(path)) as env, env.begin(write=True) as transaction:
        for index in range(COUNT):
            transaction.put(str(index).encode(), bytes([index]) * _BYTES)


def _read_lmdb(handle: Any, index: int) -> Any:
    with handle.begin() as transaction:
        return transaction.get(str(index).encode())


_BUFFER = 5 * _BYTES  # several samples are in it, most of them are not
STORES: dict[str, tuple[Callable[..., Any], ...]] = {
    "unbuffered": (_write_plain, partial(open, mode="rb", buffering=0), _read_plain),
    "buffered": (_write_plain, partial(open, mode="rb", buffering=_BUFFER), _read_plain),
    "zip": (_write_zip, zipfile.ZipFile, lambda handle, index: handle.read(str(index))),
    "hdf5": (_write_hdf5, _open_hdf5, lambda handle, index: handle["rows"][index].tobytes()),
    "lmdb": (_write_lmdb, _open_lmdb, _read_lmdb),
}
"""Each: what writes the file, what opens it, and what reads a sample's bytes."""


class _Below:
    """What a dataset has in an attribute, with the handle in one of its own."""

    handle: Any = None


PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "self": vars,
    "below": lambda dataset: vars(dataset.below),
    "global": lambda dataset: _GLOBAL,
    "thread": lambda dataset: _LOCAL.__dict__,
}


class LazyImages(Dataset[Any]):
    """(image, index), by a chain that every backend can serve."""

    def __init__(self, store: str, place: str, folder: Path) -> None:
        self.store, self.path = store, folder / store
        STORES[store][0](self.path)
        self.place = place
        self.below = _Below()
        self.transform = Compose([ToTensor(), Normalize((0.0,) * 3, (1.0,) * 3)])

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        holder = PLACES[self.place](self)
        _, opened, read = STORES[self.store]
        if holder.get("handle") is None:
            holder["handle"] = opened(self.path)
            _OPENED.append((os.getpid(), holder["handle"]))
        row = np.frombuffer(read(holder["handle"], index), np.uint8)
        return self.transform(Image.fromarray(row.reshape(_SIDE, _SIDE, 3))), index


def wrong_samples(batches: Any) -> list[int]:
    """The samples of an epoch that are not their own; an epoch that is not whole fails."""
    images, indices = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert sorted(indices.tolist()) == list(range(COUNT))
    wanted = indices[:, None].expand(-1, _BYTES)
    same = (images.flatten(1) * 255).round().long() == wanted
    return indices[~same.all(1)].tolist()  # type: ignore[no-any-return]
