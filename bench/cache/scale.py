"""What does a cache of ten million rows in two thousand parts take, besides reading its rows?"""

from __future__ import annotations

import io
import multiprocessing
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.h5 import H5
from bench.harness import Result, Samples, Scale, case
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute, verify
from dataloaders.cache.build.joining import combined
from dataloaders.cache.build.parts import part_at
from dataloaders.cache.format.index import Index
from dataloaders.cli.cache_info import info
from dataloaders.samplers import BlockShuffle

BATCH, MEMORY_MIB = 256, 64.0
BARS = {
    "open": 0.050,
    "first batch of backend='h5', one part": 0.050,
    "first batch of backend='h5'": 0.100,
    "map every part, reading four rows of each": 2.0,
    "info": 0.100,
    "verify": 5.0,
}
"""Seconds at most. What adds memory may add `MEMORY_MIB` at most."""
BLOCKS, TORCHS = (
    f"indices of a shuffled epoch, {of}" for of in ("BlockShuffle", "torch's sampler")
)


def small(index: int) -> Any:
    """Return a row of a few bytes."""
    return np.full(4, index % 251, np.uint8), index


def make_parts(path: Path, parts: int, rows: int) -> None:
    """Build the first part; make the others of its bytes, each with a first sample of its own."""
    precompute(Samples(small, rows), path, num_workers=0)
    index = Index.parse(path)
    folder = path.with_suffix(".parts")
    folder.mkdir()
    rest = path.read_bytes()[index.user_block :]
    for number in range(parts):
        says = {**index.fingerprint, "length": parts * rows, "first": number * rows}
        block = replace(index, fingerprint=says).encode()
        (folder / f"{number * rows:05d}.h5").write_bytes(block + rest)
    path.unlink()


def own_mib() -> float:
    """Return what this process has in memory, pages of files left out, which all share."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 2**10


def measured(one: Path, path: Path, length: int) -> dict[str, float]:
    """Seconds, and MiB that opening and reading add; in a process that did nothing before.

    ``one`` is a cache of one part, ``path`` that of ``length`` rows in many.
    """
    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        before, started = own_mib(), time.perf_counter()
        result = call()
        found[name] = time.perf_counter() - started
        found[f"{name}, MiB"] = own_mib() - before
        return result

    dataset = Samples(small, length)
    torch.arange(8).tolist()
    cached = timed("open", lambda: CachedDataset(path))
    of_one = DataLoader(
        Samples(small, len(CachedDataset(one))), BATCH, backend=H5(one, build="never")
    )
    timed("first batch of backend='h5', one part", lambda: next(iter(of_one)))
    loader = DataLoader(dataset, BATCH, backend=H5(path, build="never"))
    timed("first batch of backend='h5'", lambda: next(iter(loader)))
    rows = np.linspace(0, length - 1, 4 * len(cached.shards)).astype(int).tolist()
    timed("map every part, reading four rows of each", lambda: cached.__getitems__(rows))
    with redirect_stdout(io.StringIO()):
        timed("info", lambda: info(str(path)))
    started = time.process_time()
    timed("verify", lambda: verify(path))
    found["verify, CPU"] = time.process_time() - started
    told: list[int] = []
    assert not verify(path, lambda done, _: told.append(done))
    found["reports of verify"] = len(told)
    shuffled = torch.utils.data.RandomSampler(dataset)
    timed(TORCHS, lambda: sum(1 for _ in shuffled))
    blocks = BlockShuffle(cached, seed=0)
    timed(BLOCKS, lambda: sum(1 for _ in blocks))
    return found


@case(
    f"{', '.join(f'{name} <= {most:g} s' for name, most in BARS.items())}; each with <= "
    f"{MEMORY_MIB:.0f} MiB more; BlockShuffle's indices <= 2 x torch's"
)
def cache_scale(scale: Scale, folder: Path) -> Result:
    """What does a cache of 10^7 rows in 2,000 parts take to join, open, verify and shuffle?"""
    parts, rows = scale.pick(full=2_000, tiny=5), scale.pick(full=5_000, tiny=20)
    one, path = folder / "one.h5", folder / "train.h5"
    precompute(Samples(small, rows), one, num_workers=0)
    make_parts(path, parts, rows)
    started = time.perf_counter()
    beside = path.with_suffix(".parts")
    combined(path, [part_at(beside / f"{rows * number:05d}.h5") for number in range(parts)])
    joined = time.perf_counter() - started
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(measured, (one, path, parts * rows))
    size = sum(each.stat().st_size for each in folder.rglob("*.h5")) / 2**20
    names = [name for name in found if f"{name}, MiB" in found]
    table = [(name, found[name], found[f"{name}, MiB"]) for name in names]
    return Result(
        ("what", "seconds", "MiB of memory more"),
        (("join the parts", joined, None), *table),
        all(found[name] <= most for name, most in BARS.items())
        and all(found[f"{name}, MiB"] <= MEMORY_MIB for name in names)
        and found[BLOCKS] <= 2 * found[TORCHS],
        (
            f"{parts * rows:,} rows of 12 bytes in {parts:,} parts, {size:.0f} MiB; the parts are "
            "copies of one with other numbers. In a new process, files in memory.",
            f"verify took {found['verify, CPU'] / max(found['verify'], 1e-9):.1f} cores and "
            f"reported progress {found['reports of verify']:.0f} times.",
        ),
    )
