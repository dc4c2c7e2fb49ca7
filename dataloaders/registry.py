"""Find backends by name: one table of "module:Class" targets and install commands.

A backend's module is imported when the backend is used, never before. The backends of this package
are loaded from its own installation, even if the script's folder has a ``backends`` package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from dataloaders.errors import MissingDependency, UnknownBackend

if TYPE_CHECKING:
    from dataloaders.backend import Backend

__all__ = ["ENTRY_POINTS", "Entry", "entries", "load"]

ENTRY_POINTS = "dataloaders.backends"
"""The entry point group through which a third-party package registers a backend."""

_BACKENDS_FOLDER = Path(__file__).resolve().parent.parent / "backends"


@dataclass(frozen=True)
class Entry:
    """One backend that can be named.

    Attributes:
        name: what the user writes, as in ``backend="stock"``.
        target: "module:Class".
        summary: what it does, in one line.
        needs: the distribution that must be installed, or None.
        install: the exact command that installs it, or None.
        origin: "dataloaders", or the third party's distribution.
    """

    name: str
    target: str
    summary: str
    needs: str | None = None
    install: str | None = None
    origin: str = "dataloaders"


_OURS = {
    entry.name: entry
    for entry in (
        Entry(
            "stock",
            "backends.stock:Stock",
            "torch's own workers and pinning; in-memory tensors by one gather a batch",
        ),
        Entry(
            "prefetch",
            "backends.prefetch:Prefetch",
            "any other backend, run ahead of the step and copied on a CUDA stream of its own",
        ),
        Entry(
            "h5",
            "backends.h5:H5",
            "the deterministic part of each sample from a cache, one HDF5 file",
            needs="h5py",
            install="pip install h5py",
        ),
        Entry(
            "dali",
            "backends.dali:Dali",
            "decoding and augmentation by NVIDIA DALI, of the dataset and transforms as they stand",
            needs="NVIDIA DALI",
            install="pip install nvidia-dali-cuda130, with CUDA 12 nvidia-dali-cuda120",
        ),
        Entry(
            "synthetic",
            "backends.synthetic:Synthetic",
            "copies of one real batch, made once on the device and reissued",
        ),
    )
}


def entries() -> dict[str, Entry]:
    """Return every backend that can be named: built-in ones, then those of installed packages."""
    by_name = dict(_OURS)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.name not in by_name:
            origin = point.dist.name if point.dist is not None else "unknown"
            by_name[point.name] = Entry(
                point.name, point.value, f"from the package {origin}", origin=origin
            )
    return by_name


def load(name: str) -> type[Backend]:
    """Import and return the backend class called ``name``.

    Raises:
        UnknownBackend: no backend has that name.
        MissingDependency: its module needs a package that is not installed.
    """
    entry = _OURS.get(name) or entries().get(name)
    if entry is None:
        known = ", ".join(entries())
        raise UnknownBackend(f"backend={name!r} is not a backend; the names are: {known}")
    module_name, _, class_name = entry.target.partition(":")
    try:
        ours = entry.origin == "dataloaders"
        module = importlib.import_module(_installed_name(module_name) if ours else module_name)
    except MissingDependency:
        raise
    except ImportError as error:
        hint = f"; install it with: {entry.install}" if entry.install else ""
        raise MissingDependency(
            f"backend={name!r} needs {entry.needs or error.name or 'a package'}, "
            f"which cannot be imported ({error}){hint}"
        ) from error
    backend: type[Backend] = getattr(module, class_name)
    return backend


def _installed_name(module: str) -> str:
    """Return a name that imports this package's ``backends.x``, whatever else has that name.

    ``backends`` is a namespace package: a script's own ``backends`` folder without an
    ``__init__.py`` is searched as well, and may have a module of the same name.
    """
    package = sys.modules.get("backends") or importlib.util.find_spec("backends")
    paths = getattr(package, "__path__", None) or getattr(package, "submodule_search_locations", [])
    spec = PathFinder.find_spec(module, [str(path) for path in paths or ()])
    origin = None if spec is None else spec.origin
    if origin is not None and Path(origin).resolve().is_relative_to(_BACKENDS_FOLDER):
        return module
    return module.replace("backends", "dataloaders._installed_backends", 1)
