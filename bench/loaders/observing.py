"""What does a look at a dataset in a process of its own cost, besides the samples that it reads?"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from bench.harness import Result, Samples, Scale, case
from dataloaders.observing import observe

BAR_FORK_S = 0.1


@case(f"median of a forked look <= {BAR_FORK_S} s")
def observing(scale: Scale, folder: Path) -> Result:
    """What does it cost to observe a dataset in a process of its own?"""
    found: dict[str, list[float]] = {}
    for context in scale.pick(full=("fork", "forkserver", "spawn"), tiny=("fork",)):
        loader = DataLoader(Samples(int, 1), num_workers=1, multiprocessing_context=context)
        found[context] = []
        for _ in range(scale.pick(full=9, tiny=1)):
            began = time.perf_counter()
            observe(loader, _first)
            found[context].append(time.perf_counter() - began)
    return Result(
        ("context", "seconds a look, median", "least", "most"),
        tuple((name, statistics.median(s), min(s), max(s)) for name, s in found.items()),
        statistics.median(found["fork"]) <= BAR_FORK_S,
        ("The look reads one sample, a Python int. The first look starts the fork server.",),
    )


def _first(dataset: Any) -> Any:
    return dataset[0]
