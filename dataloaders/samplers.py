"""Orders in which a dataset is read: random, and yet kind to the disk.

    rows as they stand in the file      0 1 2 │ 3 4 5 │ 6 7 8 │ 9 ...      blocks
    blocks in random order              6 7 8 │ 0 1 2 │ 9 ...              read: long runs, once
    rows moved within half a window     7 0 6 2 9 8 1 ...                  given out
                                              └─ the kernel is told of the blocks that come next

A window is what has to stay in memory, where a full shuffle needs all of the file.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Sized
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch.utils.data import DistributedSampler

from dataloaders.errors import OptionError
from dataloaders.seeding.philox import FIRST_RESERVED_DRAW, words_of

__all__ = ["BlockShuffle", "ReadAhead"]

BLOCK_BYTES = 2 << 20
"""Of a block, by default: with several of them asked for at once, as good as one long run."""
WINDOW_BYTES = 512 << 20
"""Of a window, by default."""
MOST_WINDOW_ROWS = 1 << 18
"""Of a window, by default, where rows are small: they are in memory while they are sorted."""
_WINDOW_BLOCKS = 64  # of a window by default, at least

_LEAST_AHEAD, _MOST_AHEAD = 16 << 20, 64 << 20  # bytes that the disk is kept busy with
_FASTEST = 16 << 30  # bytes a second; who takes more is not reading rows from a disk
_LEAST_CHUNK, _MOST_CHUNK = 16, 1024  # rows that are given out between two looks ahead

_ORDER, _MOVES = FIRST_RESERVED_DRAW + 4, FIRST_RESERVED_DRAW + 5

Rows = npt.NDArray[np.int64]


@runtime_checkable
class ReadAhead(Protocol):
    """A dataset that lies in a file, row by row, such as a `CachedDataset`."""

    @property
    def row_bytes(self) -> float:
        """Bytes of a row, on average."""

    def will_read(self, first: int, last: int) -> None:
        """Have rows ``first`` to ``last - 1`` read from disk in the background."""


class BlockShuffle(DistributedSampler[int]):
    """All rows once, in a random order that reads a file in long runs: for files beyond memory.

        loader = DataLoader(cached, batch_size=64, sampler=BlockShuffle(cached, seed=0))

    The rows are cut into blocks of neighbours, the blocks come in random order, and each row moves
    by a random distance of at most half a window from where its block puts it. So each block is
    read once, all at a time, shortly before its first row is due, and in memory there has to be one
    window of rows, and a few blocks. Given a cache, the blocks that come next are asked for ahead
    (`CachedDataset.will_read`), for all processes that read the file.

    **How random it is.** Each row comes once an epoch, at any time of it. What differs from a full
    shuffle is who meets whom: a batch's rows come from one window, evenly (from half of one at the
    epoch's two ends), which is window / block random places of the file; and two rows of one block
    are in the same batch with a chance of about batch / window, not batch / rows. A window as
    large as the dataset is a full shuffle. ``block=1`` is one too, with any window: then each row
    is read by itself, but still asked for ahead.

    The order is a function of seed and epoch, the same on every machine. The epoch is what
    `set_epoch` was given; until then, the number of times that the sampler was iterated before.

    **Several ranks.** As with torch's `DistributedSampler`, of which this is one, each rank of the
    default process group gets as many rows, from blocks of its own: in memory the ranks' windows
    add up. Without ``drop_last``, some rows come again so that all ranks have as many. Lightning
    and Fabric leave a `DistributedSampler` as it is, and call `set_epoch`. Accelerate deals out
    every loader's batches itself: for it, give ``num_replicas=1`` and a seed.

    Args:
        dataset: what is sampled: a cache, or anything with a length. With ``backend="h5"`` over a
            dataset of yours, ``CachedDataset`` of the same file serves as well: the numbers of its
            rows are those of the samples.
        block: rows that are read together. By default as many as take 2 MiB, at most 1/64 of the
            window; of another dataset than a cache it has to be said.
        window: rows. By default as many as take 512 MiB, or 64 blocks where it is not known what
            a row takes; at most 262,144. It is not made to fit the machine's memory, since the
            order depends on it.
        seed: of the order. None: drawn from torch's default generator for each epoch, as
            `RandomSampler` does; with several ranks, which must agree, 0.
        num_replicas: how many ranks there are. None: those of the default process group at the
            time of iteration, or 1 if there is none.
        rank: which one this is; None: that of the process group.
        drop_last: leave out up to ``num_replicas - 1`` rows, instead of giving some twice.

    Attributes:
        dataset: as given.
        block, window: rows.
        epoch: which one the next iteration is.
        drop_last: as given.

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
        # Not torch's: that one asks the process group, which may not be there yet.
        self.dataset: Any = dataset
        self.shuffle = True
        self.drop_last = drop_last
        self.epoch = 0
        self._epoch_given = False
        self.seed: int | None = None if seed is None else _whole("seed", seed, least=-(2**63))  # type: ignore[assignment]
        if block is not None:
            block = _whole("block", block, least=1)
        if window is not None:
            window = _whole("window", window, least=1)
        self.block, self.window = _sizes(dataset, block, window)
        self._num_replicas = num_replicas
        self._rank = rank
        if num_replicas is not None:
            _whole("num_replicas", num_replicas, least=1)
        if rank is not None:
            self._check_rank(_whole("rank", rank, least=0), num_replicas)

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """How many ranks share the rows."""
        if self._num_replicas is not None:
            return self._num_replicas
        return torch.distributed.get_world_size() if _has_group() else 1

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Which of them this is."""
        if self._rank is None and _has_group() and self._num_replicas != 1:
            return torch.distributed.get_rank()
        return self._rank or 0

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Rows of this rank; of every rank."""
        rows, of = len(self.dataset), self.num_replicas
        return rows // of if self.drop_last else -(-rows // of)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Rows of all ranks, those that come twice included."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration is, and each one after it until this is called again."""
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
        share = self.num_samples
        runs = _runs(len(self.dataset), self.block, _bits(seed, epoch, 0, _ORDER))
        runs = _part(runs, len(self.dataset), rank * share, (rank + 1) * share)
        moved = _moved(runs, self.block, self.window, _bits(seed, epoch, rank, _MOVES))
        return self._given_out(runs, moved)

    def _given_out(self, runs: _Runs, moved: Iterator[Rows]) -> Iterator[int]:
        """The rows one by one, and a word to the kernel before those of another block begin."""
        chunk = max(_LEAST_CHUNK, min(self.block, _MOST_CHUNK))
        ahead = None
        if isinstance(self.dataset, ReadAhead):
            ahead = _Ahead(self.dataset, runs, self.window, chunk)
        given = 0
        for rows in moved:
            for at in range(0, len(rows), chunk):
                piece = rows[at : at + chunk].tolist()
                if ahead is not None:
                    ahead.look(given)
                given += len(piece)
                left = time.perf_counter()
                yield from piece
                if ahead is not None:
                    ahead.away(time.perf_counter() - left)

    def _check_rank(self, rank: int, of: int | None) -> None:
        if of is not None and not 0 <= rank < of:
            raise OptionError(
                f"BlockShuffle(rank={rank}, num_replicas={of}): ranks are counted from 0, so the "
                f"last one is {of - 1}"
            )

    def __repr__(self) -> str:
        return (
            f"BlockShuffle({self.dataset!r}, block={self.block}, window={self.window}, "
            f"seed={self.seed})"
        )


class _Runs(NamedTuple):
    """Rows side by side, run after run in the order of the epoch: the first row, and how many."""

    starts: Rows
    lengths: Rows


class _Ahead:
    """Asks for blocks before they are due, as far ahead as keeps a disk busy."""

    def __init__(self, file: ReadAhead, runs: _Runs, window: int, chunk: int) -> None:
        self._file = file
        self._row_bytes = max(1.0, file.row_bytes)
        self._runs = runs
        self._begins = np.cumsum(runs.lengths) - runs.lengths
        total = int(runs.lengths.sum())
        self._half = total if window >= total else -(-window // 2)
        ahead = min(max(window * self._row_bytes / 4, _LEAST_AHEAD), _MOST_AHEAD)
        self._reach = self._half + int(ahead / self._row_bytes) + chunk
        self._next = 0
        self._seconds = 0.0

    def away(self, seconds: float) -> None:
        """So long the rows given out so far were in use."""
        self._seconds += seconds

    def look(self, given: int) -> None:
        """Ask for what is due soon, now that so many rows are given out."""
        if given * self._row_bytes > _MOST_AHEAD + self._seconds * _FASTEST:
            return  # somebody makes a list of the epoch: the rows are read another time
        begins, (starts, lengths) = self._begins, self._runs
        last = int(np.searchsorted(begins, given + self._reach))
        # After such a pause: rows that were given out need no advice.
        passed = int(np.searchsorted(begins, given - self._half, side="right")) - 1
        for run in range(max(self._next, passed), last):
            self._file.will_read(int(starts[run]), int(starts[run] + lengths[run]))
        self._next = max(self._next, last)


def _runs(rows: int, block: int, random: np.random.Philox) -> _Runs:
    """The blocks of so many rows, shuffled."""
    starts = _shuffled(-(-rows // block), random) * block
    return _Runs(starts, np.minimum(block, rows - starts))


def _part(runs: _Runs, rows: int, first: int, last: int) -> _Runs:
    """Places ``first`` to ``last - 1`` of the order, which starts again after its end."""
    parts = []
    while first < last:
        begin = first % rows
        end = min(rows, begin + last - first)
        ends = np.cumsum(runs.lengths)
        low, high = np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end)
        starts, lengths = (each[low : high + 1].copy() for each in runs)
        lengths[-1] -= ends[high] - end
        cut = begin - (int(ends[low]) - int(runs.lengths[low]))
        starts[0] += cut
        lengths[0] -= cut
        parts.append(_Runs(starts, lengths))
        first += end - begin
    if not parts:
        return _Runs(np.zeros(0, np.int64), np.zeros(0, np.int64))
    return _Runs(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _moved(runs: _Runs, block: int, window: int, random: np.random.Philox) -> Iterator[Rows]:
    """The rows of the runs, each at most half a window from its place; in pieces of any length.

    Row number i of the order is due at i + 1/2 + (u - 1/2) * window, u even in [0, 1); what is due
    before the beginning or behind the end is mirrored there, so that every moment has as many rows.
    """
    total = int(runs.lengths.sum())
    full = window >= total
    step = total if full else max(block, window // 8, _LEAST_CHUNK)
    ends = np.cumsum(runs.lengths)
    due, waiting = np.zeros(0), np.zeros(0, np.int64)
    run = place = 0
    while place < total:
        stop = int(np.searchsorted(ends, min(place + step, total))) + 1
        starts, lengths = runs.starts[run:stop], runs.lengths[run:stop]
        count = int(lengths.sum())
        within = np.arange(count) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows = np.repeat(starts, lengths) + within
        # Raw bits and IEEE products: the same on any machine and with any NumPy.
        even = (random.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        if full:
            moments = even * total
        else:
            moments = np.abs(np.arange(place, place + count) + 0.5 + (even - 0.5) * window)
            moments = np.where(moments > total, 2.0 * total - moments, moments)
        due, waiting = np.concatenate([due, moments]), np.concatenate([waiting, rows])
        run, place = stop, place + count
        # Rows of later blocks are due no earlier than this.
        now = due < (np.inf if place == total else place - window / 2)
        yield waiting[now][np.argsort(due[now], kind="stable")]
        due, waiting = due[~now], waiting[~now]


def _shuffled(count: int, random: np.random.Philox) -> Rows:
    """0 to ``count - 1`` in random order: sorted by random bits, which stand above the numbers."""
    bits = np.uint64(max(1, (count - 1).bit_length()))
    keys = random.random_raw(count) << bits | np.arange(count, dtype=np.uint64)
    keys.sort()
    numbers: Rows = (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)
    return numbers


def _bits(seed: int, epoch: int, rank: int, draw: int) -> np.random.Philox:
    """Random bits that belong to these numbers: NumPy promises that they stay the same."""
    words = words_of(seed, epoch, rank, 0, draw)
    return np.random.Philox(
        key=np.array([words[0] | words[1] << 32, words[2] | words[3] << 32], np.uint64)
    )


def _sizes(dataset: Any, block: int | None, window: int | None) -> tuple[int, int]:
    """The rows of a block and of a window; None: as many as are usual."""
    if isinstance(dataset, ReadAhead):
        row_bytes = max(1.0, dataset.row_bytes)
        if window is None:
            window = max(1, min(int(WINDOW_BYTES / row_bytes), MOST_WINDOW_ROWS))
        if block is None:
            block = max(1, min(int(BLOCK_BYTES / row_bytes), window // _WINDOW_BLOCKS))
        return block, window
    if block is None:
        raise OptionError(
            f"BlockShuffle(block=None) needs a cache, and {type(dataset).__name__} is none: say "
            "how many neighbours are read together, such as block=32"
        )
    if window is None:
        window = max(2 * block, min(_WINDOW_BLOCKS * block, MOST_WINDOW_ROWS))
    return block, window


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _whole(name: str, value: Any, *, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number < 2**63:
        raise OptionError(
            f"BlockShuffle({name}={value!r}): must be a whole number from {least} on, below 2**63"
        )
    return number
