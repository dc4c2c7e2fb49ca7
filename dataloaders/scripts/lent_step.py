"""A running program's loop body, lent as a ``step(batch)`` function to code that wants to call it.

    program's thread                         borrower's thread
    for batch in LentStep(use):  ─ start ─>  use(step)
        body of the loop         <─ batch ─      step(batch)
        asks for the next batch  ── done ──>     returns; measures; step(batch) ...
    the loop ends                <── end ──  use() returns

This is the one place where a loader's ``iter()`` and a dataset without workers do not run on the
caller's thread: Python cannot suspend a function that it called (tune) from outside, so the
borrower has a thread of its own. It is safe since strictly one of the two runs at a time: each
waits for the other's word before it goes on, so nothing interleaves and no lock is needed. What
torch and Python keep for each thread is copied over when the loop starts: gradient and inference
mode, the default device, the accelerator's current device, context variables (NumPy's error
state). What is bound to a thread otherwise, such as a connection of sqlite3, cannot be: the error
that it raises is raised again with what to do.
"""

from __future__ import annotations

import contextvars
import re
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeAlias

import torch

from dataloaders import waiting
from dataloaders.batch import Batch
from dataloaders.errors import CheckError

__all__ = ["LentStep", "Step"]

Step: TypeAlias = Callable[[Batch], None]
"""Hands one batch to the program's loop; returns when the loop asks for the next one."""

_NAME = "dataloaders-tune"
# How sqlite3, signal, asyncio and others say that they were asked from another thread than theirs.
_OF_A_THREAD = re.compile(rf"\b(same|main|current|different|another|other) thread\b|{_NAME}")


class LentStep:
    """Batches for a program's loop, chosen by ``use``; exhausted when ``use`` returns.

    The loop may break and be started again: the step it broke off ends with its new start.

    Args:
        use: called once, in a thread of its own, with the `Step`. What it raises is raised in
            the program's loop; `CheckError` in place of an error that says that something may
            be used only in the thread that made it.
    """

    def __init__(self, use: Callable[[Step], None]) -> None:
        self._use = use
        self._batches: SimpleQueue[list[Batch] | None] = SimpleQueue()  # None: no more
        self._answers: SimpleQueue[bool] = SimpleQueue()  # whether the borrower may go on
        self._thread: threading.Thread | None = None
        self._stepping = False
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._thread is None:
            run = _as_in_this_thread(self._run)
            self._thread = threading.Thread(target=run, name=_NAME, daemon=True)
            self._thread.start()
        while True:
            if self._stepping:
                self._stepping = False
                self._answers.put(True)
            given = waiting.get(self._batches)
            if given is None:
                self._batches.put(None)  # for a loop that asks once more
                if self._error is not None:
                    raise self._error
                return
            self._stepping = True
            yield given.pop()

    def close(self, wait_s: float | None = None) -> None:
        """End the borrower, if the program's loop did not run to the end.

        One that has not ended after ``wait_s`` seconds is left to end with the process.
        """
        if self._thread is not None:
            self._answers.put(False)
            waiting.join(self._thread, wait_s)

    def _step(self, batch: Batch) -> None:
        self._batches.put([batch])
        if not self._answers.get():
            raise _NoMoreSteps

    def _run(self) -> None:
        try:
            self._use(self._step)
        except _NoMoreSteps:
            pass  # close() asked for it
        except BaseException as error:
            self._error = _explained(error)
        self._batches.put(None)


class _NoMoreSteps(BaseException):
    """The program's loop is over: what the borrower was doing is given up."""


def _as_in_this_thread(run: Callable[[], None]) -> Callable[[], None]:
    """``run``, to be called in a new thread, with what this thread keeps for itself."""
    context = contextvars.copy_context()
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    default = torch.get_default_device()
    # Asked only where an accelerator is in use already: asking would bring it up.
    index = torch.accelerator.current_device_index() if _accelerator_in_use() else None

    def run_alike() -> None:
        if torch.get_default_device() != default:
            torch.set_default_device(default)  # of this thread, which ends with ``run``
        if index is not None:
            torch.accelerator.set_device_index(index)
        # In this order: leaving inference mode turns gradients on.
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            context.run(run)

    return run_alike


def _accelerator_in_use() -> bool:
    from dataloaders.tuning import device  # not at the top: it loads psutil and rich

    return device.in_use()


def _explained(error: BaseException) -> BaseException:
    """``error``, or one that says what to do if it is about the thread it was raised in."""
    text = str(error)
    # "Caught ..." comes from a worker process, which this thread has nothing to do with.
    if not isinstance(error, Exception) or "Caught " in text or not _OF_A_THREAD.search(text):
        return error
    explained = CheckError(
        "tuning a script runs its loader in a thread beside the script's, and what the dataset or "
        f"sampler uses is bound to the thread that made it ({type(error).__name__}: {text}); "
        "make it when the first sample is loaded and give the loader num_workers=1 or more, so "
        "that the script's own thread never makes it, or call dataloaders.tune(loader, step) in "
        "the script, which runs in the thread that calls it"
    )
    explained.__cause__ = error
    return explained
