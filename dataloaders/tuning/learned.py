"""What tuning has learned, on disk: one small JSON file a machine, dataset and batching.

    $DATALOADERS_CACHE, else $XDG_CACHE_HOME/gpu-dataloaders, else ~/.cache/gpu-dataloaders
    └── tuned/<hash of the key>.json      the key in clear, the choice, what it costs

A file that cannot be read, or says something impossible, counts as "nothing learned". Paths of
datasets are kept as hashes only, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import default_collate, default_convert

from dataloaders.errors import OptionError
from dataloaders.machine import resources
from dataloaders.machine.facts import gpu_name
from dataloaders.observing import held

__all__ = ["Key", "Learned", "cache_folder", "key_of", "recall", "remember"]

_VERSION = 1
_LARGEST_FILE = 64 * 1024
_LONGEST_REPR = 4000
_DEEPEST_NESTING = 4
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PATH_NAMES = ("root", "root_dir", "data_dir", "path", "filename")
_TRANSFORM_NAMES = ("transform", "transforms", "target_transform")


@dataclass(frozen=True)
class Key:
    """What a learned choice holds for; every part is plain text.

    Attributes:
        machine: this rank's cores, the processor, this rank's memory, and the GPU: what one
            process learned with the whole machine is not for each of several ranks.
        dataset: class, length, transforms and a hash of its path, through Subset and the like.
        batching: the batch size, or the batch sampler.
        collate: the collation function.
        backend: whose own options were chosen; "" where only torch's were.
    """

    machine: str
    dataset: str
    batching: str
    collate: str
    backend: str = ""


@dataclass(frozen=True)
class Learned:
    """A choice that tuning made, and what it costs.

    Attributes:
        num_workers, prefetch_factor, pin_memory: as torch's arguments.
        samples_per_second: what it reached in its trial.
        batch_bytes: the tensors of one batch; 0 if unknown.
        memory_per_worker: bytes, copy-on-write growth over an epoch included; None if unknown.
        options: of the backend, by name; None if it has none to choose.
    """

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    samples_per_second: float
    batch_bytes: int = 0
    memory_per_worker: int | None = None
    options: dict[str, int] | None = None

    @property
    def possible(self) -> bool:
        """Whether the values are of the right types and torch takes them together."""
        return (
            _is_count(self.num_workers)
            and (
                self.prefetch_factor is None
                if self.num_workers == 0
                else _is_count(self.prefetch_factor) and self.prefetch_factor != 0
            )
            and isinstance(self.pin_memory, bool)
            and isinstance(self.samples_per_second, (int, float))
            and _is_count(self.batch_bytes)
            and (self.memory_per_worker is None or _is_count(self.memory_per_worker))
            and (self.options is None or _are_counts(self.options))
        )


def cache_folder() -> Path:
    """Return where this package keeps files between runs; it may not exist yet.

    Raises:
        OptionError: the user has no home, and none of the variables says where.
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
    """Return the key of a loader with these arguments, or, which is the same, attributes.

    ``backend`` is the name of one whose own options are chosen too.
    """
    plain_batches = batch_sampler is None or (
        batch_size is not None and type(batch_sampler).__name__ == "BatchSampler"
    )
    if plain_batches:
        batching = str(batch_size)
    else:
        inner_size = _quietly(lambda: batch_sampler.batch_size)
        batching = f"{_class_name(batch_sampler)}({inner_size})"
    if collate_fn is None or collate_fn in (default_collate, default_convert):
        collate = "default"
    else:
        collate = getattr(collate_fn, "__qualname__", None) or _class_name(collate_fn)
        collate = f"{getattr(collate_fn, '__module__', '')}.{collate}"
    return Key(_machine(), _describe_dataset(dataset), batching, collate, backend)


def recall(key: Key) -> Learned | None:
    """Return what was learned for ``key``, or None."""
    try:
        path = _file_of(key)
        if path.stat().st_size > _LARGEST_FILE:
            return None
        entry = json.loads(path.read_text())
        if entry["version"] != _VERSION or entry["key"] != asdict(key):
            return None
        learned = Learned(**entry["learned"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # OptionError, too
        return None
    return learned if learned.possible else None


def remember(key: Key, learned: Learned) -> Path | None:
    """Write ``learned`` for ``key`` and return the file; None if it could not be written.

    It is written beside its place and renamed: other processes see the old file or the new one.
    """
    entry = {"version": _VERSION, "key": asdict(key), "learned": asdict(learned)}
    try:
        path = _file_of(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    except (OSError, OptionError):
        return None
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(entry, indent=1) + "\n")
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        return None
    return path


def _file_of(key: Key) -> Path:
    text = json.dumps(asdict(key), sort_keys=True)
    name = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:24]
    return cache_folder() / "tuned" / f"{name}.json"


def _machine() -> str:
    gib = round(resources.total_memory() / 2**30)
    gpu = gpu_name() or "no GPU"
    return f"{resources.usable_cores()} cores, {resources.cpu_model()}, {gib} GiB, {gpu}"


def _describe_dataset(dataset: Any, depth: int = 0) -> str:
    parts = [_class_name(dataset), f"length {_quietly(lambda: len(dataset))}"]
    for name in _TRANSFORM_NAMES:
        transform = _quietly(lambda name=name: held(dataset, name))
        if transform is not None:
            parts.append(f"{name} {_stable_repr(transform)}")
    for name in _PATH_NAMES:
        path = _quietly(lambda name=name: held(dataset, name))
        if isinstance(path, (str, os.PathLike)):
            absolute = os.path.abspath(os.fspath(path))
            digest = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:16]
            parts.append(f"{name} {digest}")
    if depth < _DEEPEST_NESTING:
        inner = _quietly(lambda: held(dataset, "dataset"))
        several = _quietly(lambda: held(dataset, "datasets"))
        if inner is not None and inner is not dataset:
            parts.append(f"of ({_describe_dataset(inner, depth + 1)})")
        if isinstance(several, (list, tuple)):
            described = (_describe_dataset(one, depth + 1) for one in several[:8])
            parts.append(f"of ({'; '.join(described)})")
    return ", ".join(parts)


def _stable_repr(value: object) -> str:
    text = _quietly(lambda: repr(value)) or _class_name(value)
    return _ADDRESS.sub("0x", text)[:_LONGEST_REPR]


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _quietly(read: Any) -> Any:
    """Return what ``read`` returns, None if it raises: a dataset may be of any kind."""
    try:
        return read()
    except Exception:
        return None


def _are_counts(options: object) -> bool:
    return isinstance(options, dict) and all(
        isinstance(name, str) and _is_count(value) for name, value in options.items()
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
