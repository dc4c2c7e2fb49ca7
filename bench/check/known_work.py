"""Steps and datasets whose every batch takes a known time: what the workloads are built of.

    wait(s)   s seconds by the clock, the core left free      I/O, a device that computes
    busy(s)   s seconds by the clock, on a core               a step that does not slow down
    work(s)   s seconds of this thread's CPU, on a core       decoding; slows down with company

busy() and work() hash buffers: that releases the interpreter lock as real kernels do, so torch's
own threads (index queues, shared file descriptors) run beside them.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Kind: TypeAlias = Literal["wait", "busy", "work"]

BATCH = 4
"""Samples in a batch, but where a workload says otherwise; the first of them carries its time."""

_CHUNK = bytes(32 * 1024)
_FINE_S = 1e-4
_SLEEP_MARGIN_S = 2e-4  # time.sleep comes back 60 to 200 us late


def wait(seconds: float) -> None:
    """Return ``seconds`` later by the clock, asleep until shortly before."""
    deadline = time.perf_counter() + seconds
    if seconds > 2 * _SLEEP_MARGIN_S:
        time.sleep(seconds - _SLEEP_MARGIN_S)
    while time.perf_counter() < deadline:
        pass


def busy(seconds: float) -> None:
    """Return ``seconds`` later by the clock, computing until then."""
    _hash_until(time.perf_counter, seconds)


def work(seconds: float) -> None:
    """Return when this thread has computed for ``seconds`` of CPU time."""
    _hash_until(time.thread_time, seconds)


_KINDS: dict[str, Callable[[float], None]] = {"wait": wait, "busy": busy, "work": work}


def burn(kind: Kind, seconds: float) -> None:
    """Spend ``seconds`` in the named way; nothing at all for 0."""
    if seconds > 0:
        _KINDS[kind](seconds)


class Step:
    """A training step that takes ``pattern[call % len(pattern)]`` seconds, whatever the batch.

    Args:
        pattern: seconds, one call after the other.
        kind: how they are spent.
        per_length: seconds for each column of the batch instead: a step that depends on its data.
        writes: whether the step writes into its batch (it multiplies by one, in place).
    """

    def __init__(
        self,
        pattern: Sequence[float],
        kind: Kind = "busy",
        *,
        per_length: float = 0.0,
        writes: bool = False,
    ) -> None:
        self._seconds = itertools.cycle(pattern)
        self._kind = kind
        self._per_length = per_length
        self._writes = writes

    def __call__(self, batch: Any) -> None:
        if self._writes:
            batch.mul_(1.0)
        columns = self._per_length and batch.shape[1]
        burn(self._kind, columns * self._per_length or next(self._seconds))


class Rows(Dataset[torch.Tensor]):
    """``batches * batch`` samples; the first of batch ``k`` takes ``loads[k % len(loads)]`` s.

    A sample is a float32 row of ``lengths[k % len(lengths)]`` values. ``once``: a batch takes its
    time only when it is read for the first time in a process.
    """

    def __init__(
        self,
        loads: Sequence[float],
        kind: Kind = "wait",
        *,
        batches: int,
        batch: int = BATCH,
        lengths: Sequence[int] = (16,),
        once: bool = False,
    ) -> None:
        self._loads = tuple(loads)
        self._kind = kind
        self._batches = batches
        self._batch = batch
        self._rows = [torch.full((length,), 1.0) for length in lengths]
        self._once = once
        self._read: set[int] = set()

    def __len__(self) -> int:
        return self._batches * self._batch

    def __getitem__(self, index: int) -> torch.Tensor:
        number, place = divmod(index, self._batch)
        if place == 0 and number not in self._read:
            burn(self._kind, self._loads[number % len(self._loads)])
            if self._once:
                self._read.add(number)
        return self._rows[number % len(self._rows)]


class Stream(IterableDataset[torch.Tensor]):
    """Batches without end or index, each taking ``loads`` seconds; every worker has its own."""

    def __init__(self, loads: Sequence[float], kind: Kind = "wait") -> None:
        self._loads = tuple(loads)
        self._kind = kind

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        start = 0 if worker is None else worker.id
        row = torch.ones(16)
        for number in itertools.count(start):
            burn(self._kind, self._loads[number % len(self._loads)])
            yield from itertools.repeat(row, BATCH)


def as_array(samples: list[torch.Tensor]) -> Any:
    """A NumPy batch: crosses from a worker in a quarter of the time that a tensor takes."""
    return torch.stack(samples).numpy()


def _hash_until(clock: Callable[[], float], seconds: float) -> None:
    deadline = clock() + seconds
    digest = hashlib.sha256()
    while clock() < deadline - _FINE_S:
        digest.update(_CHUNK)
    while clock() < deadline:
        pass
