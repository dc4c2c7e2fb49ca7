"""Run the makers of parts in a pool of processes that do not outlive this one.

    parts to make ──ProcessPoolExecutor──> Maker, in workers ──> Made

Datasets see a worker of a DataLoader: its worker info, seeds, and one thread for torch.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as of_torch

from dataloaders.cache.build.failure import Failure, not_interrupted
from dataloaders.cache.build.rows import Made, Maker
from dataloaders.errors import add_note
from dataloaders.observing import open_files_anew

__all__ = ["make_parts"]

_AHEAD = 2  # parts that each worker is given at a time, one of which it makes
_BASE_SEED = 883951781600517636  # what a DataLoader draws from a new torch.Generator()
_WATCH_S = 0.2


def make_parts(
    maker: Maker,
    tasks: Sequence[range],
    finished: Callable[[Made], None],
    *,
    dataset: Any,
    workers: int,
    context: Any = None,
    worker_init_fn: Callable[[int], None] | None = None,
) -> None:
    """Make the parts of these samples, and what is left of those that are closed early.

    Args:
        maker: makes one.
        tasks: the samples of each.
        finished: called with each part, on this thread.
        dataset: what workers read, as `get_worker_info` shows it.
        workers: how many there are; 0: this process makes them.
        context, worker_init_fn: how workers start, as a DataLoader takes them.

    Raises:
        RuntimeError: a worker died; says what was being read.
        Exception: what making a part raised.
    """
    left = deque(tasks)
    if not workers:
        while left:
            _note(maker(left[0]), left.popleft(), left, finished)
        return
    under_way: dict[Future[Made | Failure], range] = {}
    with _pool(maker, dataset, workers, context, worker_init_fn) as pool:
        seen: dict[int | None, Any] = {}
        while left or under_way:
            try:
                while left and len(under_way) < _AHEAD * workers:
                    task = left.popleft()
                    under_way[pool.submit(_make, task)] = task
                seen.update((child.pid, child) for child in multiprocessing.active_children())
                done = wait(under_way, return_when=FIRST_COMPLETED).done
                results = {future: future.result() for future in done}
            except BrokenProcessPool as error:
                raise _death(seen.values(), list(under_way.values())[:workers]) from error
            for future, made in results.items():
                task = under_way.pop(future)
                if isinstance(made, Failure):
                    made.reraise()
                else:
                    _note(made, task, left, finished)


def _note(made: Made, task: range, left: deque[range], finished: Callable[[Made], None]) -> None:
    finished(made)
    if made.samples.stop < task.stop:
        left.appendleft(range(made.samples.stop, task.stop))


@contextmanager
def _pool(
    maker: Maker,
    dataset: Any,
    workers: int,
    context: Any,
    worker_init_fn: Callable[[int], None] | None,
) -> Iterator[ProcessPoolExecutor]:
    if not isinstance(context, BaseContext):
        context = multiprocessing.get_context(context)
    alive, own = context.Pipe(duplex=False)
    is_fork = context.get_start_method() == "fork"
    number = context.Value("i", 0)
    begin = (maker, dataset, number, workers, worker_init_fn, alive, own if is_fork else None)
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=begin)
    try:
        yield pool
    except BaseException:
        own.close()  # workers end where they are
        pool.shutdown(cancel_futures=True)
        raise
    else:
        pool.shutdown()
    finally:
        own.close()
        alive.close()


def _death(children: Any, tasks: list[range]) -> RuntimeError:
    # The pool ends the others by SIGTERM when one has died.
    codes = [child.exitcode for child in children if child.exitcode not in (0, None)]
    code = next((code for code in codes if code != -signal.SIGTERM), None)
    if code is None:
        how = "ended"
    elif code < 0:
        how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
    else:
        how = f"ended with exit status {code}"
    read = " or ".join(f"samples {task.start} to {task.stop - 1}" for task in tasks)
    error = RuntimeError(f"DataLoader worker {how} while it read {read}")
    add_note(
        error,
        "dataloaders: it was killed (by the system, if memory ran out), crashed in native "
        "code or ended itself while it read samples; fewer workers take less memory, and "
        "num_workers=0 (--workers 0) shows where it crashes",
    )
    return error


# In a worker

_maker: Maker | None = None


def _begin(
    maker: Maker,
    dataset: Any,
    number: Any,
    workers: int,
    worker_init_fn: Callable[[int], None] | None,
    alive: Connection,
    own: Connection | None,
) -> None:
    global _maker
    if own is not None:  # a fork: who has the other end too does not see that it is closed
        own.close()
        open_files_anew()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that builds has it, too, and ends us
    _end_with(alive)
    _maker = maker
    with number.get_lock():
        worker = number.value
        number.value += 1
    torch.set_num_threads(1)
    seed = _BASE_SEED + worker
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds every CUDA device too
    of_torch._worker_info = of_torch.WorkerInfo(
        id=worker, num_workers=workers, seed=seed, dataset=dataset
    )
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _make(samples: range) -> Made | Failure:
    assert _maker is not None
    try:
        return _maker(samples)
    except BaseException as error:  # a worker that sys.exit() ends tells nothing
        return Failure.of(not_interrupted(error))


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
