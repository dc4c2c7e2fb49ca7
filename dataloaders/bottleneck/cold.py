"""The cold block: the loop on samples whose files were evicted from memory, and the same again.

evict ──> block ──> the same block, its files in memory     fetch: the mean difference of a batch
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator
from typing import Any

import numpy as np

from dataloaders import observing
from dataloaders.batches.tree import Batch
from dataloaders.batches.whole import ShowsDataset
from dataloaders.bottleneck.blocks import Blocks
from dataloaders.bottleneck.preparation import CollateApart, Prepared, WithFiles
from dataloaders.machine import page_cache
from dataloaders.measuring.clocks import Clock
from dataloaders.measuring.intervals import Interval, mean_of
from dataloaders.specification import own_iteration, view_of
from dataloaders.tuning.variant import backend_of

_FEWEST, _BUDGET_SHARE = 6, 0.3
_STILL_THERE = 0.05  # of a file's pages, at the most, after it was evicted


def cold_block(
    loader: Any, blocks: Blocks, seen: Prepared, size: int, budget_s: float, notes: list[str]
) -> Generator[Batch, None, Interval | None]:
    """Yield the batches; return a batch's seconds for files on the disk, beyond the others.

    Args:
        loader: reads ``size`` samples a batch.
        blocks: those of the check.
        seen: samples whose files are known.
        budget_s: of the check.
        notes: gets the reason why there is no such block, if there is one to give.
    """
    feed = blocks.feed
    warm_up = feed.in_flight if feed.workers else 1
    plain = backend_of(loader).name == "stock" and own_iteration(loader) is None
    files = {file for of in seen.files for file in of} | set(seen.shared)
    if not files or loader.batch_sampler is None:
        return None
    if not plain:
        notes.append("no cold block: how this loader reads is its own matter")
        return None
    whole, needed = len(seen.keys) // size, warm_up + _FEWEST
    batches = [seen.keys[at : at + size] for at in range(0, whole * size, size)]
    if whole < needed:
        count = len(loader.dataset)
        numbered = all(type(key) is int for key in seen.keys)
        quick = 3 * needed * blocks.real_s <= _BUDGET_SHARE * budget_s
        if not (feed.workers and numbered and quick and count >= needed * size):
            notes.append(
                f"no cold block: the files of {whole} batches are known, and it takes {needed}"
            )
            return None
        picked = random.Random(1).sample(range(count), needed * size)
        batches = [picked[at : at + size] for at in range(0, needed * size, size)]
        files = set(seen.shared)
        view = _view(
            loader,
            batches,
            dataset=WithFiles(loader.dataset),
            collate_fn=CollateApart(loader.collate_fn),
            worker_init_fn=ShowsDataset(loader.worker_init_fn),
        )
        for batch, opened in observing.started_quietly(view._get_iterator):
            files.update(opened)
            yield blocks.delivered(batch)
    if not _evicted(sorted(files)):
        notes.append("no cold block: the files cannot be evicted from the page cache")
        return None
    cold = yield from _timed(_view(loader, batches), blocks, blocks.clock, warm_up)
    again = yield from _timed(_view(loader, batches), blocks, blocks.clock, warm_up)
    if not len(cold) == len(again) >= _FEWEST:
        return None
    return mean_of(np.subtract(cold, again))


def _view(loader: Any, batches: list[list[Any]], **changes: Any) -> Any:
    """Return the loader with these batches of keys as its epoch."""
    return view_of(loader, batch_sampler=batches, persistent_workers=False, **changes)


def _timed(
    view: Any, blocks: Blocks, clock: Clock, warm_up: int
) -> Generator[Batch, None, list[float]]:
    """Yield an epoch of ``view``; return the seconds of each batch after ``warm_up``."""
    marks: list[Any] = []
    for number, batch in enumerate(observing.started_quietly(view._get_iterator)):
        if number == warm_up:
            marks.append(clock.mark())
        yield blocks.delivered(batch)
        if number >= warm_up:
            marks.append(clock.mark())
    clock.wait()
    return [clock.seconds(*pair) for pair in itertools.pairwise(marks)]


def _evicted(files: list[str]) -> bool:
    """Evict the files, and return whether none of them has more than a few pages left."""
    try:
        if not all(map(page_cache.tells_truth, files)):
            return False
        for file in files:
            page_cache.evict(file)
        left = [page_cache.resident_pages(file) for file in files]
    except OSError:
        return False
    return all(not len(pages) or pages.mean() <= _STILL_THERE for pages in left)
