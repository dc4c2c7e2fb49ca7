"""Batches made at once, of indices alone: what a backend puts in place of dataset and collation.

    sampler ──> indices ──RowNumbers──> the same indices ──WholeBatches──> one batch

torch's fetcher, and `seeding` and stock around it, see a dataset and a collate_fn as ever. But no
code of the user's runs in them, and no process-wide generator is drawn from: so a thread may run
them, and nothing has to be seeded around them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataloaders.batches.tree import Batch

__all__ = ["RowNumbers", "SeededRows", "SeededSamples", "WholeBatches"]


class SeededRows(NamedTuple):
    """The indices of a batch under ``seed=``.

    Attributes:
        keys: what the sampler gave.
        words: for each, what the generators are seeded with around this sample; uint32 [n, 4], as
            `dataloaders.transforms.draws.Draws` takes them.
        samples: a function that fetches them one by one, seeded as they are under stock.
        collation: what the generators are seeded with around a collate_fn of the user's.
    """

    keys: Sequence[Any]
    words: npt.NDArray[np.uint32]
    samples: Any
    collation: tuple[int, int, int, int]


class SeededSamples(NamedTuple):
    """The samples of a batch that were fetched under ``seed=``.

    Attributes:
        samples: as the dataset gave them.
        words: for each, what the generators were seeded with around it; uint32 [n, 4].
        collation: what they are seeded with around a collate_fn of the user's.
    """

    samples: Any
    words: npt.NDArray[np.uint32]
    collation: tuple[int, int, int, int]


class RowNumbers:
    """A dataset that hands on the indices that it is asked for.

    Attributes:
        dataset: whose samples they are.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Any) -> Any:
        return indices


class WholeBatches(ABC):
    """A collate_fn of ours, for what `RowNumbers` hands on or for samples.

    It draws from no process-wide generator, and runs no code of the user's.
    """

    @abstractmethod
    def __call__(self, rows: Any) -> Batch:
        """The batch of these indices or samples; under ``seed=`` `SeededRows`, `SeededSamples`."""
