"""Measure the loop on samples whose files were evicted from memory, then on the same again.

evict ──> block ──> the same block, its files in memory     fetch: the mean difference of a batch
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import Any

import numpy as np

from dataloaders import observing
from dataloaders.batches.tree import Batch
from dataloaders.bottleneck.blocks import Blocks
from dataloaders.bottleneck.causes.preparation import Prepared
from dataloaders.machine import page_cache
from dataloaders.measuring.intervals import Interval, mean_of
from dataloaders.specification import own_iteration, view_of
from dataloaders.tuning.variant import backend_of

_FEWEST = 6
_STILL_THERE = 0.05  # of a file's pages at most, after it was evicted


def cold_block(
    loader: Any, blocks: Blocks, seen: Prepared, size: int, left_s: float, notes: list[str]
) -> Generator[Batch, None, Interval | None]:
    """Yield the batches; return how many seconds longer a batch takes if its files are on disk.

    Args:
        loader: reads ``size`` samples a batch.
        blocks: those of the check.
        seen: samples whose files are known.
        left_s: the seconds that both runs may take, if files on disk cost nothing.
        notes: gets the reason if nothing is measured.
    """
    files = {file for of in seen.files for file in of} | set(seen.shared)
    if not files or loader.batch_sampler is None:
        return None
    warm_up = max(1, loader.num_workers)  # each worker has one batch in flight
    whole, needed = len(seen.keys) // size, warm_up + _FEWEST
    reason = ""
    if backend_of(loader).name != "stock" or own_iteration(loader) is not None:
        reason = "this loader does not read by torch's own iteration"
    elif whole < needed:
        reason = f"the files of {whole} batches are known, and {needed} are needed"
    elif 2 * whole * blocks.real_s > left_s:
        reason = "the budget is too small"
    elif not _evicted(sorted(files)):
        reason = "the files cannot be evicted from the page cache"
    if reason:
        notes.append(f"no cold block: {reason}")
        return None
    batches = [seen.keys[at : at + size] for at in range(0, whole * size, size)]
    cold = yield from _timed(_view(loader, batches), blocks, warm_up)
    again = yield from _timed(_view(loader, batches), blocks, warm_up)
    return mean_of(np.subtract(cold, again)) if len(cold) == len(again) else None


def _view(loader: Any, batches: list[list[Any]]) -> Any:
    """Return a view of the loader whose epoch consists of these batches of keys."""
    ahead = 1 if loader.num_workers else None
    return view_of(loader, batch_sampler=batches, persistent_workers=False, prefetch_factor=ahead)


def _timed(view: Any, blocks: Blocks, warm_up: int) -> Generator[Batch, None, list[float]]:
    """Yield an epoch of ``view``; return the seconds of each batch after ``warm_up``."""
    clock, marks = blocks.clock, list[Any]()
    for number, batch in enumerate(observing.started_quietly(view._get_iterator)):
        if number == warm_up:
            marks.append(clock.mark())
        yield batch
        if number >= warm_up:
            marks.append(clock.mark())
    clock.wait()
    return [clock.seconds(*pair) for pair in itertools.pairwise(marks)]


def _evicted(files: list[str]) -> bool:
    """Evict the files; return whether all have at most a few pages left in memory."""
    try:
        if not all(map(page_cache.tells_truth, files)):
            return False
        for file in files:
            page_cache.evict(file)
        left = [page_cache.resident_pages(file) for file in files]
    except OSError:
        return False
    return all(not len(pages) or pages.mean() <= _STILL_THERE for pages in left)
