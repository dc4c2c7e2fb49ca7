"""The pause between two epochs: how long the loop waits for the next one's first batch.

... batch, step, batch, step | end, iter(), first batch | step, batch ...
                             └──────── the gap ─────────┘
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import Dataset

from bench.harness import Case, Cell, Result, Scale
from dataloaders import DataLoader

WORKERS = 2
BATCH = 16


class Photos(Dataset[torch.Tensor]):
    """JPEG files, decoded, cropped at random, resized and normalised."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        import numpy as np
        from PIL import Image

        side = 160
        top, left = torch.randint(0, 200, (2,)).tolist()
        with Image.open(self.files[index]) as image:
            crop = image.resize((side, side), box=(left, top, left + 240, top + 240))
        pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1)
        return pixels.float().div_(255).sub_(0.5).div_(0.25)


@dataclass
class Times:
    """Seconds of one way in one loop.

    Attributes:
        gaps: from the end of an epoch's last step to the next epoch's first batch.
        steps: from one batch to the next within an epoch: an ordinary step, its waiting included.
    """

    gaps: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


def run(scale: Scale) -> Result:
    from dataloaders.cli.photos import make_photos

    count = scale.pick(full=256, tiny=8)
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(make_photos(Path(folder, "photos"), count=count).rglob("*.jpg"))
        return measure(Photos(files), scale)


def measure(dataset: Photos, scale: Scale) -> Result:
    batch = scale.pick(full=BATCH, tiny=2)
    options: dict[str, Any] = {"batch_size": batch, "shuffle": True, "num_workers": WORKERS}
    kept = {**options, "persistent_workers": True}
    ways: dict[str, Callable[[], Iterable[Any]]] = {
        "torch": lambda: torch.utils.data.DataLoader(dataset, **options),
        "torch, persistent": lambda: torch.utils.data.DataLoader(dataset, **kept),
        "prefetch, persistent": lambda: DataLoader(dataset, backend="prefetch", **kept),
    }
    rows: list[tuple[Cell, ...]] = []
    data: dict[str, Any] = {}
    met = True
    for name, step_s in (("5 ms", 0.005), ("200 ms", scale.pick(full=0.2, tiny=0.005))):
        times = {way: Times() for way in ways}
        for turn in range(scale.pick(full=3, tiny=1)):
            order = list(ways) if turn % 2 == 0 else list(ways)[::-1]
            for way in order:
                loop(ways[way](), step_s, epochs=scale.pick(full=4, tiny=2), times=times[way])
        for way, found in times.items():
            step = statistics.median(found.steps)
            gap = statistics.median(found.gaps)
            rows.append((name, way, gap * 1e3, max(found.gaps) * 1e3, step * 1e3))
            if way.startswith("prefetch"):
                met = met and gap <= step
        data[name] = {way: vars(found) for way, found in times.items()}
    headings = ("step", "way", "gap, ms", "longest", "ordinary step, ms")
    notes = (
        f"{len(dataset)} JPEG photos, {batch} a batch, {WORKERS} workers. The step waits, as one "
        "on a GPU does. A gap is from the end of an epoch's last step to the next epoch's first "
        "batch; an ordinary step is from one batch to the next, its waiting included.",
        "The first epoch of each loader starts the workers, and no gap before it counts.",
    )
    return Result(headings, tuple(rows), met, notes, data)


def loop(loader: Iterable[Any], step_s: float, *, epochs: int, times: Times) -> None:
    """Iterate ``loader``, waiting ``step_s`` seconds at each batch; seconds go to ``times``."""
    ended: float | None = None
    for _ in range(epochs):
        before: float | None = None
        for _ in loader:
            now = time.perf_counter()
            if before is not None:
                times.steps.append(now - before)
            elif ended is not None:
                times.gaps.append(now - ended)
            before = now
            time.sleep(step_s)
        # The end comes out of next() a moment after the last step: that moment is in the gap.
        ended = None if before is None else before + step_s


CASES = [
    Case(
        "epoch_gap",
        "How long does a loop wait between the last batch of an epoch and the next one's first?",
        "prefetch with persistent workers: median gap <= one ordinary step",
        run,
    )
]
