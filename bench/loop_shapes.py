"""Training scripts as people write them, on loads and steps of given length.

    python -m bench.loop_shapes SHAPE [--load MS] [--step MS] [--workers N] [--steps N]

Each shape is the loop of a library or of a well-known example, with nothing of ours in it. Prints
its steps a second, the first fifth left out.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

SHAPES: dict[str, Callable[[argparse.Namespace], None]] = {}


def shape(function: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    SHAPES[function.__name__] = function
    return function


class Loaded(Dataset[torch.Tensor]):
    """Samples that take ``seconds`` each, as a disk would: without a core."""

    def __init__(self, seconds: float, count: int = 4096) -> None:
        self.seconds, self.count = seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return torch.full((16,), float(index))


class Training:
    """A small model, an optimizer, and a step that takes ``--step`` milliseconds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model: Any = torch.nn.Linear(16, 1)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.001)
        self.done = 0
        self.began = 0.0

    def loader(self, **changes: Any) -> DataLoader[torch.Tensor]:
        given = {"batch_size": 4, "shuffle": True, "num_workers": self.options.workers, **changes}
        count = given.pop("count", 4096)
        kind = given.pop("kind", DataLoader)
        loaded: DataLoader[torch.Tensor] = kind(
            Loaded(self.options.load / 4000, count), persistent_workers=given["num_workers"] > 0,
            **given,
        )  # fmt: skip
        return loaded

    def forward(self, batch: torch.Tensor, update: bool = True) -> None:
        self.model(batch).mean().backward()
        time.sleep(self.options.step / 1000)
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.count()

    def count(self) -> None:
        self.done += 1
        if self.done == self.options.steps // 5:
            self.began = time.perf_counter()
        if self.done == self.options.steps:
            rate = (self.done - self.options.steps // 5) / (time.perf_counter() - self.began)
            print(f"steps a second: {rate:.4f}", flush=True)
            raise SystemExit


@shape
def plain(options: argparse.Namespace) -> None:
    """The loop of PyTorch's tutorials."""
    training = Training(options)
    loader = training.loader()
    for _ in itertools.count():
        for batch in loader:
            training.forward(batch)


@shape
def validated(options: argparse.Namespace) -> None:
    """A validation every 50 steps, a look at the data every 20."""
    training = Training(options)
    loader, valid = training.loader(), training.loader(count=32, shuffle=False, num_workers=0)
    for _ in itertools.count():
        for index, batch in enumerate(loader):
            training.forward(batch)
            if index % 20 == 3:
                next(iter(valid))
            if index % 50 == 49:
                with torch.no_grad():
                    for one in valid:
                        training.model(one)


@shape
def accumulated(options: argparse.Namespace) -> None:
    """An optimizer step every four batches."""
    training = Training(options)
    loader = training.loader()
    for _ in itertools.count():
        for index, batch in enumerate(loader):
            training.forward(batch, update=index % 4 == 3)


@shape
def batches_first(options: argparse.Namespace) -> None:
    """HF Trainer's order: four batches are taken, then four steps are made."""
    training = Training(options)
    loader = training.loader()
    for _ in itertools.count():
        batches = iter(loader)
        while taken := list(itertools.islice(batches, 4)):
            for index, batch in enumerate(taken):
                training.forward(batch, update=index == len(taken) - 1)


@shape
def two_loaders(options: argparse.Namespace) -> None:
    """FixMatch: a labelled and an unlabelled batch for each step."""
    training = Training(options)
    for _ in itertools.count():
        for batch, other in zip(training.loader(), training.loader(), strict=True):
            training.forward(batch + other)


@shape
def restarted_by_hand(options: argparse.Namespace) -> None:
    """Iterations instead of epochs: ``next(iterator)``, and a new one where it ends."""
    training = Training(options)
    loader = training.loader(count=400)
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        training.forward(batch)


@shape
def one_epoch(options: argparse.Namespace) -> None:
    """A schedule of fixed length: one batch more is an error."""
    training = Training(options)
    loader = training.loader(count=160)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        training.optimizer, 0.001, total_steps=len(loader)
    )
    for batch in loader:
        training.forward(batch)
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--load", type=float, default=10.0, help="milliseconds for each batch")
    parser.add_argument("--step", type=float, default=10.0, help="milliseconds")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10**9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    SHAPES[options.shape](options)


if __name__ == "__main__":
    main()
