"""Small, picklable datasets of every kind that torch's loader takes.

`CASES` makes the arguments of one loader anew, so that two loaders share no state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
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
    """``sample(index)`` for each index: a function, the name of one of `SAMPLES`, or a method."""

    sample: Any
    size: int = SIZE
    failing: Collection[int] = ()  # the indices whose samples raise
    log: Path | None = None  # to which the index of each sample that is read is written

    def __init__(self, sample: Any = None, /, size: int | None = None, **attributes: Any) -> None:
        given = {"sample": sample, "size": size}
        given = {name: value for name, value in given.items() if value is not None}
        vars(self).update(given | attributes)

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
        sample = SAMPLES[self.sample] if isinstance(self.sample, str) else self.sample
        return sample(index)

    def reads(self) -> list[int]:
        """Return the indices of the samples that were read."""
        return [int(line) for line in self.log.read_text().split()] if self.log else []


class Made(MapDataset):
    """A longer `MapDataset`."""

    size = NUMBERED


class Numbered(MapDataset):
    """Samples with fixed and variable columns, and None."""

    shift = 0

    def __init__(self, size: int = NUMBERED, **attributes: Any) -> None:
        super().__init__(None, size, **attributes)

    def sample(self, index: int) -> Any:
        values = np.random.default_rng(index + self.shift)
        return {
            "image": torch.from_numpy(values.integers(0, 256, (3, 8, 8), dtype=np.uint8)),
            "words": values.random(index % 5).astype(np.float32),
            "name": f"sample {index}" if index % 3 else None,
            "label": index,
        }


def wait(seconds: float) -> None:
    time.sleep(seconds)


class Waiting(MapDataset):
    """``size`` samples, each the tensor of its index, each after ``seconds`` (of ``wait``)."""

    def __init__(self, size: int, seconds: float, wait: Callable[[float], None] = wait) -> None:
        super().__init__(None, size, seconds=seconds, wait=wait)

    def sample(self, index: int) -> torch.Tensor:
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


class ShortStream(CountingStream):
    """Says that it is shorter than it is."""

    def __len__(self) -> int:
        return 2


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


def columns(**options: Any) -> dict[str, Any]:
    """Return a loader's arguments: a dataset of two tensors, and these options."""
    images = torch.arange(SIZE * 4, dtype=torch.float32).reshape(SIZE, 4)
    return {"dataset": TensorDataset(images, torch.arange(SIZE)), "batch_size": 4, **options}


def tensors() -> TensorDataset:
    return columns()["dataset"]


def large() -> TensorDataset:
    """Return enough for the pool, in eight batches."""
    rows = torch.arange(256, dtype=torch.uint8).repeat_interleave(1 << 16)
    return TensorDataset(rows.reshape(256, 256, 256))


def samples(sample: Callable[[int], Any] | str, **options: Any) -> dict[str, Any]:
    return {"dataset": MapDataset(sample), "batch_size": 4, **options}


def stream(dataset: Any, batch_size: int | None = 4, **options: Any) -> dict[str, Any]:
    return {"dataset": dataset, "batch_size": batch_size, **options}


def images(kind: str) -> dict[str, Any]:
    from torchvision import transforms

    from . import pictures

    chain = transforms.Compose(
        [transforms.Resize((14, 18)), transforms.CenterCrop(12), transforms.ToTensor()]
    )
    return {"dataset": getattr(pictures, kind)(chain), "batch_size": 4, "shuffle": True}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "tensors": columns,
    "tensors shuffled": lambda: columns(shuffle=True),
    "tensors, own generator": lambda: columns(
        shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "subset, last batch dropped": lambda: columns(
        dataset=Subset(tensors(), [7, 3, 3, 9, 0]), batch_size=2, shuffle=True, drop_last=True
    ),
    "batch larger than dataset": lambda: columns(batch_size=50),
    "no full batch": lambda: columns(batch_size=50, drop_last=True),
    "empty": lambda: columns(dataset=TensorDataset(torch.empty(0, 3))),
    "no batches": lambda: columns(batch_size=None, shuffle=True),
    "weighted sampler": lambda: columns(sampler=WeightedRandomSampler(range(1, SIZE + 1), 9)),
    "replacement": lambda: columns(sampler=RandomSampler(range(SIZE), True, 17)),
    "batch sampler": lambda: {
        "dataset": tensors(),
        "batch_sampler": BatchSampler(SubsetRandomSampler(range(9)), 2, True),
    },
    "sampler is a list": lambda: columns(sampler=[4, 2, 4], batch_size=1),
    "batch sampler is a list": lambda: {"dataset": tensors(), "batch_sampler": [[1, 2], [5]]},
    "distributed sampler": lambda: columns(sampler=DistributedSampler(range(SIZE), 3, 1, seed=4)),
    "one tensor": lambda: samples(tensor_sample, shuffle=True),
    "arrays": lambda: samples("array"),
    "pairs": lambda: samples(pair_sample, drop_last=True),
    "dicts": lambda: samples("dict", shuffle=True),
    "nested": lambda: samples("nested"),
    "namedtuples": lambda: samples("point"),
    "strings": lambda: samples("string"),
    "dataclasses": lambda: samples("record", collate_fn=records),
    "variable length": lambda: samples("ragged", collate_fn=pad),
    "list of samples": lambda: samples("ragged", collate_fn=as_list, shuffle=True),
    "custom batch": lambda: samples(pair_sample, collate_fn=CustomBatch),
    "draws of its own": lambda: samples("drawing", shuffle=True),
    "a list": lambda: {"dataset": list(range(SIZE)), "batch_size": 3, "shuffle": True},
    "many indices at once": lambda: {"dataset": BatchedGetItems(integer_sample), "batch_size": 4},
    "concatenated": lambda: columns(dataset=ConcatDataset([tensors()] * 2), shuffle=True),
    "stacked": lambda: columns(dataset=StackDataset(a=tensors(), b=MapDataset(integer_sample))),
    "large tensors": lambda: {"dataset": large(), "batch_size": 32},
    "sized stream": lambda: {"dataset": SizedStream()},
    "sized stream, last batch dropped": lambda: stream(SizedStream(), drop_last=True),
    "stream": lambda: stream(CountingStream()),
    "stream of samples": lambda: stream(CountingStream(), None),
    "data pipe": lambda: stream(
        IterableWrapper(range(SIZE)).shuffle().sharding_filter(), 3, shuffle=True
    ),
    "folder of photos": lambda: images("folder"),
    "photos by their files": lambda: images("Files"),
    "pixels in memory": lambda: images("Digits"),
    "photos opened by own code": lambda: images("Opened"),
}
"""By name, the dataset and the arguments of a new loader, which shares nothing with another one."""
EVERYTHING = frozenset(CASES)
STREAMS = frozenset(
    name for name in CASES if name.startswith(("stream", "sized stream", "data pipe"))
)
FEW = (
    "tensors shuffled", "no batches", "replacement", "batch sampler", "dicts", "nested", "stream",
    "custom batch", "draws of its own", "folder of photos",
)  # fmt: skip
"""Datasets of each kind, for tests that are too costly for all."""
