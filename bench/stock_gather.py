"""In-memory tensors: stock's gather, torch's loader, and a loop that only gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from bench.harness import Case, Cell, Result, Scale, interleave, on_one_thread
from dataloaders import DataLoader

BATCH = 256
BAR_TORCHS, BAR_OTHER = 1.25, 2.5


class OwnSampler(Sampler[int]):
    """A sampler that nobody knows: a shuffle that yields Python ints."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self._length).tolist()


def run(scale: Scale) -> Result:
    # Every way runs the same index_select, so none is favoured.
    return on_one_thread(measure, scale)


def measure(scale: Scale) -> Result:
    length = scale.pick(full=60_000, tiny=600)
    images, labels = torch.randn(length, 784), torch.randint(10, (length,))
    dataset = TensorDataset(images, labels)
    every = list(range(length))
    weights = torch.rand(length, dtype=torch.float64)

    def shuffle() -> torch.Tensor:
        return torch.randperm(length)

    # For each way of ordering: the loader's dataset and sampler, the bare loop's own draw, bar.
    ways: dict[str, tuple[Any, Any, Callable[[], torch.Tensor], float]] = {
        "random": (dataset, RandomSampler(dataset), shuffle, BAR_TORCHS),
        "random, own generator": (
            dataset, RandomSampler(dataset, generator=torch.Generator()), shuffle, BAR_TORCHS,
        ),
        "random, replacement": (
            dataset,
            RandomSampler(dataset, replacement=True),
            lambda: torch.randint(length, (length,)),
            BAR_TORCHS,
        ),
        "sequential": (
            dataset, SequentialSampler(dataset), lambda: torch.arange(length), BAR_TORCHS,
        ),
        "subset random": (dataset, SubsetRandomSampler(every), shuffle, BAR_TORCHS),
        "weighted": (
            dataset,
            WeightedRandomSampler(weights, length),  # type: ignore[arg-type]
            lambda: torch.multinomial(weights, length, replacement=True),
            BAR_TORCHS,
        ),
        "distributed": (dataset, DistributedSampler(dataset, 1, 0), shuffle, BAR_TORCHS),
        "a sampler of one's own": (dataset, OwnSampler(length), shuffle, BAR_OTHER),
        "random over a Subset": (Subset(dataset, every), None, shuffle, BAR_OTHER),
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    data: dict[str, Any] = {}
    met = True
    for name, (source, sampler, draw, bar) in ways.items():
        options: dict[str, Any] = {"batch_size": BATCH, "sampler": sampler}
        options["shuffle"] = None if sampler is not None else True
        torchs = torch.utils.data.DataLoader(source, **options)
        ours = DataLoader(source, **options)
        timings = interleave(
            {
                "bare": lambda draw=draw: gather_only(images, labels, draw),
                "stock": lambda loader=ours: drain(loader),
                "torch": lambda loader=torchs: drain(loader),
            },
            rounds=scale.pick(full=11, tiny=1),
        )
        ratio = timings["stock"].ratio(timings["bare"], "cpu")
        met = met and ratio.median <= bar
        per_million = 1e6 / length
        rows.append(
            (
                name,
                timings["bare"].median("cpu") * per_million,
                timings["stock"].median("cpu") * per_million,
                timings["torch"].median("cpu") * per_million,
                str(ratio),
                bar,
                str(timings["torch"].ratio(timings["stock"], "cpu")),
            )
        )
        data[name] = {way: times.cpu for way, times in timings.items()}
    return Result(
        (
            "order",
            "bare loop, CPU s a million samples",
            "stock",
            "torch",
            "stock / bare (spread)",
            "bar",
            "torch / stock (spread)",
        ),
        tuple(rows),
        met,
        (
            f"{length} x 784 float32 and int64 labels, batch {BATCH}, no workers, "
            "one torch thread.",
            "The bare loop draws its order in one call (randperm, randint, arange, multinomial) "
            "and runs two index_select a batch.",
        ),
        data,
    )


def gather_only(
    images: torch.Tensor, labels: torch.Tensor, draw: Callable[[], torch.Tensor]
) -> None:
    for index in draw().split(BATCH):  # type: ignore[no-untyped-call]
        batch_images = images.index_select(0, index)
        batch_labels = labels.index_select(0, index)
    del batch_images, batch_labels


def drain(loader: Iterable[Any]) -> None:
    # Two names, as in the bare loop: a batch is still held while the next one is made.
    for _images, _labels in loader:
        pass


CASES = [
    Case(
        "stock_gather",
        "What does a shuffled epoch over tensors in memory cost beside a loop that only gathers?",
        f"CPU ratio to the bare loop <= {BAR_TORCHS} with torch's samplers, <= {BAR_OTHER} with "
        "any other",
        run,
    )
]
