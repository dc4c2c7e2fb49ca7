"""The seconds that a training process spends to take a batch that a worker has ready.

torch hands over each tensor by a descriptor of shared memory, for which it connects to a thread of
the worker: a millisecond for a few tensors, which no prefetching hides.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dataloaders.batches.tree import Batch, map_tensors, nbytes
from dataloaders.observing import started_quietly

__all__ = ["seconds_to_take"]

_READY_S, _BYTES_PER_S = 0.005, 5e8  # until a worker has the next batch ready, with room to spare
_LONGEST_S, _FEWEST, _MOST = 1.0, 3, 9


class _Same(Dataset[Any]):
    def __init__(self, batch: Batch, length: int) -> None:
        self._batch, self._length = batch, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        return self._batch


def seconds_to_take(
    batch: Batch, context: Any = None, now: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median of some batches like ``batch``, of the host; 0 if none can be sent.

    Args:
        batch: a batch as the training process gets it.
        context: of the worker, as DataLoader's ``multiprocessing_context``.
        now: the time.
    """
    batch = map_tensors(batch, torch.clone)  # pinned memory is not there in a forked process
    ready_s = _READY_S + nbytes(batch) / _BYTES_PER_S
    same = _Same(batch, max(_FEWEST, min(_MOST, int(_LONGEST_S / ready_s))))
    loader: Any = DataLoader(
        same,
        batch_size=None,
        num_workers=1,
        multiprocessing_context=context,
        timeout=5,
        generator=torch.Generator(),  # nothing is drawn from the user's
    )
    took = []
    try:
        # A batch that cannot be pickled would be waited for until the timeout.
        pickle.dumps(map_tensors(batch, lambda leaf: torch.empty(0)))
        batches = started_quietly(loader._get_iterator)
        next(batches)  # the worker has started
        for _ in range(len(same) - 1):
            time.sleep(ready_s)
            begin = now()
            next(batches)
            took.append(now() - begin)
    except Exception:  # shared memory has no room, the batch cannot be pickled, imports take long
        return 0.0
    return statistics.median(took)
