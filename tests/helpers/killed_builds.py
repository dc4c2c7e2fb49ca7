"""Builds that are killed at random moments, again and again, until one comes through.

Run as a script, in a folder of its own: forks are cheap from a process that has imported torch.
Prints how many kills hit a builder, its worker or both, and in which phases.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import h5py  # noqa: F401 - so that each fork has it
import numpy as np
import torch

from dataloaders.cache import CachedDataset, precompute
from dataloaders.cache.format.block import parts_folder

PATH = Path("a.h5")


class Slow:
    """Sixty small samples, a millisecond and a half each, of so many shapes."""

    def __init__(self, shapes: int) -> None:
        self.shapes = shapes

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.0015)
        return {"a": torch.full((1 + index % self.shapes, 300), index), "b": np.arange(5.0) * index}


def builder(shapes: int) -> int:
    """A process, first of a group of its own, that builds."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)
        quiet = os.open("errors.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 2)
        precompute(Slow(shapes), PATH, num_workers=2, rows=4)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def workers_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill(pid: int, values: random.Random) -> str:
    """Kill the builder, one of its workers, or all; which it was, "" if it had ended."""
    victim = values.choice(["builder", "worker", "all"])
    workers = workers_of(pid)
    if victim == "worker" and not workers:
        victim = "builder"
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        return ""
    try:
        if victim == "all":
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(values.choice(workers) if victim == "worker" else pid, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return victim


def phase() -> str:
    folder = parts_folder(PATH)
    if not folder.exists():
        return "finished" if PATH.exists() else "not begun"
    if PATH.exists():
        return "cleaning"
    if list(Path().glob(".a.h5.*.tmp")):
        return "assembling"
    return "computing"


def check_nothing_opens(expected: bytes) -> None:
    """What is at the path now is the whole file or nothing."""
    try:
        content = PATH.read_bytes()
    except FileNotFoundError:
        return
    assert content == expected
    assert len(CachedDataset(PATH)) == 60


def main(kills: int, seed: int, shapes: int) -> None:
    values = random.Random(seed)
    precompute(Slow(shapes), PATH, num_workers=0)
    expected = PATH.read_bytes()
    PATH.unlink()
    begun = time.monotonic()
    os.waitpid(builder(shapes), 0)
    whole = time.monotonic() - begun
    assert PATH.read_bytes() == expected
    hit: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    while sum(hit.values()) < kills:
        PATH.unlink(missing_ok=True)
        for _ in range(values.randint(1, 4)):  # a build that is killed as often, then comes through
            pid = builder(shapes)
            time.sleep(values.uniform(0, whole * 1.05))
            now = phase()
            victim = kill(pid, values)
            os.waitpid(pid, 0)
            check_nothing_opens(expected)
            if victim:
                hit[victim] += 1
                phases[now] += 1
        os.waitpid(builder(shapes), 0)
        assert PATH.read_bytes() == expected
        assert not parts_folder(PATH).exists()
    print(dict(hit), dict(phases), f"{whole:.2f} s a build")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
