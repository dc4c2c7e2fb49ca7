"""The stock backend beside torch's loader: its gather and its overhead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.data as torchs
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from bench.harness import (
    Result,
    Rows,
    Samples,
    Scale,
    case,
    exhaust,
    interleave,
    timing_headings,
    timing_rows,
)
from dataloaders import DataLoader

BAR_GATHER, BAR_OVERHEAD = 2.5, 1.03


@case(f"CPU ratio to the bare loop <= {BAR_GATHER} with any sampler", one_thread=True)
def stock_gather(scale: Scale, folder: Path) -> Result:
    """What does a shuffled epoch over tensors in memory cost beside a loop that only gathers?"""
    length, batch = scale.pick(full=60_000, tiny=600), 256
    images, labels = torch.randn(length, 784), torch.randint(10, (length,))
    dataset, every = TensorDataset(images, labels), list(range(length))
    weights: Any = torch.rand(length, dtype=torch.float64)

    def shuffle() -> torch.Tensor:
        return torch.randperm(length)

    # sampler, how the bare loop draws the same order
    samplers: dict[str, tuple[Any, Callable[[], torch.Tensor]]] = {
        "random": (RandomSampler(dataset), shuffle),
        "sequential": (SequentialSampler(dataset), lambda: torch.arange(length)),
        "weighted": (
            WeightedRandomSampler(weights, length),
            lambda: torch.multinomial(weights, length, replacement=True),
        ),
        "distributed": (DistributedSampler(dataset, 1, 0), shuffle),
        "random over a Subset": (None, shuffle),
    }

    def bare(draw: Callable[[], torch.Tensor]) -> None:
        for index in draw().split(batch):  # type: ignore[no-untyped-call]
            found = images.index_select(0, index), labels.index_select(0, index)
        del found  # held until here, as a training loop holds a batch while the next one is made

    rows: Rows = ()
    met = True
    for name, (sampler, draw) in samplers.items():
        source: Any = Subset(dataset, every) if sampler is None else dataset
        options: Any = {"shuffle": True} if sampler is None else {"sampler": sampler}
        loaders = (kind(source, batch, **options) for kind in (DataLoader, torchs.DataLoader))
        stock, its = (partial(exhaust, loader) for loader in loaders)
        ways = {"bare": partial(bare, draw), "stock": stock, "torch": its}
        timings = interleave(ways, rounds=scale.pick(full=11, tiny=1))
        met = met and timings["stock"].ratio(timings["bare"]).median <= BAR_GATHER
        rows += timing_rows(timings, 1000 / length, "bare", f"{name}, ")
    return Result(
        timing_headings("bare"),
        rows,
        met,
        (
            f"{length} x 784 float32 and int64 labels, batch {batch}, no workers, one torch "
            "thread.",
            "The bare loop draws its order in one call (randperm, arange, multinomial) and gathers "
            "by two index_select a batch.",
        ),
    )


@case(f"median CPU ratio to torch <= {BAR_OVERHEAD}, with 0 and with 2 workers")
def stock_overhead(scale: Scale, folder: Path) -> Result:
    """Does DataLoader with the stock backend cost more than torch's own?"""
    batches = scale.pick(full=4000, tiny=4)
    rows: Rows = ()
    met = True
    for workers, rounds in ((0, 15), (2, 9)):
        options: dict[str, Any] = {"batch_size": 1, "num_workers": workers}
        dataset = Samples(int, batches)  # they cost nothing, so that only the loader's cost shows
        timings = interleave(
            {
                "torch": torchs.DataLoader(dataset, **options),
                "stock": DataLoader(dataset, **options),
            },
            exhaust,
            rounds=scale.pick(full=rounds, tiny=1),
            children=workers > 0,
        )
        met = met and timings["stock"].ratio(timings["torch"]).median <= BAR_OVERHEAD
        rows += timing_rows(timings, 1000 / batches, "torch", f"{workers} workers, ")
    return Result(
        timing_headings("torch"),
        rows,
        met,
        ("A batch is one Python int; iter() and, with workers, their start and end count.",),
    )
