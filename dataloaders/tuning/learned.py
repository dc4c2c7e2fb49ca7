"""Keep learned choices on disk: one small JSON file for each machine, dataset and batching.

    $DATALOADERS_CACHE, else $XDG_CACHE_HOME/gpu-dataloaders, else ~/.cache/gpu-dataloaders
    └── tuned/<hash of the key>.json      the key as text, and the choice

If a file cannot be read or holds impossible values, nothing was learned. Paths of datasets and
scripts are stored as hashes, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import default_collate, default_convert

from dataloaders.errors import OptionError
from dataloaders.machine import resources
from dataloaders.machine.facts import gpu_name
from dataloaders.observing import held

_VERSION = 1
_LARGEST_FILE = 64 * 1024
_LONGEST_REPR = 4000
_DEEPEST_NESTING = 4
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PATH_NAMES = ("root", "root_dir", "data_dir", "path", "filename")
_TRANSFORM_NAMES = ("transform", "transforms", "target_transform")


class Key(NamedTuple):
    """Identifies the loaders for which a choice was learned; each part is plain text."""

    machine: str  # this rank's cores and memory; the processor and the GPU
    dataset: str  # class, length, transforms and a hash of its path, also of those within it
    batching: str  # the batch size, or the batch sampler
    collate: str
    backend: str = ""  # "": stock or prefetch; "auto": the backend is a part of the choice
    script: str = ""  # for "auto": a hash of the script's path, which stands for the step


@dataclass(frozen=True)
class Learned:
    """Holds a choice of tuning."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    batch_bytes: int = 0  # of the tensors of one batch; 0 if not known
    backend: dict[str, Any] | None = None  # its "name" and "options", for ``backend="auto"``
    gain: float = 1.0  # how many times as fast as the loader was before
    day: str = ""  # when it was learned

    @property
    def possible(self) -> bool:
        """Return whether the values have the right types and torch accepts them together."""
        counts, depth = (self.num_workers, self.batch_bytes), self.prefetch_factor
        return (
            all(type(count) is int and count >= 0 for count in counts)
            and (type(depth) is int and depth > 0 if self.num_workers else depth is None)
            and isinstance(self.gain, (int, float))
            and isinstance(self.pin_memory, bool)
        )


def cache_folder() -> Path:
    """Return the folder where this package keeps files between runs; it may not exist yet.

    Raises:
        OptionError: the user has no home, and no variable names a folder.
    """
    own = os.environ.get("DATALOADERS_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "gpu-dataloaders"
    except RuntimeError as error:  # as in containers that are started under a number
        raise OptionError(
            "no folder for caches is known, since this user has no home; set DATALOADERS_CACHE to "
            "a folder that can be written to"
        ) from error


def key_of(
    dataset: Any, batch_size: int | None, batch_sampler: Any, collate_fn: Any, backend: str = ""
) -> Key:
    """Return the key of a loader with these arguments and the name of its backend.

    Stock and prefetch have the same key, since their workers do the same.
    """
    backend = "" if backend in ("stock", "prefetch") else backend
    plain = batch_size is not None and type(batch_sampler).__name__ == "BatchSampler"
    if batch_sampler is None or plain:
        batching = str(batch_size)
    else:
        inner_size = _quietly(lambda: batch_sampler.batch_size)
        batching = f"{_class_name(batch_sampler)}({inner_size})"
    if collate_fn is None or collate_fn in (default_collate, default_convert):
        collate = "default"
    else:
        collate = getattr(collate_fn, "__qualname__", None) or _class_name(collate_fn)
        collate = f"{getattr(collate_fn, '__module__', '')}.{collate}"
    script = _hash_of([*sys.argv, ""][0]) if backend == "auto" else ""
    return Key(_machine(), _describe_dataset(dataset), batching, collate, backend, script)


def key_of_loader(loader: Any, backend: str) -> Key:
    """Return the key of a loader."""
    arguments = (loader.dataset, loader.batch_size, loader.batch_sampler, loader.collate_fn)
    return key_of(*arguments, backend)


def recall(key: Key) -> Learned | None:
    """Return the choice learned for ``key``; None if there is none."""
    try:
        path = _file_of(key)
        if path.stat().st_size > _LARGEST_FILE:
            return None
        entry = json.loads(path.read_text())
        if entry["version"] != _VERSION or entry["key"] != key._asdict():
            return None
        learned = Learned(**entry["learned"])
        return learned if learned.possible else None
    # OptionError is a ValueError.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def remember(key: Key, learned: Learned) -> Path | None:
    """Write ``learned`` for ``key`` and return the file; None if it could not be written.

    The file is written under another name, then renamed: other processes see the old or new one.
    """
    entry = {"version": _VERSION, "key": key._asdict(), "learned": asdict(learned)}
    try:
        path = _file_of(key)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(entry, indent=1, default=str) + "\n")
        os.replace(temporary, path)
    except (OSError, OptionError):
        return None
    return path


def _file_of(key: Key) -> Path:
    text = json.dumps(key._asdict(), sort_keys=True)
    name = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:24]
    return cache_folder() / "tuned" / f"{name}.json"


def _machine() -> str:
    gib = round(resources.total_memory() / 2**30)
    gpu = gpu_name() or "no GPU"
    return f"{resources.usable_cores()} cores, {resources.cpu_model()}, {gib} GiB, {gpu}"


def _describe_dataset(dataset: Any, depth: int = 0) -> str:
    parts = [_class_name(dataset), f"length {_quietly(lambda: len(dataset))}"]
    names = (*_TRANSFORM_NAMES, *_PATH_NAMES, "dataset", "datasets")
    found = {name: _quietly(partial(held, dataset, name)) for name in names}
    for name in _TRANSFORM_NAMES:
        if (transform := found[name]) is not None:
            text = _quietly(partial(repr, transform)) or _class_name(transform)
            parts.append(f"{name} {_ADDRESS.sub('0x', text)[:_LONGEST_REPR]}")
    for name in _PATH_NAMES:
        if isinstance(path := found[name], (str, os.PathLike)):
            parts.append(f"{name} {_hash_of(path)}")
    several = found["datasets"] if isinstance(found["datasets"], (list, tuple)) else ()
    inner = [one for one in (found["dataset"], *several[:8]) if one is not None]
    if inner and depth < _DEEPEST_NESTING:
        parts.append(f"of ({'; '.join(_describe_dataset(one, depth + 1) for one in inner)})")
    return ", ".join(parts)


def _hash_of(path: str | os.PathLike[str]) -> str:
    absolute = os.path.abspath(os.fspath(path))
    return hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _quietly(read: Callable[[], Any]) -> Any:
    """Return ``read()``; None if it raises, which a dataset of any kind may do."""
    try:
        return read()
    except Exception:
        return None
