"""What is fuzzed: each target reads an input in every way that the package has.

A target's `run` returns for a value and for a documented error alike, and fails (an assertion,
another exception) for what must not be. It leaves nothing behind for the next input.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
from PIL import ImageCms  # noqa: F401  # Pillow loads it for the first image of mode LAB
from torch.utils.data import default_collate
from torchvision.transforms import v2

from backends.h5.batches import batches_of
from backends.h5.draws import Draws
from dataloaders.cache import CachedDataset, precompute, verify
from dataloaders.cache.format.changes import changes
from dataloaders.cache.sample.sample import leaf_paths
from dataloaders.cli import main
from dataloaders.errors import CacheError
from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators
from fuzz import mutation, seeds
from fuzz.guard import refusals_aside
from helpers.compare import same
from helpers.hostile import attempts, check_places

__all__ = ["TARGETS", "Target"]

Mutate: TypeAlias = Callable[[bytes, Random, mutation.Raw], bytes]


@dataclass(frozen=True)
class Target:
    """Something that reads files.

    Attributes:
        run: reads an input; its folder is empty, and may be written to.
        seeds: inputs to begin with, made in a folder.
        mutate: makes another input of one.
        audited: whether other files and code are findings; a build asks for versions and the like.
    """

    run: Callable[[bytes, Path], None]
    seeds: Callable[[Path], Iterable[bytes]]
    mutate: Mutate
    audited: bool = True


def _file(data: bytes, folder: Path) -> None:
    """A whole cache: opened, read to the last row, and verified."""
    path = folder / "a.h5"
    path.write_bytes(data)
    with refusals_aside():
        cached = CachedDataset(path)
        check_places(cached.index, len(data))
        for message in attempts(cached):
            assert len(message) < 3000
        changes(cached.index.fingerprint, {"f": 1, "dataset": "D"}, "when it was built")
    for damage in verify(path):
        assert 0 <= damage.offset <= damage.offset + damage.bytes <= len(data)


def _shown(data: bytes, folder: Path) -> None:
    """What the command line makes of a cache: info."""
    path = folder / "a.h5"
    path.write_bytes(data)
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(shown):
        main(["cache", "info", str(path)])
    shown.flush()
    text = shown.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]
    odd = {each for each in text if unicodedata.category(each) in ("Cc", "Cs")} - {"\n"}
    assert not odd, f"these reach the terminal: {odd!r}"


_CROP = v2.Compose([v2.RandomCrop(2), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def _batches(data: bytes, folder: Path) -> None:
    """Whole batches, which are those that torch collates."""
    path = folder / "a.h5"
    path.write_bytes(data)
    with refusals_aside():
        plain = CachedDataset(path)
        paths = _image_leaves(plain)
        cached = CachedDataset(path, tails=[(keys, _CROP) for keys in paths])
        made = batches_of(cached)
        if isinstance(made, str):
            return
        rows = list(range(min(len(cached), 5)))[::-1]
        seeding = words(3, 0, np.arange(len(rows)))
        found = made.of(rows, Draws(seeding))
        samples = []
        for row, (a, b, c, d) in zip(rows, seeding.tolist(), strict=True):
            seed_generators((a, b, c, d))
            samples.append(cached[row])
        wanted = default_collate(samples)
        assert found is None or same(found, wanted, strides=False)


def _image_leaves(cached: CachedDataset) -> list[tuple[Any, ...]]:
    structure = cached.index.structure
    paths = [] if structure is None or not len(cached) else leaf_paths(structure)
    return [
        path
        for path, column in zip(paths, cached.columns, strict=False)
        if column.variants[0][0].startswith("image:")
    ]


class _Build:
    """A build that is gone on with in a folder that was torn, or that somebody else wrote."""

    def seeds(self, folder: Path) -> Iterable[bytes]:
        for fixed in (False, True):
            whole = seeds.interrupted(folder, fixed=fixed)
            if fixed:
                whole["fixed"] = b""  # says which dataset it is of
            yield mutation.packed(whole)
        yield mutation.packed({"build.json": whole["build.json"]})

    def run(self, data: bytes, folder: Path) -> None:
        path = folder / "built.h5"
        building = folder / "built.parts"
        building.mkdir()
        files = mutation.unpacked(data)
        fixed = files.pop("fixed", None) is not None
        for name, contents in files.items():
            (building / name).write_bytes(contents)
        try:
            self._precompute(path, fixed)
        except CacheError:
            shutil.rmtree(building)
            self._precompute(path, fixed)
        assert len(CachedDataset(path)) <= seeds.BUILT_ROWS
        assert not verify(path)

    def _precompute(self, path: Path, fixed: bool, **options: Any) -> None:
        dataset = seeds.Built(fixed=fixed)
        precompute(dataset, path, num_workers=0, rows=2, on_error="skip", **options)


class _Joined:
    """A joined cache beside the shards that it names: opened, read, and verified."""

    def __init__(self) -> None:
        self._shards: dict[str, bytes] = {}

    def seeds(self, folder: Path) -> Iterable[bytes]:
        for path, shards in seeds.joined(folder):
            self._shards.update(
                {str(shard.relative_to(folder)): shard.read_bytes() for shard in shards}
            )
            yield path.read_bytes()

    def run(self, data: bytes, folder: Path) -> None:
        for name, contents in self._shards.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(contents)
        path = folder / "a.h5"
        path.write_bytes(data)
        with refusals_aside():
            for message in attempts(CachedDataset(path)):
                assert len(message) < 3000
        with refusals_aside():
            for damage in verify(path):
                assert 0 <= damage.offset <= damage.offset + damage.bytes


_BUILD = _Build()
_JOINED = _Joined()

TARGETS = {
    "file": Target(_file, seeds.files, mutation.file),
    "shown": Target(_shown, seeds.files, mutation.file),
    "batches": Target(_batches, seeds.files, mutation.file),
    "joined": Target(_JOINED.run, _JOINED.seeds, mutation.file),
    "build": Target(_BUILD.run, _BUILD.seeds, mutation.folder, audited=False),
}
"""By name: all of a file, the command line, batches, a file of shards, and builds."""
