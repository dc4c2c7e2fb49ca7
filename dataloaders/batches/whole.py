"""Make batches at once, from indices alone, in place of a dataset and its collation.

    sampler ──> indices ──RowNumbers──> the same indices ──WholeBatches──> one batch

Torch's fetcher, and `seeding` and stock around it, still see a dataset and a collate_fn. But these
run no user code and draw from no process-wide generator. So a background thread may run them, and
nothing has to be seeded around them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from dataloaders.batches.tree import Batch


class SeededRows(NamedTuple):
    """The indices of a batch under ``seed=``.

    Attributes:
        keys: what the sampler yielded.
        words: for each sample, what seeds the generators around it; uint32 [n, 4], as
            h5's `Draws` takes them.
        samples: a function that fetches the samples one by one, seeded as under stock.
    """

    keys: Sequence[Any]
    words: npt.NDArray[np.uint32]
    samples: Any


class RowNumbers:
    """A dataset that returns the indices that it is asked for.

    Attributes:
        dataset: the dataset that they index.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Any) -> Any:
        return list(indices)  # as torch, which iterates whatever a batch sampler yields


class ShowsDataset:
    """A worker_init_fn: show the dataset that a wrapper holds, then call the user's."""

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        """See torch's ``worker_init_fn``."""
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # info forbids assignment
        if self._function is not None:
            self._function(worker_id)


class WholeBatches(ABC):
    """A collate_fn for the indices that `RowNumbers` returns.

    It draws from no process-wide generator and runs no user code.
    """

    @abstractmethod
    def __call__(self, rows: Any) -> Batch:
        """Return the batch of these indices, or of `SeededRows`."""
