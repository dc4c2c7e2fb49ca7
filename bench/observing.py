"""What one look at a dataset in a process of its own costs, besides the samples that it reads."""

from __future__ import annotations

import statistics
import time
from typing import Any

from torch.utils.data import DataLoader

from bench.harness import Case, Cell, Result, Scale
from bench.stock_overhead import TinySamples
from dataloaders.observing import observe

BAR_FORK_S = 0.1


def run(scale: Scale) -> Result:
    rows: list[tuple[Cell, ...]] = []
    data: dict[str, Any] = {}
    dataset = TinySamples(1)
    for context in scale.pick(full=("fork", "forkserver", "spawn"), tiny=("fork",)):
        loader = DataLoader(dataset, num_workers=1, multiprocessing_context=context)
        seconds = []
        for _ in range(scale.pick(full=9, tiny=1)):
            began = time.perf_counter()
            observe(loader, _first)
            seconds.append(time.perf_counter() - began)
        data[context] = seconds
        rows.append((context, statistics.median(seconds), min(seconds), max(seconds)))
    met = statistics.median(data["fork"]) <= BAR_FORK_S
    return Result(
        ("context", "seconds a look, median", "least", "most"),
        tuple(rows),
        met,
        ("The look reads one sample, a Python int. The fork server is started by the first look.",),
        data,
    )


def _first(dataset: Any) -> Any:
    return dataset[0]


CASES = [
    Case(
        "observing",
        "What does it cost to observe a dataset in a process of its own?",
        f"median of a forked look <= {BAR_FORK_S} s",
        run,
    )
]
