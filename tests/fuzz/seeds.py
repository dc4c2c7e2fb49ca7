"""What the fuzzer begins with: small caches of every sort of column, and a broken-off build."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors

from dataloaders.cache import Compressed, join, precompute
from helpers.cached import DTYPES, MODES, TORCH_DTYPES, Point, build, mixed

__all__ = ["BUILT_ROWS", "Built", "files", "interrupted", "joined"]

BUILT_ROWS = 7


def _samples() -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Names, samples of a cache, and options for `assemble`."""
    failures = [(1, "ValueError: it is torn"), (3, "é")]
    classes = {"classes": ["cat", ("dog", "hound")], "class_to_idx": {"cat": 0, "dog": 1, "é": -7}}
    said = {"head": ["Resize(8)"], "tail": ["Normalize()"], "attributes": classes}
    yield "mixed", mixed(3), {"failed": failures, **said}
    yield "images", [[Image.new(mode, (3, 2 + row)) for mode in MODES] for row in range(2)], {}
    yield "tensors", [[torch.zeros(2, 3).to(dtype) for dtype in TORCH_DTYPES]] * 2, {}
    yield (
        "arrays",
        [{dtype: np.ones((row, 2), dtype) for dtype in sorted(DTYPES)} for row in (1, 2)],
        {},
    )
    kinds = [3, 1.5, 1j, True, "text", b"bytes", bytearray(b"more"), [1, {"a": [None]}], None]
    yield "kinds", [tuple(kinds), tuple([None] * len(kinds))], {"fingerprint": {"dataset": "D"}}
    video = tv_tensors.Video(torch.zeros(2, 3, 4, 5, dtype=torch.uint8))
    yield (
        "tv",
        [(tv_tensors.Image(torch.rand(3, 4, 5)), tv_tensors.Mask(torch.ones(4, 5)), video)],
        {},
    )
    yield "deep", [{"a": {1: [Point((0, {"b": ()}), [torch.ones(1)])]}, "c": {}}] * 2, {}
    yield "none", [], {"failed": [(0, "torn"), (1, "too")]}
    yield "nothing", [None, None], {}
    if all(map(find_spec, ("zstandard", "hdf5plugin"))):
        for codec in ("zstd", "gzip"):
            yield codec, [_compressible(row) for row in range(80)], {"compress": Compressed(codec)}


def _compressible(row: int) -> Any:
    return {
        "fixed": np.full(400, row, "<i4"),
        "varies": np.arange(row * 30, dtype="<f4") // 9,
        "text": f"ab{row}" * 300,
        "noise": np.random.default_rng(row).bytes(20),
    }


def files(folder: Path) -> Iterator[bytes]:
    """Whole caches."""
    for name, samples, options in _samples():
        build(folder / name, samples, **options)
        yield (folder / name).read_bytes()


class Built:
    """A dataset that is built again and again: little of everything.

    Args:
        fixed: whether all rows have one shape.
    """

    classes = ("small", "large")

    def __init__(self, *, fixed: bool) -> None:
        self.fixed = fixed

    def __len__(self) -> int:
        return BUILT_ROWS

    def __getitem__(self, index: int) -> Any:
        if self.fixed:
            return {"number": index, "array": np.full((70, 70), index / 7)}
        if index == 4:
            raise ValueError("it is torn")
        return {"number": index, "text": "a" * index, "array": np.full((index % 2, 3), index)}


def joined(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """Caches that are joined, and the shards of each."""
    for fixed in (False, True):
        path = folder / f"{'fixed' if fixed else 'varies'}.h5"
        dataset: Any = Built(fixed=fixed)
        for rank in range(3):
            precompute(dataset, path, num_workers=0, on_error="skip", shard=(rank, 3), wait=False)
        join(path)
        yield path, sorted(path.with_suffix(".parts").glob("*.h5"))


def interrupted(folder: Path, *, fixed: bool = False) -> dict[str, bytes]:
    """The files of a build that was broken off after two of its parts."""

    def broken_off(progress: Any) -> None:
        if progress.samples_done >= 4:
            raise KeyboardInterrupt

    path = folder / "built.h5"
    try:
        precompute(
            Built(fixed=fixed), path, num_workers=0, rows=2, on_error="skip", progress=broken_off
        )
    except KeyboardInterrupt:
        pass
    build_folder = folder / "built.parts"
    found = {each.name: each.read_bytes() for each in sorted(build_folder.iterdir())}
    shutil.rmtree(build_folder)
    return found
