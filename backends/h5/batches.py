"""Make whole batches from a cache: crop and flip images into the batch.

    rows ──> raw images with a live tail   a window of each, copied from the mapped file into the
                                           batch, then made floats if the tail does so
             tensors and arrays            stacked, in memory of the pool
             anything else                 default_collate of the column's leaves

The batch equals ``default_collate([cached[row] for row in rows])``. Before any batch is made this
way, this is proved on rows of the same cache, with torchvision's own random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from dataloaders.batches.collation import collates_as_torch
from dataloaders.batches.memory import HostPool
from dataloaders.batches.tree import Batch
from dataloaders.batches.whole import SeededRows, WholeBatches
from dataloaders.cache import CachedDataset
from dataloaders.cache.read.columns import ColumnReader
from dataloaders.cache.read.files import Located
from dataloaders.cache.sample.sample import join, leaf_paths
from dataloaders.recording.worker import equal
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept
from dataloaders.seeding.words import words

from .draws import Draws, FreeDraws
from .floats import finished, has_floats
from .images import KINDS, Images, empty, read_column
from .threads import Threads
from .windows import NotThisBatch, Obstacle

__all__ = ["Batches", "finishes_floats", "proved"]

_Make: TypeAlias = Callable[[Sequence[Located], Draws], Any]
"""Makes the batch of one column."""

_PROVED_ROWS = 4
_STACKED = ("tensor", "tv_tensor", "array")


class Batches(WholeBatches):
    """A collate_fn that makes batches of rows; raises `Obstacle` if that cannot be done.

    Args:
        cached: the cache, with its live transforms.
        threads: how many at most make a batch, as in `Threads`.
        puts_off: whether images that end as floats are returned as bytes, in a `Trailing`.
    """

    def __init__(
        self, cached: CachedDataset, threads: int | None = None, puts_off: bool = False
    ) -> None:
        if cached.transform is not None:
            raise Obstacle("the cache is given a transform of whole samples")
        if not len(cached) or cached.index.structure is None:
            raise Obstacle("the cache has no rows")
        self._cached, self._structure = cached, cached.index.structure
        tails, paths = dict(cached.tails), leaf_paths(self._structure)
        if len(tails) != len(cached.tails) or not tails.keys() <= set(paths):
            raise Obstacle("a leaf has two tails, or a tail has several leaves")
        self._most_threads, self._puts_off = threads, puts_off
        self._pool, self._threads = HostPool(), Threads(threads)
        self._seed = self._count = 0
        numbers = {path: number for number, path in enumerate(paths)}
        # By number, in the order in which the dataset calls its transforms, as they draw.
        self._columns = {numbers[path]: self._images(numbers[path], tails[path]) for path in tails}
        for number in range(len(paths)):
            self._columns.setdefault(number, self._collated(number))

    def begin(self, seed: int) -> None:
        """Begin an epoch with this seed."""
        self._seed, self._count = seed, 0

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def __call__(self, rows: Any) -> Batch:
        """Return the batch of these rows, as in `WholeBatches`."""
        if isinstance(rows, SeededRows):
            keys, draws, samples = rows.keys, Draws(rows.words), rows.samples
        else:
            # A worker's seed contains torch's base seed of the epoch and the worker's number.
            worker: Any = get_worker_info()
            seed = self._seed if worker is None else int(worker.seed)
            self._count += 1
            keys, draws = rows, FreeDraws(len(rows), (seed & (2**64 - 1), self._count))
            samples = partial(map, self._cached.__getitem__, rows)
        with suppress(NotThisBatch):
            return self.of(keys, draws)
        return default_collate(list(samples()))

    def of(self, rows: Sequence[Any], draws: Draws) -> Batch:
        """Return the batch of these rows.

        Args:
            rows: integers from 0 on.
            draws: gives the random numbers of each row.

        Raises:
            NotThisBatch: it has to be collated sample by sample.
        """
        try:
            numbers = np.asarray(rows)
        except (TypeError, ValueError) as error:
            raise NotThisBatch from error
        is_rows = numbers.ndim == 1 and len(numbers) and numbers.dtype.kind in "iu"
        if not (is_rows and 0 <= numbers.min() <= numbers.max() < len(self._cached)):
            raise NotThisBatch
        if not collates_as_torch():
            raise NotThisBatch
        located = self._cached.located(numbers.tolist())
        columns = {number: make(located, draws) for number, make in self._columns.items()}
        # default_collate makes lists of plain tuples.
        return join(self._structure, columns, self._cached.namedtuples, tuples=list)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker maps the file itself: a mapping would be pickled as a copy.
        return type(self), (self._cached, self._most_threads, self._puts_off)

    def _images(self, number: int, tail: Any) -> _Make:
        entry = self._cached.columns[number]
        (kind, dimensions), *others = entry.variants
        try:
            if others or kind not in KINDS or dimensions != 3:
                raise Obstacle(f"its tail works on {', '.join(kind for kind, _ in entry.variants)}")
            return Images(number, tail, self._pool, self._threads, self._puts_off)
        except Obstacle as error:
            raise Obstacle(f"column {entry.name!r}: {error}") from error

    def _collated(self, number: int) -> _Make:
        entry = self._cached.columns[number]
        kinds = {kind for kind, _ in entry.variants}
        is_stacked = len(kinds) == 1 and next(iter(kinds)).partition(":")[0] in _STACKED
        # Most are copied once, from the file into the batch. In a leaf, a bool is 0 or 1.
        dtype = np.dtype(entry.dtype)
        are_numbers = kinds in ({"int"}, {"float"})
        is_as_stored = kinds <= {"array", f"tensor:{dtype.name}"} and dtype != np.bool_

        def make(rows: Sequence[Located], draws: Draws) -> Any:
            if are_numbers or (is_stacked and is_as_stored):
                leaves = [each for _, each in read_column(rows, number, ColumnReader.stored)]
            else:
                leaves = read_column(rows, number, ColumnReader.leaf)
            try:
                if are_numbers:
                    return torch.from_numpy(np.array(leaves))
                if not is_stacked:
                    return default_collate(leaves)
                tensors = [torch.as_tensor(leaf) for leaf in leaves]
                shape = len(tensors), *tensors[0].shape
                return torch.stack(tensors, out=empty(self._pool, shape, tensors[0].dtype))
            except Exception as error:  # torch raises it again, for whole samples
                raise NotThisBatch from error

        return make


def proved(
    cached: CachedDataset, threads: int | None = None, puts_off: bool = False
) -> Batches | str:
    """Return a `Batches` of ``cached``, proved equal to torch's on a few rows; or why none is."""
    try:
        batches, tried = Batches(cached, threads, puts_off), Batches(cached, threads)
    except Obstacle as error:
        return str(error)
    try:  # without what is put off
        is_equal = _are_equal(cached, lambda rows, seeding: tried.of(rows, Draws(seeding)))
    finally:
        tried.close()
    return batches if is_equal else "its batches differ from those of default_collate"


def finishes_floats(cached: CachedDataset) -> bool:
    """Return whether `finished` batches of ``cached`` are proved equal to torch's on a few rows."""
    return has_floats(cached) and _are_equal(
        cached, lambda rows, seeding: finished(_Seeded(cached, rows, seeding))
    )


class _Seeded:
    """Some rows of a cache, each read with the generators seeded for it."""

    def __init__(self, cached: CachedDataset, rows: Sequence[int], seeding: Any) -> None:
        self._cached, self._rows, self._seeding = cached, rows, seeding.tolist()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        a, b, c, d = self._seeding[number]
        seed_generators((a, b, c, d))
        return self._cached[self._rows[number]]


def _are_equal(cached: CachedDataset, make: Callable[[Sequence[int], Any], Batch]) -> bool:
    """Return whether batches of one row and of several equal torch's, with equal random numbers.

    Reads a few rows both ways, with their live transforms, which are torchvision's.
    """
    spread = [int(row) for row in np.linspace(0, len(cached) - 1, _PROVED_ROWS)]
    proved = False
    with random_states_kept(cuda=False):
        for seed, rows in enumerate([*([row] for row in spread), spread]):
            seeding = words(seed, 0, np.arange(len(rows)))
            samples = map(_Seeded(cached, rows, seeding).__getitem__, range(len(rows)))
            wanted = _or_none(lambda: default_collate(list(samples)))  # noqa: B023
            made = _or_none(lambda: make(rows, seeding))  # noqa: B023
            if wanted is None and made is None:  # torch's error will be raised for such rows
                continue
            if wanted is None or made is None or not equal(made, wanted, strides=False):
                return False
            proved = True
    return proved


def _or_none(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception:
        return None
