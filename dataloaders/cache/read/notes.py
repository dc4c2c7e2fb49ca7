"""Remember which cache holds a dataset's samples, so that finding it again reads none of them.

    class, attributes, transforms ──pickled, hashed──> 5e1f...json: 09ab...h5 is the cache
    globals that their code names ──┘                  └── the files that this depends on

A note is valid while each of these files is unchanged: those that samples were read from, those
that the dataset's attributes name, and the loaded modules, whose code a pickle does not contain. A
pickle has a class by its name, so the file of its module is hashed, too, and so is the folder in
which relative paths begin. A dataset that cannot be pickled, or takes more than 256 MiB, has no
note.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import pickle
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from dataloaders.cache.format.disk import open_plain
from dataloaders.observing.opened import Files, add, unchanged

_LARGEST = 1 << 28  # bytes of a pickle: to hash more takes longer than to read some samples
_OBJECTS = 100  # of the dataset, whose attributes may name files
_CachedFunction = type(functools.lru_cache(id))
_INSTALLED = re.compile("/(site|dist)-packages/")
# Of these packages only the module with the version counts; this package makes no samples.
_VERSIONED = {*sys.stdlib_module_names, "torch", "torchvision", "PIL", "numpy", "dataloaders"}


class Note:
    """The note in ``folder`` on the cache of ``dataset``, which also depends on ``others``."""

    def __init__(self, folder: Path, dataset: Any, others: Any) -> None:
        self._path: Path | None = None
        state = _State()
        with suppress(Exception):  # somebody's own classes: a lambda, an open file, anything
            state.dump((sys.version, os.getcwd(), others, dataset))
            for code in state.code:  # which grows meanwhile
                state.dump(_read_by(code))
            self._path = folder / f"{state.hash.hexdigest()[:24]}.json"
        self._held = state.held

    def recall(self) -> Path | None:
        """Return the path of the cache; None: it is not known, or does not exist."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            with open(open_plain(self._path, "delete it")) as file:  # type: ignore[arg-type]
                says = json.load(file)
            path = self._path.with_name(says["cache"])  # type: ignore[union-attr]
            if unchanged(says["files"]) and path.exists():
                return path
        return None

    def write(self, path: Path, opened: Files) -> None:
        """Remember ``path``, a file in the folder; ``opened`` are those that samples came from."""
        modules = _files_of_modules()
        # A module that changed after this process began may not be the code that is loaded.
        if self._path is None or any(time_ns >= _began_ns() for _, time_ns in modules.values()):
            return
        unfinished = self._path.with_suffix(f".{os.getpid()}.tmp")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            files = {**opened, **self._held, **modules}
            unfinished.write_text(json.dumps({"cache": path.name, "files": files}))
            unfinished.rename(self._path)


class _State(pickle.Pickler):
    """Pickles into a hash, and collects the files and folders that attributes name."""

    def __init__(self) -> None:
        # Large arrays are hashed as views; inside the pickle they would be copied.
        super().__init__(self, protocol=5, buffer_callback=lambda each: self.write(each.raw()))
        self.hash = hashlib.sha256()
        self.held: Files = {}
        self.code: list[Any] = []  # that it has by name
        self._bytes = self._objects = 0

    def write(self, data: Any) -> None:
        self._bytes += len(data)
        if self._bytes > _LARGEST:
            raise pickle.PicklingError("too large")
        self.hash.update(data)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, np.ndarray)) and value.nbytes > _LARGEST:
            raise pickle.PicklingError("too large, and copied if it is not contiguous")
        if isinstance(value, torch.Tensor):  # else with the address of its memory
            return np.asarray, (value.detach().cpu().numpy(),)
        if isinstance(value, (type, FunctionType, _CachedFunction)):
            if value.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
                raise pickle.PicklingError("code of a notebook: no file changes with it")
            file = _own_file(value.__module__)
            if file is not None and value not in self.code:
                self.code.append(value)
                self.write(os.fsencode(file))
        elif self._objects < _OBJECTS:
            self._objects += 1
            for each in getattr(value, "__dict__", {}).values():
                if isinstance(each, (str, os.PathLike)):
                    add(self.held, each)
        return NotImplemented


def _read_by(code: Any) -> list[Any]:
    """Return what a class or a function reads besides its arguments, such as a script's options.

    These are attributes of the class, globals, also of modules among them, and variables of the
    environment.
    """
    found: list[Any] = []
    members: list[tuple[str, Any]] = [("", code)]
    if isinstance(code, type):
        kinds = [kind for kind in code.__mro__ if _own_file(kind.__module__)]
        members = [member for kind in kinds for member in vars(kind).items()]
    for name, member in members:
        function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)))
        if not isinstance(function, FunctionType):
            if not (name.startswith(("__", "_abc_")) or hasattr(member, "__get__")):
                found.append((name, member))
            continue
        names, spaces = _names_in(function.__code__), [function.__globals__]
        for space in spaces:
            for name in sorted(names & space.keys()):
                value = space[name]
                if not isinstance(value, ModuleType):
                    found.append((name, value))
                elif _own_file(value.__name__) and not any(vars(value) is one for one in spaces):
                    spaces.append(vars(value))
        found += [(name, os.environ[name]) for name in sorted(names & os.environ.keys())]
    # A set of texts has another order in each process.
    is_set = (set, frozenset)
    return [(n, sorted(map(repr, each)) if isinstance(each, is_set) else each) for n, each in found]


def _names_in(code: CodeType) -> set[str]:
    """Return the names and texts in ``code``; other texts than names do no harm."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    texts = (each for each in code.co_consts if isinstance(each, str))
    return set(code.co_names).union(texts, *map(_names_in, inner))


def _is_versioned(module: str) -> bool:
    return module.partition(".")[0] in _VERSIONED


def _own_file(module: str) -> str | None:
    """Return the file of a module of the user's own; None: it is of an installed package."""
    file: str | None = getattr(sys.modules.get(module), "__file__", None)
    if file is None or _is_versioned(module) or _INSTALLED.search(file):
        return None
    return os.path.abspath(file)


def _files_of_modules() -> Files:
    """Return the files of all modules, except most of those in `_VERSIONED`."""
    found: Files = {}
    for name, module in list(sys.modules.items()):
        if not _is_versioned(name) or name.endswith("version"):
            add(found, getattr(module, "__dict__", {}).get("__file__"))
    return found


def _began_ns() -> float:
    """Return when this process began; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ago = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
    return (time.time() - ago) * 1e9
