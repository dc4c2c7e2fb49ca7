"""What does a look at a dataset in a process of its own cost, besides the samples that it reads?"""

from __future__ import annotations

import statistics
import time
from typing import Any

from torch.utils.data import DataLoader

from bench.harness import Case, Result, Scale
from bench.loaders.stock import TinySamples
from dataloaders.observing import observe

BAR_FORK_S = 0.1


def run(scale: Scale) -> Result:
    data: dict[str, Any] = {}
    for context in scale.pick(full=("fork", "forkserver", "spawn"), tiny=("fork",)):
        loader = DataLoader(TinySamples(1), num_workers=1, multiprocessing_context=context)
        data[context] = []
        for _ in range(scale.pick(full=9, tiny=1)):
            began = time.perf_counter()
            observe(loader, _first)
            data[context].append(time.perf_counter() - began)
    return Result(
        ("context", "seconds a look, median", "least", "most"),
        tuple((name, statistics.median(s), min(s), max(s)) for name, s in data.items()),
        statistics.median(data["fork"]) <= BAR_FORK_S,
        ("The look reads one sample, a Python int. The first look starts the fork server.",),
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
