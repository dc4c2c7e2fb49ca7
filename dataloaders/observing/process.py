"""Ask about a dataset in a process started as torch starts a worker of its loader."""

from __future__ import annotations

import multiprocessing
import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from dataloaders.errors import last_line, one_line
from dataloaders.observing.own_files import open_files_anew

T = TypeVar("T")

_HANG_S = 60.0
_CHECK_S = 2.0  # between two checks that the process lives; torch notices only failed exits


class Unobserved(Exception):
    """The dataset could not be observed; the message says why and what to do, in a sentence."""


def observe(loader: Any, look: Callable[[Any], T], *, timeout_s: float | None = None) -> T:
    """Return what ``look(loader.dataset)`` returns, called in a separate process.

    The process starts as torch starts worker 0 of ``loader``: with its ``multiprocessing_context``
    and ``worker_init_fn``, torch's seeds for a worker, and one thread for torch. For a loader with
    ``num_workers=0`` it has no ``worker_init_fn`` and no worker info, as in the loader's own loop.
    It has its own offsets in files that are open here. It ends before this function returns.
    Nothing is drawn from the generators of this process or of the loader.

    Besides what ``look`` reads, this costs a fork, or the start of Python and torch (seconds) under
    spawn and forkserver.

    Args:
        loader: any torch DataLoader; only its settings and its dataset are used.
        look: called with the dataset; must be picklable if workers are spawned. Its result is
            pickled.
        timeout_s: seconds after which the dataset counts as hanging; None: the loader's
            ``timeout``, else 60.

    Raises:
        Unobserved: the dataset cannot be sent to a process, the process dies, or it does not answer
            in time.
        Exception: what ``look`` raises, as torch raises errors of workers.
    """
    context = loader.multiprocessing_context
    limit_s = timeout_s or loader.timeout or _HANG_S
    kind = (context or multiprocessing).get_start_method()
    init = loader.worker_init_fn if loader.num_workers else None
    start = Start(init, kind == "fork", loader.num_workers)
    name = type(loader.dataset).__name__
    try:
        # Torch draws the worker's seed on the default device; meta has no generators.
        generator = torch.Generator(torch.get_default_device())
        loader_of_one: DataLoader[Any] = DataLoader(
            _Looking(loader.dataset, look),  # type: ignore[arg-type]  # all that torch needs
            batch_size=None,
            sampler=[0],
            num_workers=1,
            timeout=min(limit_s, _CHECK_S),
            worker_init_fn=start,
            multiprocessing_context=context,
            generator=generator,
        )
        answer = _answer(loader_of_one, limit_s)
    except Exception as error:
        raise _unobserved(name, error, limit_s) from error
    if isinstance(answer, str):
        raise Unobserved(f"the facts about {name} cannot be sent between processes ({answer})")
    raised, facts = pickle.loads(answer)
    if raised is not None:
        raised.reraise()
    return facts  # type: ignore[no-any-return]


def started_quietly(iterate: Callable[[], T]) -> T:
    """Return the iterator that ``iterate`` makes, without the warnings of starting its workers.

    To look at a loader in a script that is watched, ``iterate`` is ``loader._get_iterator``:
    ``iter()`` is what is watched.
    """
    with warnings.catch_warnings():
        # Torch warns of more workers than cores, and of a pickling error that it raises next;
        # Python of forks beside threads.
        for text in ("This DataLoader will create", "Got pickle error", ".*multi-threaded.*fork"):
            warnings.filterwarnings("ignore", text)
        return iterate()


def worker_of(dataset: Any, multiprocessing_context: Any = None) -> DataLoader[Any]:
    """Return a loader of ``dataset`` for `observe`, for callers without a loader."""
    return DataLoader(
        dataset, sampler=[], num_workers=1, multiprocessing_context=multiprocessing_context
    )


@dataclass(eq=False)
class _Looking:
    """A dataset of one sample: what ``look`` raised and returned, pickled, or why it cannot be.

    Bytes, because tensors would be sent through shared memory, of which there may be too little.
    """

    dataset: Any
    look: Callable[[Any], Any]

    def __getitem__(self, index: int) -> bytes | str:
        raised = facts = None
        try:
            facts = self.look(self.dataset)
        except Exception:
            where = "in the process that observes a dataset"
            raised = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
        try:
            return pickle.dumps((raised, facts))
        except Exception as error:  # pickling may fail in any way
            return one_line(error)


@dataclass(frozen=True)
class Start:
    """A worker_init_fn that turns the process into a worker of the user's loader, or its loop.

    Args:
        worker_init_fn: the user's; it sees the user's dataset.
        forked: whether the process may inherit files, which it then reopens.
        num_workers: the number in the worker info; 0: no worker info, as in the loader's own loop;
            None: the worker is the loader's own, and torch's info is right.
    """

    worker_init_fn: Callable[[int], None] | None
    forked: bool = True
    num_workers: int | None = None

    def __call__(self, worker_id: int) -> None:
        """Do so, in the worker."""
        if self.forked:
            open_files_anew()
        if self.num_workers == 0:
            torch_worker._worker_info = None
            return
        if self.num_workers is not None:
            info: Any = get_worker_info()
            # info forbids assignment.
            object.__setattr__(info, "dataset", info.dataset.dataset)
            object.__setattr__(info, "num_workers", self.num_workers)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def _answer(loader_of_one: DataLoader[Any], limit_s: float) -> bytes | str:
    """Return the answer of the only worker, which has ended when this returns or raises."""
    iterator: Any = None
    try:
        iterator = started_quietly(loader_of_one._get_iterator)
        until = time.monotonic() + limit_s
        while True:
            try:
                answer: bytes | str = next(iterator)
                return answer
            except RuntimeError as error:
                if "timed out" not in str(error) or time.monotonic() >= until:
                    raise
    finally:
        workers = list(getattr(iterator, "_workers", ()))
        if iterator is not None:
            iterator._shutdown_workers()
        for worker in workers:
            if worker.is_alive():  # it ignores the signal that should have ended it
                worker.kill()
            worker.join()


def _unobserved(name: str, error: Exception, timeout_s: float) -> Unobserved:
    text = str(error)
    if "timed out" in text:
        return Unobserved(
            f"{name} returned no sample within {timeout_s:g} s in a separate process; if it is "
            "only slow, give the loader workers and a larger timeout="
        )
    if text.startswith("DataLoader worker"):
        return Unobserved(f"the process that read samples of {name} died ({one_line(error)})")
    if text.startswith("Caught "):
        return Unobserved(f"a worker process of this loader cannot be set up ({last_line(error)})")
    return Unobserved(
        f"no process could be started to read samples of {name} ({one_line(error)}); a dataset "
        "that is sent to workers must be picklable unless they are forked"
    )
