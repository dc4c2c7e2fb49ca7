"""Shuffle a dataset in orders that are random and that a disk can serve quickly.

    rows as stored in the file          0 1 2 │ 3 4 5 │ 6 7 8 │ 9 ...      blocks
    blocks in random order              6 7 8 │ 0 1 2 │ 9 ...              long reads, each once
    rows moved within half a window     7 0 6 2 9 8 1 ...                  yielded
                                              └─ the next blocks are requested from the kernel

Only one window has to fit in memory; a full shuffle needs the whole file there.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sized
from contextlib import suppress
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch.utils.data import DistributedSampler

from dataloaders.errors import OptionError
from dataloaders.seeding.words import FIRST_RESERVED_DRAW, words_of

__all__ = ["BlockShuffle", "ReadAhead"]

BLOCK_BYTES = 2 << 20
"""The default size of a block: several requests of this size are as fast as one long read."""
WINDOW_BYTES = 512 << 20
"""The default size of a window."""
MOST_WINDOW_ROWS = 1 << 18
"""The default limit of a window of small rows."""
_WINDOW_BLOCKS = 64  # the least number of blocks in a default window

_AHEAD = 64 << 20  # how far to read ahead, in bytes
_FASTEST = 16 << 30  # bytes a second; no disk delivers rows faster than this
_CHUNK = 64  # rows that are yielded between two requests

_ORDER, _MOVES = FIRST_RESERVED_DRAW + 4, FIRST_RESERVED_DRAW + 5

Rows = npt.NDArray[np.int64]


@runtime_checkable
class ReadAhead(Protocol):
    """A dataset whose rows are stored in a file, such as a `CachedDataset`."""

    @property
    def row_bytes(self) -> float:
        """Bytes in a row, on average."""

    def will_read(self, first: int, last: int) -> None:
        """Have rows ``first`` to ``last - 1`` read from disk in the background."""


class BlockShuffle(DistributedSampler[int]):
    """Shuffle all rows in an order that reads a file in long runs, for files larger than memory.

        loader = DataLoader(cached, batch_size=64, sampler=BlockShuffle(cached, seed=0))

    The rows are divided into blocks of consecutive rows. The blocks are shuffled, and each row then
    moves by a random distance of at most half a window. So each block is read once, in one go, and
    memory has to hold one window of rows and a few blocks. For a cache, the next blocks are
    requested ahead of time (`CachedDataset.will_read`), on behalf of all processes that read it.

    **How random it is.** Each row comes once an epoch, at any point of it. Only which rows meet in
    a batch differs from a full shuffle: they come evenly from one window, that is from window /
    block random places of the file, and two rows of one block share a batch with a probability of
    about batch / window instead of batch / rows. A window as large as the dataset, or ``block=1``,
    gives a full shuffle.

    The order is a function of seed and epoch, and the same on every machine. The epoch is the value
    given to `set_epoch`; without one, the number of earlier iterations of this sampler.

    **Several ranks.** Each rank of the default process group gets the same number of rows, from
    blocks of its own, so the ranks' windows add up in memory. Without ``drop_last``, some rows are
    repeated to make the shares equal. Lightning and Fabric keep a `DistributedSampler` as it is and
    call `set_epoch`. Accelerate distributes every loader's batches itself: for Accelerate, give
    ``num_replicas=1`` and a seed.

    Args:
        dataset: a cache, or anything with a length. With ``backend="h5"`` over your own dataset,
            give a ``CachedDataset`` of the same file.
        block: rows that are read together. By default as many as take 2 MiB, at most 1/64 of the
            window. Required for a dataset that is not a cache.
        window: rows. By default as many as take 512 MiB, or 64 blocks if the size of a row is not
            known; at most 262,144. It does not depend on the machine's memory, because the order
            depends on it.
        seed: of the order. None: drawn from torch's default generator for each epoch, as
            `RandomSampler` does; with several ranks, which must agree, 0.
        num_replicas, rank: of the ranks. None: those of the default process group at the time of
            iteration; without one, 1 and 0.
        drop_last: leave out up to ``num_replicas - 1`` rows instead of repeating some.

    Raises:
        OptionError: an option has a value that it cannot take.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        block: int | None = None,
        window: int | None = None,
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        # Torch's __init__ is not called: it asks the process group, which may not exist yet.
        self.dataset: Any = dataset
        self.shuffle = True
        self.drop_last = drop_last
        self.epoch = 0
        self._epoch_given = False
        self.seed = _whole_or_none("seed", seed, least=-(2**63))  # type: ignore[assignment]
        block, window = _whole_or_none("block", block), _whole_or_none("window", window)
        self.block, self.window = _sizes(dataset, block, window)
        self._num_replicas = _whole_or_none("num_replicas", num_replicas)
        self._rank = _whole_or_none("rank", rank, least=0)
        self._check_rank(self._rank or 0, num_replicas)

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The number of ranks that share the rows."""
        if self._num_replicas is not None:
            return self._num_replicas
        return torch.distributed.get_world_size() if _has_group() else 1

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The number of this rank."""
        if self._rank is None and _has_group() and self._num_replicas != 1:
            return torch.distributed.get_rank()
        return self._rank or 0

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Rows of each rank."""
        rows, of = len(self.dataset), self.num_replicas
        return rows // of if self.drop_last else -(-rows // of)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Rows of all ranks together, repeated ones included."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next iteration, and of every later one until the next call."""
        self.epoch = _whole("epoch", epoch, least=0)
        self._epoch_given = True

    def __iter__(self) -> Iterator[int]:
        of, rank = self.num_replicas, self.rank
        self._check_rank(rank, of)
        epoch = self.epoch
        if not self._epoch_given:
            self.epoch += 1
        seed = self.seed
        if seed is None:
            seed = 0 if of > 1 else int(torch.empty((), dtype=torch.int64).random_().item())
        blocks = _shuffled(-(-len(self.dataset) // self.block), _bits(seed, epoch, 0, _ORDER))
        rows = (blocks[:, None] * self.block + np.arange(self.block)).ravel()
        rows = rows[rows < len(self.dataset)]
        share = np.arange(rank * self.num_samples, (rank + 1) * self.num_samples)
        rows = rows.take(share, mode="wrap")  # repeats the first rows to make the shares equal
        moved = rows[_moves(len(rows), self.window, _bits(seed, epoch, rank, _MOVES))]
        return self._yielded(rows, moved)

    def _yielded(self, rows: Rows, moved: Rows) -> Iterator[int]:
        """Yield ``moved`` one by one, and request rows from the disk before they are due."""
        if not isinstance(self.dataset, ReadAhead):
            yield from map(int, moved)
            return
        ahead = _Ahead(self.dataset, rows, self.block, self.window)
        for at in range(0, len(moved), _CHUNK):
            some = moved[at : at + _CHUNK].tolist()
            ahead.request(at)
            begin = time.perf_counter()
            yield from some
            ahead.seconds += time.perf_counter() - begin

    def _check_rank(self, rank: int, of: int | None) -> None:
        if of is not None and not 0 <= rank < of:
            raise OptionError(
                f"BlockShuffle(rank={rank}, num_replicas={of}): ranks are counted from 0, so the "
                f"last one is {of - 1}"
            )


class _Ahead:
    """Request rows before they are due, far enough ahead to keep a disk busy.

    Args:
        file: where they are read from.
        rows: in the order in which their blocks are due.
        block, window: in rows.

    Attributes:
        seconds: what the consumer has taken for its rows so far.
    """

    def __init__(self, file: ReadAhead, rows: Rows, block: int, window: int) -> None:
        self.seconds = 0.0
        self._file, self._rows = file, rows
        starts = np.flatnonzero((np.diff(rows, prepend=-2) != 1) | (rows % block == 0))
        self._begins = np.append(starts, len(rows))
        self._row_bytes = max(1.0, file.row_bytes)
        half = len(rows) if window >= len(rows) else -(-window // 2)
        self._reach = half + int(_AHEAD / self._row_bytes) + _CHUNK
        self._next = 0

    def request(self, yielded: int) -> None:
        """Request the blocks that are due soon after so many rows."""
        if yielded * self._row_bytes > _AHEAD + self.seconds * _FASTEST:
            return  # the epoch is being listed, not read
        begins = self._begins
        last = int(np.searchsorted(begins, yielded + self._reach))
        for begin, end in pairwise(begins[self._next : last + 1].tolist()):
            self._file.will_read(int(self._rows[begin]), int(self._rows[end - 1]) + 1)
        self._next = max(self._next, last)


def _moves(count: int, window: int, random: np.random.Philox) -> Rows:
    """Return the order of ``count`` rows, each at most half a window from its place.

    Row number i is due at i + 1/2 + (u - 1/2) * window, with u uniform in [0, 1). Times before the
    beginning or after the end are reflected there, so that rows are due at a constant rate.
    """
    # Raw bits and IEEE products are the same on any machine and with any NumPy.
    even = (random.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    if window >= count:
        due = even
    else:
        due = np.abs(np.arange(count) + 0.5 + (even - 0.5) * window)
        due = np.where(due > count, 2.0 * count - due, due)
    return np.argsort(due, kind="stable")


def _shuffled(count: int, random: np.random.Philox) -> Rows:
    """Return 0 to ``count - 1`` in random order, sorted by random bits placed above the numbers."""
    bits = np.uint64((count - 1).bit_length())
    keys = random.random_raw(count) << bits | np.arange(count, dtype=np.uint64)
    keys.sort()
    numbers: Rows = (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    return numbers


def _bits(seed: int, epoch: int, rank: int, draw: int) -> np.random.Philox:
    """Return a source of random bits for these numbers, the same in every version of NumPy."""
    words = words_of(seed, epoch, rank, 0, draw)
    return np.random.Philox(
        key=np.array([words[0] | words[1] << 32, words[2] | words[3] << 32], np.uint64)
    )


def _sizes(dataset: Any, block: int | None, window: int | None) -> tuple[int, int]:
    """Return the rows of a block and of a window; None stands for the default."""
    if isinstance(dataset, ReadAhead):
        row_bytes = max(1.0, dataset.row_bytes)
        if window is None:
            window = max(1, min(int(WINDOW_BYTES / row_bytes), MOST_WINDOW_ROWS))
        if block is None:
            block = max(1, min(int(BLOCK_BYTES / row_bytes), window // _WINDOW_BLOCKS))
        return block, window
    if block is None:
        raise OptionError(
            f"BlockShuffle(block=None) needs a cache, and {type(dataset).__name__} is not one; "
            "give the number of rows to read together, such as block=32"
        )
    if window is None:
        window = max(2 * block, min(_WINDOW_BLOCKS * block, MOST_WINDOW_ROWS))
    return block, window


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _whole(name: str, value: Any, *, least: int) -> int:
    """Return an option that has to be an integer from ``least`` on."""
    with suppress(TypeError):
        number = operator.index(value)
        if not isinstance(value, bool) and least <= number < 2**63:
            return number
    raise OptionError(
        f"BlockShuffle({name}={value!r}): must be an integer from {least} to 2**63 - 1"
    )


def _whole_or_none(name: str, value: Any, *, least: int = 1) -> int | None:
    return None if value is None else _whole(name, value, least=least)
