"""Datasets that open their file when they are first read, as is usual with HDF5, LMDB, zip and tar.

Where the handle is kept (`PLACES`) and what it is a handle of (`STORES`) vary. Sample i is an image
whose every byte is i, so that a sample read at another's place shows.
"""

from __future__ import annotations

import io
import os
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import Compose, Normalize, ToTensor

__all__ = ["PLACES", "STORES", "LazyImages", "forget", "opened_here", "wrong_samples"]

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


class _Plain:
    buffering = 0

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(b"".join(bytes([index]) * _BYTES for index in range(COUNT)))

    def open(self) -> Any:
        return open(self.path, "rb", buffering=self.buffering)

    def read(self, handle: Any, index: int) -> bytes:
        handle.seek(index * _BYTES)
        found: bytes = handle.read(_BYTES)
        return found


class _Buffered(_Plain):
    buffering = 5 * _BYTES  # several samples are in the buffer, most of them are not


class _Zip:
    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path, "w") as archive:
            for index in range(COUNT):
                archive.writestr(str(index), bytes([index]) * _BYTES)

    def open(self) -> Any:
        return zipfile.ZipFile(self.path)

    def read(self, handle: Any, index: int) -> bytes:
        found: bytes = handle.read(str(index))
        return found


class _Tar:
    def __init__(self, path: Path) -> None:
        self.path = path
        with tarfile.open(path, "w") as archive:
            for index in range(COUNT):
                info = tarfile.TarInfo(str(index))
                info.size = _BYTES
                archive.addfile(info, io.BytesIO(bytes([index]) * _BYTES))

    def open(self) -> Any:
        return tarfile.open(self.path)

    def read(self, handle: Any, index: int) -> bytes:
        found: bytes = handle.extractfile(str(index)).read()
        return found


class _Hdf5:
    def __init__(self, path: Path) -> None:
        import h5py

        self.path = path
        rows = np.arange(COUNT, dtype=np.uint8)[:, None].repeat(_BYTES, 1)
        with h5py.File(path, "w") as file:
            file.create_dataset("rows", data=rows, chunks=(4, _BYTES), compression="gzip")

    def open(self) -> Any:
        import h5py

        return h5py.File(self.path, "r")

    def read(self, handle: Any, index: int) -> bytes:
        found: bytes = handle["rows"][index].tobytes()
        return found


class _Lmdb:
    def __init__(self, path: Path) -> None:
        import lmdb

        self.path = path
        with lmdb.open(str(path)) as env, env.begin(write=True) as transaction:
            for index in range(COUNT):
                transaction.put(str(index).encode(), bytes([index]) * _BYTES)

    def open(self) -> Any:
        import lmdb

        return lmdb.open(str(self.path), readonly=True, lock=False)

    def read(self, handle: Any, index: int) -> bytes:
        with handle.begin() as transaction:
            found: bytes = transaction.get(str(index).encode())
            return found


STORES: dict[str, Callable[[Path], Any]] = {
    "unbuffered": _Plain,
    "buffered": _Buffered,
    "zip": _Zip,
    "tar": _Tar,
    "hdf5": _Hdf5,
    "lmdb": _Lmdb,
}


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
        self.store = STORES[store](folder / store)
        self.place = place
        self.below = _Below()
        self.transform = Compose([ToTensor(), Normalize((0.0,) * 3, (1.0,) * 3)])

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        holder = PLACES[self.place](self)
        if holder.get("handle") is None:
            holder["handle"] = self.store.open()
            _OPENED.append((os.getpid(), holder["handle"]))
        row = np.frombuffer(self.store.read(holder["handle"], index), np.uint8)
        return self.transform(Image.fromarray(row.reshape(_SIDE, _SIDE, 3))), index


def wrong_samples(batches: Any) -> list[int]:
    """The samples of an epoch that are not their own; an epoch that is not whole fails."""
    images, indices = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert sorted(indices.tolist()) == list(range(COUNT))
    wanted = indices[:, None].expand(-1, _BYTES)
    same = (images.flatten(1) * 255).round().long() == wanted
    return indices[~same.all(1)].tolist()  # type: ignore[no-any-return]
