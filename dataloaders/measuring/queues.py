"""Count an iterator's batches that are ready, by torch's queues or our ``counts()``."""

from __future__ import annotations

from typing import Any


def counts_of(iterator: Any) -> tuple[int, int] | None:
    """Return (ready, outstanding) batches of ``iterator``, or None if that is not known.

    Ready batches can be taken at once. Outstanding ones also include those that workers make or
    have to make: if both numbers are equal, all workers are idle.
    """
    counts = getattr(iterator, "counts", None)
    if callable(counts):
        counted: tuple[int, int] | None = counts()
        return counted
    try:
        queued = iterator._data_queue.qsize()
        if iterator._data_queue is not iterator._worker_result_queue:  # a pinning thread between
            queued += iterator._worker_result_queue.qsize()
        # A worker that has exhausted its part of an iterable dataset answers no further task.
        at_work = iterator._workers_status
        outstanding = sum(
            1 for info in iterator._task_info.values() if len(info) == 1 and at_work[info[0]]
        )
        held = sum(1 for info in iterator._task_info.values() if len(info) == 2)
    except (AttributeError, NotImplementedError, OSError):
        return None
    return queued + held, outstanding + held
