"""Run a function in the processes that a program starts to train: ``mp.spawn``, ``Process``.

    Process(target=train).start()  ──>  in the new process: run(train, ...) in place of train(...)

It leaves alone workers of loaders and pools, subclasses of Process with their own ``run``, and
programs started by ``subprocess``.
"""

from __future__ import annotations

import functools
import multiprocessing.process
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

_NOT_THE_PROGRAMS = ("backends.", "concurrent.", "dataloaders.", "multiprocessing.",
                     "torch.utils.data.", "torch._inductor.", "torchdata.")  # fmt: skip

Run = Callable[..., None]
"""Called in the child with the target, its positional arguments and its keyword arguments."""


@contextmanager
def children_run_by(run: Run) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """In the block, processes that the program starts call ``run``, which must be picklable.

    Gives the list of these processes, in order.
    """
    process: Any = multiprocessing.process.BaseProcess
    started, start = list[multiprocessing.process.BaseProcess](), process.start

    def watched_start(self: Any) -> None:
        target = self._target
        module = f"{getattr(target, '__module__', '')}."
        if target is not None and not module.startswith(_NOT_THE_PROGRAMS):
            self._target = functools.partial(_run_by, run, target)
            started.append(self)
        start(self)

    with mock.patch.object(process, "start", watched_start):
        yield started


def _run_by(run: Run, target: Callable[..., object], *args: Any, **options: Any) -> None:
    run(target, args, options)
