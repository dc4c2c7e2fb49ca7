"""Make parts in torch's own workers, which do not outlive this process.

samples of parts ──DataLoader, a task a range──> Maker, in workers ──> Part
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _remove_worker_pids
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.utils.data import DataLoader

from dataloaders.cache.build.parts import BuildFolder, Part
from dataloaders.cache.build.reading import IN_THIS_PROCESS, Failure, not_interrupted
from dataloaders.cache.build.rows import Maker
from dataloaders.cache.build.source import Source
from dataloaders.errors import add_note
from dataloaders.observing import Start, started_quietly
from dataloaders.options import option

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def make_parts(
    folder: BuildFolder,
    tasks: Sequence[range],
    finished: Callable[[Part], None],
    source: Source,
    workers: int,
) -> None:
    """Make the parts of each task's samples in ``folder``, and call ``finished`` with each.

    Without ``workers`` this process makes them. Workers start as a DataLoader's do, and see the
    user's dataset.

    Raises:
        RuntimeError: a worker died.
        Exception: what making a part raised.
    """
    maker = source.maker(folder)
    if not workers:
        with IN_THIS_PROCESS:
            for task in tasks:
                for part in maker(task):
                    finished(part)
        return
    context, init = source.options.multiprocessing_context, source.options.worker_init_fn
    if context is None or isinstance(context, str):
        context = multiprocessing.get_context(context)

    def start() -> Any:
        loader: DataLoader[Any] = DataLoader(
            _Tasks(source.dataset, maker, tasks),  # type: ignore[arg-type]  # all that torch needs
            batch_size=None,
            sampler=range(len(tasks)),
            collate_fn=list,
            num_workers=workers,
            worker_init_fn=_StartBound(init, context.get_start_method() == "fork"),
            multiprocessing_context=context,
            generator=torch.Generator(),  # nothing is drawn from the user's
            in_order=False,
        )
        return loader._get_iterator()  # not iter(): a script's loaders may be watched

    iterator = started_quietly(start)
    try:
        for made in iterator:
            for part in made:
                if isinstance(part, Failure):
                    part.reraise()
                finished(part)
    except BaseException as error:
        _kill(iterator)
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
            add_note(
                error,
                "dataloaders: it was killed (by the system, if memory ran out), crashed in native "
                "code or ended itself while it read samples; fewer workers take less memory, and "
                f"{option('num_workers', 0)} shows where it crashes",
            )
        raise


def _kill(iterator: Any) -> None:
    """End the workers at once: torch would wait for the parts under way."""
    with suppress(ValueError):  # torch has done so if one died as all of them ended
        _remove_worker_pids(id(iterator))  # else their ends are errors
    iterator._shutdown = True  # torch's own way may hang in locks of those that are killed
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
    for worker in iterator._workers:
        worker.kill()
        worker.join()


@dataclass(frozen=True)
class _Tasks:
    dataset: Any
    maker: Maker
    tasks: Sequence[range]

    def __getitem__(self, number: int) -> list[Part] | list[Failure]:
        try:
            return self.maker(self.tasks[number])
        except BaseException as error:  # torch does not report a worker that sys.exit() ends
            return [Failure.of(not_interrupted(error))]


class _StartBound(Start):
    """Also has the worker end with its parent."""

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # who builds has it, too, and ends this one
        _prctl_pr_set_pdeathsig(signal.SIGKILL)
        _keep_freed_memory()
        super().__call__(worker_id)


def _keep_freed_memory() -> None:
    """Have glibc keep up to 64 MiB that this process frees, by mallopt(3).

    A decoded photo is a few MB. If they go back to the system, the next one takes a page fault for
    each 4 KiB: a sixth of the time of decoding.
    """
    with suppress(AttributeError, OSError, TypeError):  # musl, macOS, Windows
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # glibc takes no more
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)
