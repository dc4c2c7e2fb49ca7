"""Find the rows of a batch in the files of a cache, and memory for what is made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

from dataloaders.batches.memory import HostPool
from dataloaders.cache.read.files import Column

from .draws import Draws
from .threads import Threads
from .windows import NotThisBatch

__all__ = ["Rows", "empty"]


@dataclass(frozen=True)
class Rows:
    """The rows of one batch, and what their batch is made with.

    Attributes:
        numbers: int64 [n].
        draws: gives the random numbers of each row.
        pool: gives memory for large tensors, outside workers.
        threads: share the images.
        puts_off: as in `Batches`.
    """

    numbers: npt.NDArray[np.int64]
    draws: Draws
    pool: HostPool
    threads: Threads
    puts_off: bool

    def views(self, column: Column) -> list[npt.NDArray[Any]]:
        """Return the values of each row, as they stand in the file.

        Raises:
            NotThisBatch: a row is None.
        """
        parts, numbers = column.files.locate_all(self.numbers)
        views = []
        for part, number in zip(parts.tolist(), numbers.tolist(), strict=True):
            _, view = column.of(part).stored(number)
            if view is None:
                raise NotThisBatch
            views.append(view)
        return views


def empty(pool: HostPool, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a column: shared in a worker, else from the pool if it is large."""
    if get_worker_info() is None:
        return pool.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]
