"""Small, picklable datasets of every kind that torch's loader takes.

A `Case` makes the arguments of one loader anew, so that two loaders share no state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.distributed import DistributedSampler

SIZE = 11
"""Samples in each dataset: prime, so that no batch size but 1 divides it."""
NUMBERED = 41
"""Samples in a `Numbered` dataset."""


class Point(NamedTuple):
    x: torch.Tensor
    label: int


@dataclass
class Record:
    image: torch.Tensor
    name: str


SAMPLES: dict[str, Callable[[int], Any]] = {
    "array": lambda index: np.full((2, 2), index, dtype=np.int16),
    "dict": lambda index: {
        "image": torch.full((3, 2), index, dtype=torch.uint8),
        "label": index,
        "name": f"n{index}",
    },
    "nested": lambda index: {
        "views": [torch.full((2,), index, dtype=torch.float64), np.float32(index)],
        "meta": {"path": (f"a/{index}.jpg", index), "flag": index % 2 == 0},
    },
    "point": lambda index: Point(torch.tensor([index, -index]), index),
    "record": lambda index: Record(torch.full((2,), index), f"name {index}"),
    "string": lambda index: (chr(ord("a") + index), index),
    "ragged": lambda index: torch.arange(index + 1),
    "drawing": lambda index: torch.rand(2) + index,
}


class MapDataset(Dataset[Any]):
    """``sample(index)`` for each index: of a function of a module, or of one of `SAMPLES`."""

    def __init__(self, sample: Callable[[int], Any] | str, size: int = SIZE) -> None:
        self.sample = sample
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        made = SAMPLES[self.sample] if isinstance(self.sample, str) else self.sample
        return made(index)


class Numbered(Dataset[Any]):
    """Samples with fixed and variable columns, and None; each read is written to ``log``."""

    def __init__(self, size: int = NUMBERED, *, log: Path | None = None, shift: int = 0) -> None:
        self.size, self.log, self.shift = size, log, shift
        self.failing: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        if index in self.failing:
            raise ValueError(f"no sample {index} today")
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        return self.sample(index)

    def sample(self, index: int) -> Any:
        values = np.random.default_rng(index + self.shift)
        return {
            "image": torch.from_numpy(values.integers(0, 256, (3, 8, 8), dtype=np.uint8)),
            "words": values.random(index % 5).astype(np.float32),
            "name": f"sample {index}" if index % 3 else None,
            "label": index,
        }

    def reads(self) -> list[int]:
        """Return the numbers of the samples that were read."""
        return [int(line) for line in self.log.read_text().split()] if self.log else []


class Made(Numbered):
    """``make(index)`` for each index: a dataset of a user's own class, in one line."""

    def __init__(self, make: Callable[[int], Any], size: int = NUMBERED, **said: Any) -> None:
        super().__init__(size)
        self.sample = make  # type: ignore[method-assign]
        self.__dict__.update(said)


def wait(seconds: float) -> None:
    """Sleep until ``seconds`` from now."""
    deadline = time.perf_counter() + seconds
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


class Waiting(Dataset[torch.Tensor]):
    """``length`` samples, each the tensor of its index, each after ``seconds`` (of ``wait``)."""

    def __init__(self, length: int, seconds: float, wait: Callable[[float], None] = wait) -> None:
        self.length = length
        self.seconds = seconds
        self.wait = wait

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.wait(self.seconds)
        return torch.full((4,), float(index))


class CountingStream(IterableDataset[Any]):
    """0, 1, 2, ... as tensors, divided among the workers."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(torch.arange(first, self.size, step))


class SizedStream(CountingStream):
    def __len__(self) -> int:
        return self.size


class BatchedGetItems(MapDataset):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.sample(index) + 100 for index in indices]


class CustomBatch:
    """A batch type of the user's own, with the two methods that torch's documentation asks for."""

    def __init__(self, samples: list[Any]) -> None:
        self.inputs = torch.stack([sample[0] for sample in samples])
        self.targets = [sample[1] for sample in samples]

    def pin_memory(self) -> CustomBatch:
        self.inputs = self.inputs.pin_memory()
        return self

    def to(self, device: torch.device) -> CustomBatch:
        self.inputs = self.inputs.to(device)
        return self


def tensor_sample(index: int) -> torch.Tensor:
    return torch.full((2, 3), float(index))


def integer_sample(index: int) -> int:
    return index * 3


def pair_sample(index: int) -> tuple[torch.Tensor, int]:
    return torch.arange(index, index + 3), index % 4


def pad(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(sample) for sample in samples])
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), lengths


def records(samples: list[Record]) -> Record:
    return Record(default_collate([s.image for s in samples]), ",".join(s.name for s in samples))


def as_list(samples: list[Any]) -> list[Any]:
    return samples


@dataclass(frozen=True)
class Case:
    """One way to make a loader.

    Attributes:
        name: for the test's identifier.
        make: the dataset and the arguments of a new loader, nothing shared with an earlier call.
    """

    name: str
    make: Callable[[], dict[str, Any]] = field(repr=False)


def _tensors() -> TensorDataset:
    images = torch.arange(SIZE * 4, dtype=torch.float32).reshape(SIZE, 4)
    return TensorDataset(images, torch.arange(SIZE))


def _large() -> TensorDataset:
    """Enough for the pool, in eight batches."""
    rows = torch.arange(256, dtype=torch.uint8).repeat_interleave(1 << 16)
    return TensorDataset(rows.reshape(256, 256, 256))


def _columns(**options: Any) -> dict[str, Any]:
    return {"dataset": _tensors(), "batch_size": 4, **options}


def _sampled(sampler: Callable[[Any], Any], **options: Any) -> dict[str, Any]:
    arguments = _columns(**options)
    return {**arguments, "sampler": sampler(arguments["dataset"])}


def _batched(sampler: Any) -> dict[str, Any]:
    return {"dataset": _tensors(), "batch_sampler": sampler}


def _map(sample: Callable[[int], Any] | str, **options: Any) -> dict[str, Any]:
    return {"dataset": MapDataset(sample), "batch_size": 4, **options}


def _few() -> dict[str, Any]:
    return {"dataset": Subset(_tensors(), [7, 3, 3, 9, 0]), "batch_size": 2, "shuffle": True}


def _stream(size: int | None = 4, **options: Any) -> dict[str, Any]:
    return {"dataset": CountingStream(), "batch_size": size, **options}


def _images(kind: str) -> dict[str, Any]:
    from torchvision import transforms

    from . import photos

    chain = transforms.Compose(
        [transforms.Resize((14, 18)), transforms.CenterCrop(12), transforms.ToTensor()]
    )
    return {"dataset": getattr(photos, kind)(chain), "batch_size": 4, "shuffle": True}


_MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "tensors": _columns,
    "tensors shuffled": lambda: _columns(shuffle=True),
    "tensors, own generator": lambda: _columns(
        shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "subset, last batch dropped": lambda: {**_few(), "drop_last": True},
    "batch larger than dataset": lambda: _columns(batch_size=50),
    "no full batch": lambda: _columns(batch_size=50, drop_last=True),
    "empty": lambda: _sampled(SequentialSampler, dataset=TensorDataset(torch.empty(0, 3))),
    "no batches": lambda: _columns(batch_size=None, shuffle=True),
    "weighted sampler": lambda: _sampled(
        lambda _: WeightedRandomSampler([float(i) for i in range(1, SIZE + 1)], 9)
    ),
    "replacement": lambda: _sampled(lambda data: RandomSampler(data, True, 17)),
    "batch sampler": lambda: _batched(BatchSampler(SubsetRandomSampler(range(9)), 2, True)),
    "sampler is a list": lambda: _sampled(lambda _: [4, 2, 4], batch_size=1),
    "batch sampler is a list": lambda: _batched([[1, 2], [5]]),
    "distributed sampler": lambda: _sampled(lambda data: DistributedSampler(data, 3, 1, seed=4)),
    "one tensor": lambda: _map(tensor_sample, shuffle=True),
    "arrays": lambda: _map("array"),
    "pairs": lambda: _map(pair_sample, drop_last=True),
    "dicts": lambda: _map("dict", shuffle=True),
    "nested": lambda: _map("nested"),
    "namedtuples": lambda: _map("point"),
    "strings": lambda: _map("string"),
    "dataclasses": lambda: _map("record", collate_fn=records),
    "variable length": lambda: _map("ragged", collate_fn=pad),
    "list of samples": lambda: _map("ragged", collate_fn=as_list, shuffle=True),
    "custom batch": lambda: _map(pair_sample, collate_fn=CustomBatch),
    "draws of its own": lambda: _map("drawing", shuffle=True),
    "a list": lambda: {"dataset": list(range(SIZE)), "batch_size": 3, "shuffle": True},
    "many indices at once": lambda: {"dataset": BatchedGetItems(integer_sample), "batch_size": 4},
    "concatenated": lambda: _columns(dataset=ConcatDataset([_tensors()] * 2), shuffle=True),
    "stacked": lambda: _columns(dataset=StackDataset(a=_tensors(), b=MapDataset(integer_sample))),
    "large tensors": lambda: {"dataset": _large(), "batch_size": 32},
    "sized stream": lambda: {"dataset": SizedStream()},
    "sized stream, last batch dropped": lambda: _stream(dataset=SizedStream(), drop_last=True),
    "stream": _stream,
    "stream of samples": lambda: _stream(None),
    "data pipe": lambda: {
        "dataset": IterableWrapper(range(SIZE)).shuffle().sharding_filter(),
        "batch_size": 3,
        "shuffle": True,
    },
    "folder of photos": lambda: _images("folder"),
    "photos by their files": lambda: _images("Files"),
    "pixels in memory": lambda: _images("Digits"),
    "photos opened by own code": lambda: _images("Opened"),
}

CASES = tuple(Case(name, make) for name, make in _MAKERS.items())
BY_NAME = {case.name: case for case in CASES}
EVERYTHING = frozenset(BY_NAME)
STREAMS = frozenset(
    name for name in BY_NAME if name.startswith(("stream", "sized stream", "data pipe"))
)
FEW = (
    "tensors shuffled", "no batches", "replacement", "batch sampler", "dicts", "nested", "stream",
    "custom batch", "draws of its own", "folder of photos",
)  # fmt: skip
"""Datasets of each kind: what is looked at where a dataset costs too much to look at all."""
