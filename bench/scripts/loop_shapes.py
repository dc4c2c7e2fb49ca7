"""Training scripts as people write them, on loads and steps of given length.

    python -m bench.scripts.loop_shapes SHAPE [--load MS] [--step MS] [--workers N] [--steps N]

Each shape is the loop of a library or of a well-known example, with nothing of ours in it. Prints
its steps a second, the first fifth left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset, DistributedSampler


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

    def loader(self, count: int = 4096, **changes: Any) -> DataLoader[torch.Tensor]:
        given = {"batch_size": 4, "shuffle": True, "num_workers": self.options.workers, **changes}
        given.setdefault("persistent_workers", given["num_workers"] > 0)
        return DataLoader(Loaded(self.options.load / 4000, count), **given)

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
            if os.environ.get("RANK", "0") == "0":
                print(f"steps a second: {rate:.4f}", flush=True)
            raise SystemExit


SHAPES: dict[str, Callable[[Training], None]] = {}


def shape(function: Callable[[Training], None]) -> Callable[[Training], None]:
    SHAPES[function.__name__] = function
    return function


def train(training: Training, loader: DataLoader[torch.Tensor]) -> None:
    for _ in itertools.count():
        for batch in loader:
            training.forward(batch)


@shape
def plain(training: Training) -> None:
    """The loop of PyTorch's tutorials."""
    train(training, training.loader())


@shape
def normalized(training: Training) -> None:
    """A first pass over the data, for their mean and deviation."""
    loader = training.loader(count=240)
    seen = torch.cat(list(loader))
    assert seen.std() > 0
    train(training, loader)


@shape
def looked_at(training: Training) -> None:
    """A batch for the log, of a new iterator over the same loader, every 20 steps."""
    loader = training.loader(persistent_workers=False)
    for _ in itertools.count():
        for index, batch in enumerate(loader):
            training.forward(batch)
            if index % 20 == 9:
                next(iter(loader))


@shape
def in_a_thread(training: Training) -> None:
    """The whole loop in a thread of the script, as a user interface has it."""
    thread = threading.Thread(target=train, args=(training, training.loader()))
    thread.start()
    thread.join()


@shape
def compiled(training: Training) -> None:
    """torch.compile: the first step takes seconds."""
    training.model = torch.compile(training.model, backend="aot_eager")
    train(training, training.loader())


@shape
def varied(training: Training) -> None:
    """Sequences of six lengths; a step pays once for each (cudnn.benchmark, a recompilation)."""
    loader, seen = training.loader(collate_fn=padded), set()
    for _ in itertools.count():
        for batch in loader:
            if batch.shape not in seen:
                seen.add(batch.shape)
                time.sleep(0.1)
            training.forward(batch)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)[:, None].repeat(1, 1 + int(samples[0][0]) % 6, 1)


@shape
def spawned(training: Training) -> None:
    """Training in a process that ``mp.spawn`` starts."""
    torch.multiprocessing.spawn(in_child, (training.options,))  # type: ignore[attr-defined, no-untyped-call]


def in_child(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    plain(Training(options))


@shape
def ranks(training: Training) -> None:
    """Ranks of torchrun, each with a part of the data."""
    torch.distributed.init_process_group("gloo")
    training.model = torch.nn.parallel.DistributedDataParallel(training.model)
    sampler = DistributedSampler(range(4096), drop_last=True)  # type: ignore[arg-type, var-annotated]
    train(training, training.loader(sampler=sampler, shuffle=False))


@shape
def validated(training: Training) -> None:
    """A validation every 50 steps, a look at the data every 20."""
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
def accumulated(training: Training) -> None:
    """An optimizer step every four batches."""
    loader = training.loader()
    for _ in itertools.count():
        for index, batch in enumerate(loader):
            training.forward(batch, update=index % 4 == 3)


@shape
def batches_first(training: Training) -> None:
    """HF Trainer's order: four batches are taken, then four steps are made."""
    loader = training.loader()
    for _ in itertools.count():
        batches = iter(loader)
        while taken := list(itertools.islice(batches, 4)):
            for index, batch in enumerate(taken):
                training.forward(batch, update=index == len(taken) - 1)


@shape
def two_loaders(training: Training) -> None:
    """FixMatch: a labelled and an unlabelled batch for each step."""
    for _ in itertools.count():
        for batch, other in zip(training.loader(), training.loader(), strict=True):
            training.forward(batch + other)


@shape
def restarted_by_hand(training: Training) -> None:
    """Iterations instead of epochs: ``next(iterator)``, and a new one where it ends."""
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
def one_epoch(training: Training) -> None:
    """A schedule of fixed length: one batch more is an error."""
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
    SHAPES[options.shape](Training(options))


if __name__ == "__main__":
    main()
