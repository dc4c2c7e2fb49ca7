"""Worker processes that read for a build, and that do not outlive it."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dataloaders.cache.heap import settle_in
from dataloaders.errors import add_note

__all__ = ["AHEAD", "Parts", "results"]

AHEAD = 2
"""Numbers that each worker is given at a time, one of which it reads; while there are that many."""

_WATCH_S = 0.2
_DIED = re.compile(r"DataLoader worker \(pid.*(killed by|exited)")  # in torch's words
_PUT_S = 5.0


@contextmanager
def results(
    dataset: Dataset[Any],
    numbers: list[int],
    *,
    num_workers: int,
    context: Any = None,
    stop: str | None = None,
) -> Iterator[Iterator[Any]]:
    """The samples of ``dataset`` with these numbers, as they are finished; no worker stays.

    Args:
        dataset: map-style.
        numbers: of the samples.
        num_workers: 0: this process; samples are then in order.
        context: how workers start, as a DataLoader takes it.
        stop: a file that is made if the block ends with an error, for workers to look at.
    """
    if not isinstance(context, BaseContext):
        context = multiprocessing.get_context(context)
    ours = context.get_start_method() != "forkserver"
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=numbers,
        num_workers=num_workers,
        prefetch_factor=AHEAD if num_workers else None,
        collate_fn=_as_it_is,
        generator=torch.Generator(),  # else it draws a seed from the process-wide one
        worker_init_fn=partial(_end_with, os.getpid() if ours else None),
        multiprocessing_context=context if num_workers else None,
        in_order=not num_workers,
    )
    samples = iter(loader)
    try:
        yield samples
    except BaseException as error:
        if isinstance(error, RuntimeError) and _DIED.match(str(error)):
            add_note(
                error,
                "dataloaders: it was killed (by the system, if memory ran out), crashed in native "
                "code or ended itself while it read samples; fewer workers take less memory, and "
                "num_workers=0 shows where it crashes",
            )
        if stop is not None:
            with suppress(OSError):  # then they end with their chunks
                Path(stop).touch()
        for queue in getattr(samples, "_index_queues", ()):
            _let_go(queue)
        raise
    finally:
        # Not left to the collector: an error's traceback holds the iterator, and its workers
        # would go on writing after the lock is given back.
        shutdown = getattr(samples, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


def _let_go(queue: Any) -> None:
    """Release the lock of a queue that this thread, interrupted in ``put``, may have kept.

    torch raises out of its SIGCHLD handler, as Ctrl-C does: at any place, also where a lock was
    just taken and nothing yet gives it back. Closing the queue would then wait for ever.
    """
    kept = getattr(queue, "_notempty", None)
    if kept is not None:
        kept.acquire(timeout=_PUT_S)  # the queue's own thread has it for moments only
        kept.release()


class Parts(Dataset[Any]):
    """As samples: numbers, and what a function gives for each of so many parts."""

    def __init__(self, function: Callable[[int, int], Any], parts: int) -> None:
        self._function = function
        self._parts = parts

    def __getitem__(self, index: int) -> Any:
        return index, self._function(index, self._parts)


def _end_with(builder: int | None, worker: int) -> None:
    """Have this worker end soon after the process that builds was killed; its ``worker_init_fn``.

    And its heap be as is good for many samples.

    torch's own watch begins later: of a builder that was killed before, it never hears.

    Args:
        builder: the process that builds; None if it is not the parent of its workers, whose
            parent (the fork server) ends with it.
        worker: its number.
    """
    parent = os.getppid() if builder is None else builder

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    settle_in()


def _as_it_is(value: Any) -> Any:
    return value
