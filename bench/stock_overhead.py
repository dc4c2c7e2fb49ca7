"""What backends.stock adds to torch's own loader where it can make nothing faster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import Dataset

from bench.harness import Case, Cell, Result, Scale, interleave
from dataloaders import DataLoader


class TinySamples(Dataset[int]):
    """Samples that cost nothing, so that nothing hides what the loader costs."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def run(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    data: dict[str, Any] = {}
    met = True
    for workers, full in ((0, 4_000), (2, 4_000)):
        batches = scale.pick(full=full, tiny=4)
        dataset = TinySamples(batches)
        options: dict[str, Any] = {"batch_size": 1, "num_workers": workers}
        torchs = torch.utils.data.DataLoader(dataset, **options)
        ours = DataLoader(dataset, **options)
        timings = interleave(
            {
                "torch": lambda loader=torchs: drain(loader),
                "stock": lambda loader=ours: drain(loader),
            },
            rounds=scale.pick(full=15 if workers == 0 else 9, tiny=1),
            children=workers > 0,
        )
        ratio = timings["stock"].ratio(timings["torch"], "cpu")
        met = met and ratio.median <= 1.03
        for name, times in timings.items():
            rows.append(
                (
                    f"{name}, {workers} workers",
                    times.median("cpu") / batches * 1e6,
                    times.low("cpu") / batches * 1e6,
                    times.median("wall") / batches * 1e6,
                    str(ratio) if name == "stock" else None,
                )
            )
        data[f"{workers} workers"] = {name: times.cpu for name, times in timings.items()}
    headings = ("way", "CPU us a batch", "smallest", "wall us a batch", "CPU ratio (spread)")
    return Result(
        headings,
        tuple(rows),
        met,
        ("A batch is one Python int; iter() and, with workers, their start and end are included.",),
        data,
    )


def drain(loader: Iterable[Any]) -> None:
    for _ in loader:
        pass


CASES = [
    Case(
        "stock_overhead",
        "Does DataLoader with the stock backend cost more than torch's own?",
        "median CPU ratio to torch <= 1.03, with 0 and with 2 workers",
        run,
    )
]
