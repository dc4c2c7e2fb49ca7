"""What this process and its workers take: CPU seconds and memory."""

from __future__ import annotations

import time

import psutil

from dataloaders.machine import resources

__all__ = ["by_end_of_epoch", "cpu_demand", "cpu_seconds", "memory"]


def cpu_demand() -> float:
    """CPU seconds of this process, and those that its main thread waited for a core."""
    try:
        with open("/proc/self/schedstat") as file:
            delayed = int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        delayed = 0.0
    return time.process_time() + delayed


def cpu_seconds(crew: list[psutil.Process]) -> float:
    """CPU seconds of this process and of ``crew``, its workers."""
    total = time.process_time()
    for process in crew:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has just died: the loader will say so
            continue
        total += times.user + times.system
    return total


def memory(crew: list[psutil.Process]) -> list[resources.ProcessMemory]:
    """The memory of each worker, of those that have not ended."""
    found = (resources.process_memory(process.pid) for process in crew)
    return [one for one in found if one is not None]


def by_end_of_epoch(
    before: list[resources.ProcessMemory],
    after: list[resources.ProcessMemory],
    samples: int,
    epoch_samples: int | None,
) -> int | None:
    """Bytes of the largest worker by the end of an epoch; None if they are not known.

    Its private pages now, and their growth over the trial carried on to the end of the epoch,
    but by no more than the pages that it still shares with this process, and no more than what
    counting references comes to (`resources.python_heap_bytes`): a worker's first steps touch pages
    that are touched only once, and arrays, however large, are not copied by being read.
    """
    if not before or len(before) != len(after) or samples == 0:
        return None
    largest, heap = 0, resources.python_heap_bytes()
    for early, late in zip(before, after, strict=True):
        growth = max(0, late.private - early.private)
        remaining = max(0, (epoch_samples or samples) - samples) / samples
        still_to_come = min(growth * remaining, late.shared_anonymous, heap)
        largest = max(largest, late.private + int(still_to_come))
    return largest
