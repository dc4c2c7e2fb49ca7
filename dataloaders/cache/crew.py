"""Worker processes that read for a build, and that do not outlive it.

    this process ──number──> worker 0        by a pipe for each worker
                 <──answer──
                 ──number──> worker 1
                 <──answer──

No lock, queue or pipe belongs to two workers: wherever one is killed, it leaves nothing that
another one, or this process, could wait for. That it died is told where answers are waited for, and
by no signal handler, which would raise anywhere.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils import worker as of_torch

from dataloaders.cache.heap import settle_in
from dataloaders.cache.rows import Failure, not_interrupted
from dataloaders.errors import add_note

__all__ = ["AHEAD", "Parts", "results"]

AHEAD = 2
"""Numbers that each worker is given at a time, one of which it reads; while there are that many."""

_INTERRUPTED = 130  # exit status of a worker that Ctrl-C has ended, as of a shell's
_LOOK_S = 0.2  # then a wait begins again: for Ctrl-C, and deaths that show nowhere
_WATCH_S = 0.2
_END_S = 5.0


@contextmanager
def results(
    dataset: Dataset[Any],
    numbers: list[int],
    *,
    num_workers: int,
    context: Any = None,
    stop: str | None = None,
    named: Callable[[int], str] = str,
) -> Iterator[Iterator[Any]]:
    """The samples of ``dataset`` with these numbers, as they are finished; no worker stays.

    Args:
        dataset: map-style.
        numbers: of the samples.
        num_workers: 0: this process; samples are then in order.
        context: how workers start, as a DataLoader takes it.
        stop: a file that is made if the block ends with an error, for workers to look at.
        named: what a worker that dies is said to have read, by its number.

    Raises:
        RuntimeError: a worker died.
    """
    workers: list[_Worker] = []
    try:
        if num_workers:
            _start(workers, dataset, num_workers, context)
            yield _answers(workers, iter(numbers), named)
        else:
            yield (dataset[number] for number in numbers)
    except BaseException:
        if stop is not None:
            with suppress(OSError):  # then they end with their chunks
                Path(stop).touch()
        raise
    finally:
        # Not left to the collector: workers would go on writing after the lock is given back.
        _end(workers)


class Parts(Dataset[Any]):
    """As samples: numbers, and what a function gives for each of so many parts."""

    def __init__(self, function: Callable[[int, int], Any], parts: int) -> None:
        self._function = function
        self._parts = parts

    def __getitem__(self, index: int) -> Any:
        return index, self._function(index, self._parts)


# Where the cache is built


class _Worker:
    """A process, our ends of its pipes, and the numbers that it was asked for.

    Args:
        context: how it starts.
        others: the workers so far.
        hear: see `_interrupts_later`.
        of_work: what `_work` takes besides.
    """

    def __init__(
        self, context: Any, others: list[_Worker], hear: Callable[[], None], *of_work: Any
    ) -> None:
        self.pipe, pipe = context.Pipe()
        alive, self.alive = context.Pipe(duplex=False)
        self.asked: deque[int] = deque()
        undo: list[Callable[[], None]] = []
        if context.get_start_method() == "fork":
            # Who has our ends too keeps others, and itself, from seeing that they are closed.
            undo += [end.close for each in (self, *others) for end in (each.pipe, each.alive)]
            undo.append(hear)
        self.process = context.Process(
            target=_work, args=(undo, pipe, alive, *of_work), daemon=True
        )
        with pipe, alive:  # it has its own, once it has started
            self.process.start()

    def ask(self, numbers: Iterator[int]) -> None:
        """Give it the next of ``numbers``, if there is one."""
        for number in numbers:
            self.asked.append(number)
            with suppress(ConnectionError):  # it died: told where an answer is waited for
                self.pipe.send(number)
            return

    @property
    def is_ready(self) -> bool:
        """Whether it has answered or is dead."""
        return self.pipe.poll() or not self.process.is_alive()

    def answer(self, named: Callable[[int], str]) -> Any:
        """What it says to the first number that it was asked for; it is ready."""
        try:
            if not self.pipe.poll():
                raise EOFError  # dead, and a child of its own has its end of the pipe
            answer = self.pipe.recv()
        except (EOFError, OSError):  # OSError: it was killed in the midst of an answer
            raise self._death(named(self.asked[0])) from None
        self.asked.popleft()
        if isinstance(answer, Failure):
            answer.reraise()
        return answer

    def _death(self, what: str) -> BaseException:
        self.process.join(_END_S)  # its pipe is closed a moment before its end
        code = self.process.exitcode
        if code == _INTERRUPTED:
            return KeyboardInterrupt()
        if code is None:
            how = "ended"
        elif code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        else:
            how = f"ended with exit status {code}"
        error = RuntimeError(
            f"DataLoader worker (pid {self.process.pid}) {how} while it read {what}"
        )
        add_note(
            error,
            "dataloaders: it was killed (by the system, if memory ran out), crashed in native "
            "code or ended itself while it read samples; fewer workers take less memory, and "
            "num_workers=0 shows where it crashes",
        )
        return error


def _start(workers: list[_Worker], dataset: Dataset[Any], count: int, context: Any) -> None:
    """Add ``count`` workers that have started; those that have, if it does not come to its end."""
    if not isinstance(context, BaseContext):
        context = multiprocessing.get_context(context)
    base = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator()))
    for number in range(count):
        with _interrupts_later() as hear:
            workers.append(_Worker(context, workers, hear, dataset, number, count, base))


@contextmanager
def _interrupts_later() -> Iterator[Callable[[], None]]:
    """Ctrl-C within the block comes behind it: of one in a fork's hooks Python only prints a note.

    Gives what ends the block in a fork, which does not come to its end.
    """
    main = threading.current_thread() is threading.main_thread()
    usual = signal.getsignal(signal.SIGINT) if main else None
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True

    def hear() -> None:
        if usual is not None:
            signal.signal(signal.SIGINT, usual)
        if came:
            signal.raise_signal(signal.SIGINT)

    if usual is not None:  # else Python does not have it, or not in this thread
        signal.signal(signal.SIGINT, note)
    try:
        yield hear
    finally:
        hear()


def _answers(
    workers: list[_Worker], numbers: Iterator[int], named: Callable[[int], str]
) -> Iterator[Any]:
    for worker in workers * AHEAD:
        worker.ask(numbers)
    while busy := [worker for worker in workers if worker.asked]:
        wait([end for worker in busy for end in (worker.pipe, worker.process.sentinel)], _LOOK_S)
        for worker in busy:
            if worker.is_ready:
                answer = worker.answer(named)
                worker.ask(numbers)
                yield answer


def _end(workers: list[_Worker]) -> None:
    """None of them is left; each may finish what it does, for a while."""
    try:
        for worker in workers:
            with suppress(OSError):
                worker.pipe.send(None)
            worker.pipe.close()
        until = time.monotonic() + _END_S
        for worker in workers:
            worker.process.join(max(0.0, until - time.monotonic()))
    finally:
        for worker in workers:
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.alive.close()


# In a worker


def _work(
    undo: list[Callable[[], None]],
    pipe: Connection,
    alive: Connection,
    dataset: Dataset[Any],
    number: int,
    count: int,
    base_seed: int,
) -> None:
    """Answer whatever number comes, until nobody is there to ask; what a worker runs.

    Datasets see one of the ``count`` workers of a DataLoader.

    Args:
        undo: what is not a worker's, if it is a fork.
        pipe: to the process that builds.
        alive: its other end is closed with that process.
        dataset: is asked.
        number: of the worker.
        count: of workers.
        base_seed: the random seed of worker 0.
    """
    try:
        for each in undo:
            each()
        interrupts = _Interrupts()
        _end_with(alive)
        settle_in()
        torch.set_num_threads(1)
        seed = base_seed + number
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every CUDA device too
        of_torch._worker_info = of_torch.WorkerInfo(
            id=number, num_workers=count, seed=seed, dataset=dataset
        )
        with suppress(EOFError, ConnectionError):
            while (asked := pipe.recv()) is not None:
                pipe.send(_answer(dataset, asked, interrupts))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


class _Interrupts:
    """Ctrl-C in a worker: raised in what is read, which may have to clean up; else its end at once.

    Raised anywhere it would also be so in callbacks, of which Python prints that it was ignored.
    """

    def __init__(self) -> None:
        self.reading = False
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            signal.signal(signal.SIGINT, self._came)

    def _came(self, *_: object) -> None:
        if self.reading:
            raise KeyboardInterrupt
        with suppress(Exception):  # closed, or written to just now: it ends in any case
            sys.stdout.flush()
        os._exit(_INTERRUPTED)


def _answer(dataset: Dataset[Any], number: int, interrupts: _Interrupts) -> Any:
    interrupts.reading = True
    try:
        return dataset[number]
    except BaseException as error:  # a worker that sys.exit() ends tells nothing
        return Failure.of(not_interrupted(error))
    finally:
        interrupts.reading = False


def _end_with(alive: Connection) -> None:
    """Have this process end soon after the one at the other end of ``alive``, whatever it does.

    Its parent's end tells that too, where other processes have copies of the pipe; the parent may
    be a fork server, which outlives it.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and not alive.poll(_WATCH_S):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
