"""Measures the seconds to take a batch from a worker, and to start a worker.

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
from torch.utils.data import DataLoader

from dataloaders.batches.tree import Batch, map_tensors, nbytes
from dataloaders.observing import started_quietly

_READY_S, _BYTES_PER_S = 0.005, 5e8  # until a worker has the next batch ready, with room to spare
_LONGEST_S, _FEWEST, _MOST = 1.0, 3, 9


def seconds_of_a_worker(
    batch: Batch, context: Any = None, now: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Return the median seconds to take a ready batch, and the seconds to start and end a worker.

    Zeros if the batch cannot be sent by a worker.

    Args:
        batch: a batch of the loader in host memory.
        context: how to start the worker, as DataLoader's ``multiprocessing_context``.
        now: returns the time.
    """
    batch = map_tensors(batch, torch.clone)  # a forked process cannot read pinned memory
    ready_s = _READY_S + nbytes(batch) / _BYTES_PER_S
    count = max(_FEWEST, min(_MOST, int(_LONGEST_S / ready_s)))
    loader: Any = DataLoader(
        [batch] * count,  # type: ignore[arg-type]
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
        began = now()
        batches = started_quietly(loader._get_iterator)
        next(batches)
        started_s = now() - began
        for _ in range(count - 1):
            time.sleep(ready_s)
            begin = now()
            next(batches)
            took.append(now() - begin)
        began = now()
        next(batches, None)
        started_s += now() - began
    except Exception:  # shared memory has no room, the batch cannot be pickled, imports take long
        return 0.0, 0.0
    return statistics.median(took), started_s
