"""Worker processes that read for a build, and that do not outlive it.

    this process ──task────> worker 0        by a pipe for each worker
                 <──answer──
                 ──task────> worker 1
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as of_torch

from dataloaders.cache.failure import Failure, not_interrupted
from dataloaders.cache.heap import settle_in
from dataloaders.errors import add_note
from dataloaders.observing import open_files_anew

__all__ = ["AHEAD", "Crew"]

AHEAD = 2
"""Tasks that each worker is given at a time, one of which it does; while there are that many."""

_BASE_SEED = 883951781600517636  # what a DataLoader draws from a new torch.Generator()
_INTERRUPTED = 130  # exit status of a worker that Ctrl-C has ended, as of a shell's
_LOOK_S = 0.2  # then a wait begins again: for Ctrl-C, and deaths that show nowhere
_WATCH_S = 0.2
_END_S = 5.0


class Crew:
    """Workers that do one and the same work; none of them stays behind the block.

        with Crew(work, dataset, most=2) as crew:
            crew.hire(2)
            for answer in crew.answers([1, 2, 3]):  # what work(1), work(2), work(3) give

    Args:
        work: what a worker does with a task: its own one, for as long as it lives.
        dataset: what it reads, as `get_worker_info` shows it.
        most: workers that there can be, as `get_worker_info` shows it.
        context, worker_init_fn: how workers start, as a DataLoader takes them.
    """

    def __init__(
        self,
        work: Callable[[Any], Any],
        dataset: Any,
        *,
        most: int,
        context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self._work = work
        self._dataset = dataset
        self._most = most
        self._context = context
        self._worker_init_fn = worker_init_fn
        self._workers: list[_Worker] = []
        self._ending: list[_Worker] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        # Not left to the collector: workers would go on writing after the lock is given back.
        self.dismiss()
        _wait_for_ends(self._ending)

    def hire(self, count: int) -> None:
        """Have at least so many workers."""
        if count > len(self._workers) and not isinstance(self._context, BaseContext):
            self._context = multiprocessing.get_context(self._context)
        for number in range(len(self._workers), count):
            with _interrupts_later() as hear:
                others = [*self._workers, *self._ending]
                of_work = self._work, self._dataset, number, self._most, self._worker_init_fn
                self._workers.append(_Worker(self._context, others, hear, *of_work))

    def dismiss(self, keep: int = 0) -> None:
        """Have all but the first ``keep`` workers end, once they have done what they were given."""
        while len(self._workers) > keep:
            self._ending.append(self._workers.pop())
            self._ending[-1].dismiss()

    def answers(self, tasks: Iterable[Any], *, named: Callable[[Any], str] = str) -> Iterator[Any]:
        """What the work gives for each of the tasks, as they are done.

        Args:
            tasks: to be sent to workers. If none are hired, this process does them, in order.
            named: what a worker that dies is said to have read, by its task.

        Raises:
            RuntimeError: a worker died.
        """
        if self._workers:
            return _answers(list(self._workers), iter(tasks), named)
        return (self._work(task) for task in tasks)


# Where the cache is built


class _Worker:
    """A process, our ends of its pipes, and the tasks that it was given.

    Args:
        context: how it starts.
        others: the workers so far.
        hear: see `_interrupts_later`.
        of_work: what `_serve` takes besides.
    """

    def __init__(
        self, context: Any, others: list[_Worker], hear: Callable[[], None], *of_work: Any
    ) -> None:
        self.pipe, pipe = context.Pipe()
        alive, self.alive = context.Pipe(duplex=False)
        self.asked: deque[Any] = deque()
        undo: list[Callable[[], None]] = []
        if context.get_start_method() == "fork":
            # Who has our ends too keeps others, and itself, from seeing that they are closed.
            undo += [end.close for each in (self, *others) for end in (each.pipe, each.alive)]
            undo += [hear, open_files_anew]
        self.process = context.Process(
            target=_serve, args=(undo, pipe, alive, *of_work), daemon=True
        )
        with pipe, alive:  # it has its own, once it has started
            self.process.start()

    def ask(self, tasks: Iterator[Any]) -> None:
        """Give it the next of ``tasks``, if there is one."""
        for task in tasks:
            self.asked.append(task)
            with suppress(ConnectionError):  # it died: told where an answer is waited for
                self.pipe.send(task)
            return

    def dismiss(self) -> None:
        """Have it end."""
        with suppress(OSError):
            self.pipe.send(None)
        self.pipe.close()

    @property
    def is_ready(self) -> bool:
        """Whether it has answered or is dead."""
        return self.pipe.poll() or not self.process.is_alive()

    def answer(self, named: Callable[[Any], str]) -> Any:
        """What it says to the first task that it was given; it is ready."""
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
            "num_workers=0 (--workers 0) shows where it crashes",
        )
        return error


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
    workers: list[_Worker], tasks: Iterator[Any], named: Callable[[Any], str]
) -> Iterator[Any]:
    for worker in workers * AHEAD:
        worker.ask(tasks)
    while busy := [worker for worker in workers if worker.asked]:
        wait([end for worker in busy for end in (worker.pipe, worker.process.sentinel)], _LOOK_S)
        for worker in busy:
            if worker.is_ready:
                answer = worker.answer(named)
                worker.ask(tasks)
                yield answer


def _wait_for_ends(workers: list[_Worker]) -> None:
    """None of them is left; each may finish what it does, for a while."""
    try:
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


def _serve(
    undo: list[Callable[[], None]],
    pipe: Connection,
    alive: Connection,
    work: Callable[[Any], Any],
    dataset: Any,
    number: int,
    count: int,
    worker_init_fn: Callable[[int], None] | None,
) -> None:
    """Do whatever task comes, until nobody is there to give one; what a worker runs.

    Datasets see one of the ``count`` workers of a DataLoader.

    Args:
        undo: what is not a worker's, if it is a fork.
        pipe: to the process that builds.
        alive: its other end is closed with that process.
        work: is called with each task.
        dataset: that the work reads.
        number: of the worker.
        count: of workers.
        worker_init_fn: the user's, called first.
    """
    try:
        for each in undo:
            each()
        interrupts = _Interrupts()
        _end_with(alive)
        settle_in()
        torch.set_num_threads(1)
        seed = _BASE_SEED + number
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every CUDA device too
        of_torch._worker_info = of_torch.WorkerInfo(
            id=number, num_workers=count, seed=seed, dataset=dataset
        )
        if worker_init_fn is not None:
            worker_init_fn(number)
        with suppress(EOFError, ConnectionError):
            while (task := pipe.recv()) is not None:
                pipe.send(_answer(work, task, interrupts))
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


def _answer(work: Callable[[Any], Any], task: Any, interrupts: _Interrupts) -> Any:
    interrupts.reading = True
    try:
        return work(task)
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
