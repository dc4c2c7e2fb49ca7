"""What is fuzzed: each target reads an input in every way that the package has.

It returns for a value and for a documented error alike, and fails (an assertion, another exception)
for what must not be.
"""

from __future__ import annotations

import contextlib
import io
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageCms  # noqa: F401  # Pillow loads it for the first image of mode LAB
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

from backends.h5.batches import proved
from backends.h5.draws import Draws
from dataloaders.cache import CachedDataset, Compressed, join, precompute
from dataloaders.cache.sample.sample import leaf_paths
from dataloaders.cli import main
from dataloaders.errors import CacheError, MissingDependency
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.words import words
from helpers.cached import DTYPES, MODES, TORCH_DTYPES, Point, build, mixed
from helpers.compare import same
from helpers.datasets import Made
from helpers.hostile import said_of

__all__ = ["TARGETS", "sound_files"]

_SHARDS: dict[str, bytes] = {}  # of the joined files, which are beside every input


def sound_files(folder: Path) -> Iterator[bytes]:
    """Small caches of every sort of column: single, compressed, and joined of shards."""
    classes = {"classes": ["cat", ("dog", "hound")], "class_to_idx": {"cat": 0, "dog": 1, "é": -7}}
    failures = [(1, "ValueError: it is torn"), (3, "é")]
    tv = [torch.zeros(2, 3, 4, 5, dtype=torch.uint8), torch.rand(3, 4, 5), torch.ones(4, 5)]
    kinds = [3, 1.5, 1j, True, "text", b"bytes", bytearray(b"more"), [1, {"a": [None]}], None]
    every = {
        "kinds": tuple(kinds),
        "images": [Image.new(mode, (3, 2)) for mode in MODES],
        "tensors": [torch.zeros(2, 3).to(dtype) for dtype in TORCH_DTYPES],
        "arrays": tuple(np.ones((1, 2), dtype) for dtype in sorted(DTYPES)),
        "tv": [tv_tensors.Video(tv[0]), tv_tensors.Image(tv[1]), tv_tensors.Mask(tv[2])],
        "deep": {1: [Point((0, {"b": ()}), [torch.ones(1)])], "c": {}},
    }
    said = {"head": ["Resize(8)"], "tail": ["Normalize()"], "fingerprint": {"f": 1}}
    for samples, options in (
        (mixed(3), {"failed": failures, "attributes": classes, **said}),
        ([every, {**every, "kinds": (None,) * len(kinds)}], {}),
        ([], {"failed": failures}),
        ([None, None], {}),
        *(([_compressible(row) for row in range(80)], {"compress": Compressed(codec)})
          for codec in ("zstd", "gzip")),
    ):  # fmt: skip
        build(folder / "a.h5", samples, **options)
        yield (folder / "a.h5").read_bytes()
    for name, sample in (
        ("fixed", lambda index: {"number": index, "array": np.full((70, 70), index / 7)}),
        ("varies", lambda index: {"text": "a" * index, "array": np.full((index % 2, 3), index)}),
    ):
        path = folder / f"{name}.h5"
        for rank in range(3):
            precompute(Made(sample, 7), path, num_workers=0, shard=(rank, 3), wait=False)
        join(path)
        shards = path.with_suffix(".parts").glob("*.h5")
        _SHARDS.update({str(each.relative_to(folder)): each.read_bytes() for each in shards})
        yield path.read_bytes()


def _compressible(row: int) -> Any:
    return {
        "fixed": np.full(400, row, "<i4"),
        "varies": np.arange(row * 30, dtype="<f4") // 9,
        "text": f"ab{row}" * 300,
        "noise": np.random.default_rng(row).bytes(20),
    }


def _put(data: bytes, folder: Path) -> Path:
    for name, contents in {"a.h5": data, **_SHARDS}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(contents)
    return folder / "a.h5"


def _file(data: bytes, folder: Path) -> bool:
    """A cache: opened, read to the last row, and verified; returns whether there was no error."""
    return not said_of(_put(data, folder), data, most=300 << 20)


def _shown(data: bytes, folder: Path) -> bool:
    """What the command line makes of a cache: info."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(shown):
        status = main(["cache", "info", str(_put(data, folder))])
    shown.flush()
    text = shown.buffer.getvalue().decode("utf-8")  # type: ignore[attr-defined]
    odd = {each for each in text if unicodedata.category(each) in ("Cc", "Cs")} - {"\n"}
    assert not odd, f"these reach the terminal: {odd!r}"
    return status == 0


_CROP = v2.Compose([v2.RandomCrop(2), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def _batches(data: bytes, folder: Path) -> bool:
    """Whole batches, which are those that torch collates."""
    path = _put(data, folder)
    try:
        plain = CachedDataset(path)
        structure = plain.index.structure
        paths = [] if structure is None or not len(plain) else leaf_paths(structure)
        images = [
            keys
            for keys, column in zip(paths, plain.columns, strict=False)
            if column.variants[0][0].startswith("image:")
        ]
        cached = CachedDataset(path, tails=[(keys, _CROP) for keys in images])
        made = proved(cached)
        if isinstance(made, str):
            return False
        rows = list(range(min(len(cached), 5)))[::-1]
        seeding = words(3, 0, np.arange(len(rows)))
        try:
            found = made.of(rows, Draws(seeding))
        except Exception as error:  # then it is collated sample by sample
            if type(error).__name__ != "NotThisBatch":
                raise
            found = None
        samples = []
        for row, (a, b, c, d) in zip(rows, seeding.tolist(), strict=True):
            seed_generators((a, b, c, d))
            samples.append(cached[row])
        assert found is None or same(found, default_collate(samples), strides=False)
    except (CacheError, MissingDependency):
        return False
    return True


TARGETS: dict[str, Callable[[bytes, Path], bool]] = {
    "file": _file,
    "shown": _shown,
    "batches": _batches,
}
"""By name: all of a file, the command line, and batches; each writes to an empty folder."""
