"""Make whole batches from a cache: crop and flip images into the batch.

    rows ──> raw images with a live tail   a window of each, copied from the mapped file into the
                                           batch, then made floats if the tail does so
             tensors and arrays            stacked, in memory of the pool
             anything else                 default_collate of the column's leaves

The batch equals ``default_collate([cached[row] for row in rows])``. Before any batch is made this
way, this is proved on rows of the same cache, with torchvision's own random numbers.

Images whose tail does something else, such as RandomResizedCrop, are made sample by sample up to
their bytes (`Leaves`), and become floats a batch at once (`LeafBatches`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from dataloaders.batches.collation import collates_as_torch
from dataloaders.batches.memory import HostPool
from dataloaders.batches.tree import Batch
from dataloaders.batches.whole import SeededRows, WholeBatches
from dataloaders.cache import CachedDataset
from dataloaders.cache.read.files import Column
from dataloaders.cache.sample.sample import join
from dataloaders.recording.worker import equal
from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.read import Kind, read

from .draws import Draws, FreeDraws
from .floats import UpToBytes
from .images import KINDS, Images
from .rows import Rows, empty
from .threads import Threads
from .windows import NotThisBatch, Obstacle

__all__ = ["Batches", "LeafBatches", "Leaves", "proved"]

_Leaf: TypeAlias = Callable[[Rows], Any]
"""Makes the batch of one column."""

_PROVED_ROWS = 4
_STACKED = ("tensor", "tv_tensor", "array")


class _Batches:
    """What both ways of making batches of a cache have in common.

    Args:
        cached: the cache, with its live transforms.
        threads: how many at most make a batch, as in `Threads`.
        puts_off: whether images that end as floats are returned as bytes, in a `Trailing`.

    Attributes:
        cached: as given.
    """

    def __init__(
        self, cached: CachedDataset, threads: int | None = None, puts_off: bool = False
    ) -> None:
        if cached.transform is not None:
            raise Obstacle("the cache is given a transform of whole samples")
        if not len(cached) or cached.index.structure is None:
            raise Obstacle("the cache has no rows")
        self.cached = cached
        self.tails = dict(cached.calls)
        if len(self.tails) != len(cached.calls):
            raise Obstacle("a leaf has two tails")
        self._most_threads, self._puts_off = threads, puts_off
        self._pool, self._threads = HostPool(), Threads(threads)
        self._seed = self._count = 0

    def begin(self, seed: int) -> None:
        """Begin an epoch with this seed."""
        self._seed, self._count = seed, 0

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    def joined(self, columns: list[Any]) -> Batch:
        """Return the batch whose leaves are these, as default_collate nests it."""
        structure = self.cached.index.structure
        assert structure is not None
        # default_collate makes lists of plain tuples.
        return join(structure, columns, self.cached.namedtuples, tuples=list)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker maps the file itself: a mapping would be pickled as a copy.
        return type(self), (self.cached, self._most_threads, self._puts_off)


class Batches(_Batches, WholeBatches):
    """A collate_fn that makes batches of rows; raises `Obstacle` if that cannot be done."""

    def __init__(self, cached: CachedDataset, *options: Any) -> None:
        super().__init__(cached, *options)
        self._leaves = [
            _leaf_of(column, self.tails.get(number)) for number, column in enumerate(cached.readers)
        ]

    def __call__(self, rows: Any) -> Batch:
        """Return the batch of these rows, as in `WholeBatches`."""
        if isinstance(rows, SeededRows):
            batch = self.of(rows.keys, Draws(rows.words))
            return default_collate(rows.samples()) if batch is None else batch
        # A worker's seed contains torch's base seed of the epoch and the worker's number.
        worker: Any = get_worker_info()
        seed = self._seed if worker is None else int(worker.seed)
        self._count += 1
        batch = self.of(rows, FreeDraws(len(rows), (seed & (2**64 - 1), self._count)))
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
        task = Rows(numbers.astype(np.int64), draws, self._pool, self._threads, self._puts_off)
        try:
            return self.joined([leaf(task) for leaf in self._leaves])
        except NotThisBatch:
            return None

    def seeded(self, rows: Sequence[int], words: Any) -> Batch | None:
        """Return the batch of these rows, with the random numbers that ``words`` seed."""
        return self.of(rows, Draws(words))


def _leaf_of(column: Column, tail: Any) -> _Leaf:
    """Return what makes the batch of a column; or raise `Obstacle`."""
    variants = column.entry.variants
    if tail is not None:
        try:
            if len(variants) > 1 or variants[0][0] not in KINDS or variants[0][1] != 3:
                raise Obstacle(f"its tail works on {', '.join(kind for kind, _ in variants)}")
            return Images(column, tail)
        except Obstacle as error:
            raise Obstacle(f"column {column.entry.name!r}: {error}") from error

    is_stacked = len(variants) == 1 and variants[0][0].partition(":")[0] in _STACKED

    def collated(rows: Rows) -> Any:
        leaves = column.leaves(rows.numbers.tolist())
        try:
            if not is_stacked:
                return default_collate(leaves)
            tensors = [torch.as_tensor(leaf) for leaf in leaves]
            shape = len(tensors), *tensors[0].shape
            return torch.stack(tensors, out=empty(rows.pool, shape, tensors[0].dtype))
        except Exception as error:  # torch raises it again, for whole samples
            raise NotThisBatch from error

    return collated


class Leaves(Dataset[list[Any]]):
    """The samples of a cache as lists of their leaves, images up to their bytes.

    Attributes:
        dataset: the cache itself, for `ShowsDataset`.
    """

    def __init__(self, batches: LeafBatches) -> None:
        self.dataset = batches.cached
        self._rows = copy.copy(batches.cached)
        self._rows.calls = list(batches.tails.items())

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> list[Any]:
        return self._rows.leaves([row])[0]

    def __getitems__(self, rows: Sequence[Any]) -> list[list[Any]]:
        return self._rows.leaves(rows)


class LeafBatches(_Batches):
    """A collate_fn of `Leaves`; raises `Obstacle` if no images become floats of bytes."""

    def __init__(self, cached: CachedDataset, *options: Any) -> None:
        super().__init__(cached, *options)
        if not collates_as_torch():
            raise Obstacle("default_collate has been changed")
        members = [member for tail in self.tails.values() for member in read(tail)]
        if any(member.kind is Kind.OPAQUE for member in members):
            raise Obstacle("no proof runs code of the user's in this process")
        ends = {number: UpToBytes(tail) for number, tail in self.tails.items()}
        self._ends = {number: end for number, end in ends.items() if end.has_floats}
        if not self._ends:
            raise Obstacle("no tail makes floats of bytes")
        self.tails |= self._ends

    def __call__(self, samples: list[list[Any]]) -> Batch:
        """Return the batch of these samples."""
        columns = []
        for number, leaves in enumerate(map(list, zip(*samples, strict=True))):
            end = self._ends.get(number)
            columns.append(
                default_collate(leaves)
                if end is None
                else end.collate(leaves, self._pool, self._threads, self._puts_off)
            )
        return self.joined(columns)

    def seeded(self, rows: Sequence[int], words: Any) -> Batch:
        """Return the batch of these rows, with the random numbers that ``words`` seed."""
        return self(_seeded(Leaves(self), rows, words))


_Kind = TypeVar("_Kind", Batches, LeafBatches)


def proved(
    kind: type[_Kind], cached: CachedDataset, threads: int | None = None, puts_off: bool = False
) -> _Kind | str:
    """Return a ``kind`` whose batches of ``cached`` equal torch's; or say why there is none.

    Batches of a few rows are compared with those of `default_collate` first.
    """
    try:
        batches = kind(cached, threads, puts_off)
    except Obstacle as error:
        return str(error)
    with random_states_kept(cuda=False):
        if _is_proved(cached, kind(cached).seeded):  # which puts nothing off
            return batches
    return "its batches differ from those of default_collate"


def _is_proved(cached: CachedDataset, make: Callable[[Sequence[int], Any], Batch | None]) -> bool:
    """Return whether batches of one row and of several equal torch's, with equal random numbers.

    Reads a few rows both ways, with their live transforms, which are torchvision's.
    """
    spread = [int(row) for row in np.linspace(0, len(cached) - 1, _PROVED_ROWS)]
    proved = False
    for seed, rows in enumerate([*([row] for row in spread), spread]):
        seeding = words(seed, 0, np.arange(len(rows)))
        wanted = _or_none(lambda: default_collate(_seeded(cached, rows, seeding)))  # noqa: B023
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


def _seeded(dataset: Any, rows: Sequence[int], words: Any) -> list[Any]:
    samples = []
    for row, (a, b, c, d) in zip(rows, words.tolist(), strict=True):
        seed_generators((a, b, c, d))
        samples.append(dataset[row])
    return samples
