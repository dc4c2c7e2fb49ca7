"""The pause between two epochs: how long the loop waits for the next one's first batch.

... batch, step, batch, step | end, iter(), first batch | step, batch ...
                             └──────── the gap ─────────┘
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import Dataset

from bench.harness import Case, Result, Scale, in_folder
from dataloaders import DataLoader
from dataloaders.cli.photos import make_photos


class Photos(Dataset[torch.Tensor]):
    """JPEG files, decoded, cropped at random, resized and normalised."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        import numpy as np
        from PIL import Image

        top, left = torch.randint(0, 200, (2,)).tolist()
        with Image.open(self.files[index]) as image:
            crop = image.resize((160, 160), box=(left, top, left + 240, top + 240))
        pixels = torch.from_numpy(np.array(crop)).permute(2, 0, 1)
        return pixels.float().div_(255).sub_(0.5).div_(0.25)


@in_folder
def run(scale: Scale, folder: Path) -> Result:
    photos = make_photos(folder / "photos", count=scale.pick(full=256, tiny=8))
    dataset = Photos(sorted(photos.rglob("*.jpg")))
    batch, epochs = scale.pick(full=16, tiny=2), scale.pick(full=4, tiny=2)
    options: dict[str, Any] = {"batch_size": batch, "shuffle": True, "num_workers": 2}
    kept = {**options, "persistent_workers": True}
    ways: dict[str, Callable[[], Iterable[Any]]] = {
        "torch": lambda: torch.utils.data.DataLoader(dataset, **options),
        "torch, persistent": lambda: torch.utils.data.DataLoader(dataset, **kept),
        "prefetch, persistent": lambda: DataLoader(dataset, backend="prefetch", **kept),
    }
    rows, data, met = [], {}, True
    for step_s in (0.005, scale.pick(full=0.2, tiny=0.005)):
        gaps: dict[str, list[float]] = {way: [] for way in ways}
        steps: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(scale.pick(full=3, tiny=1)):
            for way in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                loop(ways[way](), step_s, epochs, gaps[way], steps[way])
        for way in ways:
            step, gap = statistics.median(steps[way]), statistics.median(gaps[way])
            rows.append((f"{step_s * 1e3:g} ms", way, gap * 1e3, max(gaps[way]) * 1e3, step * 1e3))
            if way.startswith("prefetch"):
                met = met and gap <= step
        data[f"{step_s} s"] = {"gaps": gaps, "steps": steps}
    return Result(
        ("step", "way", "gap, ms", "longest", "ordinary step, ms"),
        tuple(rows),
        met,
        (
            f"{len(dataset)} JPEG photos, {batch} a batch, 2 workers. The step waits, as one on a "
            "GPU does. A gap is from the end of an epoch's last step to the next epoch's first "
            "batch; an ordinary step is from one batch to the next, its waiting included.",
            "The first epoch of each loader starts the workers; no gap before it counts.",
        ),
        data,
    )


def loop(
    loader: Iterable[Any], step_s: float, epochs: int, gaps: list[float], steps: list[float]
) -> None:
    """Iterate ``loader``, waiting ``step_s`` seconds at each batch; append seconds to the lists."""
    ended: float | None = None
    for _ in range(epochs):
        before: float | None = None
        for _ in loader:
            now = time.perf_counter()
            if before is not None:
                steps.append(now - before)
            elif ended is not None:
                gaps.append(now - ended)
            before = now
            time.sleep(step_s)
        # next() reports the end a moment after the last step: that moment is in the gap.
        ended = None if before is None else before + step_s


CASES = [
    Case(
        "epoch_gap",
        "How long does a loop wait between the last batch of an epoch and the next one's first?",
        "prefetch with persistent workers: median gap <= one ordinary step",
        run,
    )
]
