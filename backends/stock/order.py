"""Yield the order of an epoch as index tensors: torch's samplers without their Python lists.

    BatchSampler(RandomSampler(...), 256) ──> tensor of 256 indices, tensor of 256 indices, ...

Each function below makes the same calls on the same generators, at the same moments, as its
counterpart in torch/utils/data/sampler.py (or distributed.py), and only leaves out ``.tolist()``.
"At the same moments" means: nothing is drawn before the first batch is requested, and never ahead
of the batch that needs it, so that generator states agree after every batch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

__all__ = ["Index", "Table", "as_index", "index_batches", "is_known"]

Index: TypeAlias = "torch.Tensor | list[Any]"
"""The indices of one batch: an int64 tensor with one dimension, or a list of any keys."""

_Chunks: TypeAlias = "Generator[torch.Tensor, int | None, None]"
"""Indices in the order of the epoch, in chunks drawn one by one; ``send(n)``: n are needed now."""

_SEQUENTIAL_PIECE = 65_536
_REPLACEMENT_BLOCK = 32  # RandomSampler draws with replacement 32 indices at a time
_HIDDEN_BLOCKS = 1024
_INTEGERS = {int, np.int64, np.int32}


def is_known(batch_sampler: Any) -> bool:
    """Whether `index_batches` supports this batch sampler: exactly torch's, over one of torch's."""
    return type(batch_sampler) is BatchSampler and type(batch_sampler.sampler) in _CHUNKS


def index_batches(batch_sampler: Any) -> Iterator[Index]:
    """Yield the batches of one epoch of ``batch_sampler``, which `is_known`, as indices.

    Each is an int64 tensor on the CPU; or a list, exactly torch's own, if the sampler looks its
    indices up in a list that holds other things than ints, or is in a state in which it raises.
    """
    sampler = batch_sampler.sampler
    make = _CHUNKS.get(type(sampler))
    chunks = None if make is None else make(sampler)
    if chunks is None:
        yield from batch_sampler
        return
    table = Table(sampler) if type(sampler) is SubsetRandomSampler else None
    cursor = _Cursor(chunks)
    drop_last = batch_sampler.drop_last
    size = batch_sampler.batch_size
    while True:
        if not drop_last:
            size = batch_sampler.batch_size  # torch reads it for each batch, unless drop_last
        if cursor.holds(size):
            for batch in cursor.ready(size):
                yield batch if table is None else table.lookup(sampler.indices, batch)
                cursor.position += size
                if batch_sampler.batch_size != size and not drop_last:
                    break
            continue
        batch = cursor.take(size)
        count = len(batch)
        if count == 0 or (drop_last and count < size):
            return
        yield batch if table is None else table.lookup(sampler.indices, batch)


class Table:
    """Look up ``[table[i] for i in positions]`` for batches of positions, quickly, for one epoch.

    A list of ints becomes a tensor when it is first asked, and again when it is replaced or its
    length changes. Values changed in place after that take effect in the next epoch. The tensor is
    kept as long as ``owner`` lives, and used again while the list equals what it was made of.
    """

    _made: ClassVar[WeakKeyDictionary[Any, tuple[Any, torch.Tensor]]] = WeakKeyDictionary()

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._source: Any = None
        self._length = 0
        self._tensor: torch.Tensor | None = None

    def lookup(self, table: Any, positions: Index) -> Index:
        """Return the values at ``positions``: a tensor if ``table`` holds integers, else a list.

        Raises:
            IndexError, TypeError, ...: as ``table`` does for a position that it does not have.
        """
        if table is not self._source or len(table) != self._length:
            self._source, self._length = table, len(table)
            self._tensor = self._tensor_of(table)
        known = None if self._tensor is None else as_index(positions)
        if self._tensor is not None and known is not None:
            return self._tensor.index_select(0, known)
        if type(positions) is torch.Tensor:
            positions = positions.tolist()
        return [table[position] for position in positions]

    def _tensor_of(self, table: Any) -> torch.Tensor | None:
        if type(table) is not list:
            return as_index(table)
        made = self._made.get(self._owner)
        with suppress(Exception):  # values of any type may refuse to be compared
            if made is not None and made[0] == table:
                return made[1]
        tensor = as_index(table)
        if tensor is not None:
            self._made[self._owner] = (table[:], tensor)
        return tensor


def as_index(values: Any) -> torch.Tensor | None:
    """Return ``values`` as an int64 tensor with one dimension in host memory; None if not ints.

    A tensor or array of int64 is used as it is, sharing its memory. A list or tuple must hold ints
    (bool would add a dimension).
    """
    kind = type(values)
    if kind is torch.Tensor:
        tensor: torch.Tensor = values
        fits = tensor.dtype == torch.int64 and tensor.dim() == 1 and tensor.is_cpu
        return tensor if fits and len(tensor) else None
    if (kind is list or kind is tuple) and values and _INTEGERS.issuperset(map(type, values)):
        # array() reads a list of ints several times faster than torch.tensor() does.
        return torch.frombuffer(array("q", values), dtype=torch.int64)
    if kind is np.ndarray and values.dtype == np.int64 and values.ndim == 1 and len(values):
        return torch.from_numpy(values) if values.flags.writeable else None
    return None


class _Cursor:
    """Take as many indices as requested, and draw no chunk before one of its indices is due."""

    __slots__ = ("_chunk", "_chunks", "_started", "position")

    def __init__(self, chunks: _Chunks) -> None:
        self._chunks = chunks
        self._chunk = _NOTHING
        self._started = False
        self.position = 0

    def holds(self, count: int) -> bool:
        """Whether the next ``count`` indices are drawn already."""
        return 0 < count <= len(self._chunk) - self.position

    def ready(self, size: int) -> Sequence[torch.Tensor]:
        """Return the next batches of ``size`` that it `holds`, at most 64; take none of them."""
        count = min(64, (len(self._chunk) - self.position) // size)
        drawn = self._chunk[self.position : self.position + count * size]
        batches: Sequence[torch.Tensor] = drawn.split(size)  # type: ignore[no-untyped-call]
        return batches

    def take(self, count: int) -> torch.Tensor:
        """Take the next ``count`` indices; fewer at the end of the epoch, then none."""
        parts = []
        while count > 0:
            available = len(self._chunk) - self.position
            if available == 0:
                try:
                    self._chunk = self._chunks.send(count if self._started else None)
                except StopIteration:
                    self._chunk, self.position = _NOTHING, 0
                    break
                self._started = True
                self.position = 0
                continue
            part = self._chunk[self.position : self.position + min(count, available)]
            self.position += len(part)
            count -= len(part)
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else _NOTHING


def _sequential(sampler: SequentialSampler) -> _Chunks:
    length = len(sampler.data_source)
    for start in range(0, length, _SEQUENTIAL_PIECE):
        yield torch.arange(start, min(start + _SEQUENTIAL_PIECE, length), device="cpu")


def _random(sampler: RandomSampler) -> _Chunks:
    length = len(sampler.data_source)
    if sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    else:
        generator = sampler.generator
    if sampler.replacement:
        # Torch draws blocks of 32 one by one. The generator's stream is serial, so one call for
        # several blocks draws the same numbers. From the user's own generator, whose state can be
        # seen, draw only as many as this batch needs; from one that nobody holds, many.
        blocks = sampler.num_samples // _REPLACEMENT_BLOCK
        least = _HIDDEN_BLOCKS if sampler.generator is None else 1
        needed = (yield _NOTHING) or 1
        while blocks > 0:
            now = min(blocks, max(least, math.ceil(needed / _REPLACEMENT_BLOCK)))
            blocks -= now
            needed = (yield _integers(length, now * _REPLACEMENT_BLOCK, generator)) or 1
        yield _integers(length, sampler.num_samples % _REPLACEMENT_BLOCK, generator)
        return
    for _ in range(sampler.num_samples // length):
        yield torch.randperm(length, generator=generator)
    rest = sampler.num_samples % length
    # Torch permutes once more even if it needs nothing of the result. Nobody can tell with a
    # generator that no one else holds, but the state of the user's own must advance.
    if rest or sampler.generator is not None:
        yield torch.randperm(length, generator=generator)[:rest]


def _integers(high: int, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(high=high, size=(count,), dtype=torch.int64, generator=generator)


def _subset_random(sampler: SubsetRandomSampler) -> _Chunks:
    """Yield positions in ``sampler.indices``: torch looks each up only when it is due."""
    yield torch.randperm(len(sampler.indices), generator=sampler.generator)


def _weighted(sampler: WeightedRandomSampler) -> _Chunks | None:
    if sampler.weights.dim() != 1:
        return None
    return _drawn(sampler)


def _drawn(sampler: WeightedRandomSampler) -> _Chunks:
    yield torch.multinomial(
        sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
    )


def _distributed(sampler: DistributedSampler[Any]) -> _Chunks | None:
    length = len(sampler.dataset)  # type: ignore[arg-type]
    total = sampler.total_size
    fits = total <= length if sampler.drop_last else total >= length > 0
    if not fits or len(range(sampler.rank, total, sampler.num_replicas)) != sampler.num_samples:
        return None  # the dataset changed its length: torch's own code raises
    return _share(sampler, length)


def _share(sampler: DistributedSampler[Any], length: int) -> _Chunks:
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        order = torch.randperm(length, generator=generator)
    else:
        order = torch.arange(length, device="cpu")
    if sampler.total_size > length:  # padded with repetitions of the order's own start
        order = order.repeat(math.ceil(sampler.total_size / length))
    yield order[sampler.rank : sampler.total_size : sampler.num_replicas]


_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")

_CHUNKS: dict[type, Callable[[Any], _Chunks | None]] = {
    SequentialSampler: _sequential,
    RandomSampler: _random,
    SubsetRandomSampler: _subset_random,
    WeightedRandomSampler: _weighted,
    DistributedSampler: _distributed,
}
