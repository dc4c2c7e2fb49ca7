"""Make whole batches from a cache: gather columns, crop and flip images into the batch.

    rows ──> numbers, tensors of one shape   one gather a column
             raw images with a live tail     a window of each, copied from the mapped file into the
                                             batch, then made floats if the tail does so
             anything else                   default_collate of the column's leaves

The batch equals ``default_collate([cached[row] for row in rows])``. Before any batch is made this
way, this is proved on rows of the same cache, with torchvision's own random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from dataloaders.batches.collation import collates_as_torch
from dataloaders.batches.memory import HostPool
from dataloaders.batches.tree import Batch, same_bits
from dataloaders.batches.whole import SeededRows, WholeBatches
from dataloaders.cache import CachedDataset
from dataloaders.cache.read.files import Column
from dataloaders.cache.sample.sample import join
from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept

from .columns import Rows, Values
from .draws import Draws, FreeDraws
from .images import KINDS, images_of
from .threads import Threads
from .windows import NotThisBatch

__all__ = ["Batches", "batches_of", "is_proved"]

_Leaf: TypeAlias = Callable[[Rows], Any]
"""Makes the batch of one column."""

_PROVED_ROWS = 4
_GATHERED = ("int", "float", "bool", "tensor", "array", "scalar")


class Batches(WholeBatches):
    """Makes batches of one cache. Created by `batches_of`, once in each process that uses it.

    Args:
        leaves: what makes the batch of each column.
        threads: how many at most make a batch, as in `Threads`.
        puts_off: whether images that end as floats are returned as bytes, in a `Trailing`.

    Attributes:
        cached: the cache, whose tails are part of the batches.
    """

    def __init__(
        self, cached: CachedDataset, leaves: list[_Leaf], threads: int | None, puts_off: bool
    ) -> None:
        self.cached = cached
        self._leaves = leaves
        self._options = threads, puts_off
        self._pool = HostPool()
        self._threads = Threads(threads)
        self._seed = self._count = 0

    def begin(self, seed: int) -> None:
        """Begin an epoch with this seed."""
        self._seed, self._count = seed, 0

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def __call__(self, rows: Any) -> Batch:
        """Return the batch of these rows, as in `WholeBatches`."""
        if isinstance(rows, SeededRows):
            batch = self.of(rows.keys, Draws(rows.words))
            return default_collate(rows.samples()) if batch is None else batch
        # A worker's seed contains torch's base seed of the epoch and the worker's number.
        worker: Any = get_worker_info()
        seed = self._seed if worker is None else int(worker.seed)
        self._count += 1
        key = np.array([seed & (2**64 - 1), self._count], np.uint64)
        batch = self.of(rows, FreeDraws(len(rows), np.random.Generator(np.random.Philox(key=key))))
        return default_collate([self.cached[row] for row in rows]) if batch is None else batch

    def of(self, rows: Sequence[Any], draws: Draws) -> Batch | None:
        """Return the batch of these rows; None if it has to be collated sample by sample.

        Args:
            rows: integers from 0 on.
            draws: gives the random numbers of each row.
        """
        if not collates_as_torch():
            return None
        try:
            numbers = np.asarray(rows)
        except (TypeError, ValueError):
            return None
        if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iu":
            return None
        if numbers.min() < 0 or numbers.max() >= len(self.cached):
            return None
        self.cached.about_to_read(numbers.tolist())
        puts_off = self._options[1]
        task = Rows(numbers.astype(np.int64), draws, self._pool, self._threads, puts_off)
        try:
            parts = [leaf(task) for leaf in self._leaves]
        except NotThisBatch:
            return None
        structure = self.cached.index.structure
        assert structure is not None
        # default_collate makes lists of plain tuples.
        return join(structure, parts, self.cached.namedtuples, tuples=list)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker maps the file itself: a mapping would be pickled as a copy.
        return _made, (self.cached, *self._options)


def batches_of(
    cached: CachedDataset,
    prove: Callable[[CachedDataset], bool] | None = None,
    threads: int | None = None,
    puts_off: bool = False,
) -> Batches | str:
    """Return what makes whole batches of ``cached``; or say in a few words why nothing does.

    Args:
        cached: the cache, with its live transforms.
        prove: says whether such batches equal torch's; None: `is_proved`, on this thread.
        threads, puts_off: see `Batches`.
    """
    batches = _made(cached, threads, puts_off)
    if isinstance(batches, str):
        return batches
    proved = (prove or is_proved)(cached)
    return batches if proved else "its batches differ from those of default_collate"


def _made(
    cached: CachedDataset, threads: int | None = None, puts_off: bool = False
) -> Batches | str:
    if cached.transform is not None:
        return "the cache is given a transform of whole samples"
    if not len(cached) or cached.index.structure is None:
        return "the cache has no rows"
    tails = dict(cached.calls)
    if len(tails) != len(cached.calls):
        return "a leaf has two tails"
    leaves: list[_Leaf] = []
    for number, column in enumerate(cached.readers):
        made = _leaf_of(column, tails.get(number))
        if isinstance(made, str):
            return f"column {column.entry.name!r}: {made}"
        leaves.append(made)
    return Batches(cached, leaves, threads, puts_off)


def _leaf_of(column: Column, tail: Any) -> _Leaf | str:
    entry = column.entry
    (kind, dimensions), *others = entry.variants
    if tail is not None:
        if others or kind not in KINDS or dimensions != 3:
            return f"its tail works on {', '.join(kind for kind, _ in entry.variants)}"
        return images_of(column, tail)
    is_plain = entry.fixed and entry.packing is None and not entry.dtype.startswith(">")
    if not others and is_plain and kind.partition(":")[0] in _GATHERED:
        return Values(column)

    def collated(rows: Rows) -> Any:
        leaves = column.leaves(rows.numbers.tolist())
        try:
            return default_collate(leaves)
        except Exception as error:  # torch raises it again, for whole samples
            raise NotThisBatch from error

    return collated


def is_proved(cached: CachedDataset) -> bool:
    """Return whether batches of one row and of several equal torch's, with equal random numbers.

    Reads a few rows both ways, with their live transforms, which may be user code. Restores the
    states of all generators.
    """
    batches = _made(cached)
    if isinstance(batches, str):
        return False
    spread = [int(row) for row in np.linspace(0, len(cached) - 1, _PROVED_ROWS)]
    proved = False
    for seed, rows in enumerate([*([row] for row in spread), spread]):
        seeding = words(seed, 0, np.arange(len(rows)))
        with random_states_kept(cuda=False):
            try:
                pairs = zip(rows, seeding.tolist(), strict=True)
                torchs: Any = default_collate([_seeded(cached, *each) for each in pairs])
            except Exception:  # such rows are left to default_collate, which raises
                torchs = None
        made = batches.of(rows, Draws(seeding))
        if torchs is None and made is None:
            continue
        if made is None or not _same(made, torchs):
            return False
        proved = True
    return proved


def _seeded(cached: CachedDataset, row: int, words: list[int]) -> Any:
    seed_generators((words[0], words[1], words[2], words[3]))
    return cached[row]


def _same(made: Any, torchs: Any) -> bool:
    if type(made) is not type(torchs):
        return False
    if isinstance(torchs, torch.Tensor):
        return same_bits(made, torchs)
    if isinstance(torchs, dict):
        return list(made) == list(torchs) and all(_same(made[key], torchs[key]) for key in torchs)
    if isinstance(torchs, (list, tuple)):
        return len(made) == len(torchs) and all(map(_same, made, torchs))
    return bool(made == torchs)
