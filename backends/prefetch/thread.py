"""Run the thread that takes batches ahead of use and sends them to the device.

    consumer ──Epoch──> prefetch thread: a free slot? take a batch, send it ──> ready ──> consumer
             ──a free slot for each batch received──>

One thread serves one loader, epoch after epoch. It runs nothing with global state (see
`dataloaders.backend.Ahead`) and holds nothing between epochs.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch
from torch.profiler import record_function

from dataloaders.backend import Ahead, Cancelled
from dataloaders.errors import add_note

from .transfer import Sent, Transfer

_PATIENCE_S = 5.0
_LATE = (
    "dataloaders: devices report errors late: the training step may have caused this one; with "
    "CUDA_LAUNCH_BLOCKING=1 it is raised where it happens"
)
_NO_WORKERS = (
    "the workers of this iterator were shut down, or a newer iterator of this loader uses them: "
    "iterate one at a time, or leave out persistent_workers=True"
)


_FORKED = (
    "this iterator belongs to the process that began it, whose thread takes its batches: in a "
    "forked process begin another one, with iter(loader)"
)


class Failed:
    """Holds the error that was raised instead of a batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


Item: TypeAlias = "Sent | Failed | None"
"""What the thread puts into the queue; None at the end of the epoch."""


class Epoch:
    """One epoch, as the consumer and the prefetch thread share it.

    Attributes:
        ready: the queue from the thread to the consumer.
        done: set once the thread holds nothing of this epoch.
        taking_since: the `time.monotonic` since which the thread waits for the source, or None.
    """

    def __init__(self, source: Ahead, transfer: Transfer) -> None:
        self.ready: SimpleQueue[Item] = SimpleQueue()
        self.done = threading.Event()
        self.taking_since: float | None = None
        self._source: Ahead | None = source
        self._transfer = transfer
        self._stopped = False
        self._taken = 0
        self._pid = os.getpid()
        # Not a semaphore: the garbage collector may call stop() on a thread that holds its lock.
        self._free_slots: SimpleQueue[None] = SimpleQueue()
        for _ in range(transfer.slots):
            self._free_slots.put(None)

    def check_process(self) -> None:
        """Raise RuntimeError in a forked process, which has no such thread."""
        if os.getpid() != self._pid:
            raise RuntimeError(_FORKED)

    def free_slot(self) -> None:
        """Let the thread take one batch more."""
        self._free_slots.put(None)

    def stop(self) -> None:
        """End the epoch, finished or not, and wait a little until the thread is done with it.

        Safe to call twice, on any thread, at interpreter exit.
        """
        if os.getpid() != self._pid:
            return  # the thread is the parent's
        source, self._source = self._source, None
        self._stopped = True
        self._free_slots.put(None)
        if source is None:
            return
        if not self.done.is_set():
            source.cancel()
        if not isinstance(threading.current_thread(), PrefetchThread):
            self.done.wait(_PATIENCE_S)  # so that workers have ended when a ``break`` returns
        self._drop()

    def _drop(self) -> None:
        """Drop the batches in the queue, since an error's traceback may hold this epoch."""
        with suppress(Empty):
            while True:
                self.ready.get_nowait()
        self.ready.put(None)

    def run(self, failure: BaseException | None) -> None:
        """Take and send batches until the epoch ends or is stopped; on the prefetch thread."""
        source = self._source
        try:
            if failure is not None:
                raise failure
            self._transfer.start()
            while source is not None:
                self._free_slots.get()
                if self._stopped:
                    return
                item = self._next(source)
                self.ready.put(item)
                ended = item is None
                # An error's traceback holds this frame. If the frame held the error, the cycle
                # would keep the workers until the garbage collector finds it.
                del item
                if ended:
                    return
        except Cancelled:
            self._fail(RuntimeError(_NO_WORKERS))  # if not stopped: Lightning at a run's end
        except BaseException as error:
            self._fail(error)
        finally:
            # What the source holds open ends with its last reference, before ``done`` is set.
            del source
            if self._stopped:
                self._drop()
            self.done.set()

    def _fail(self, error: BaseException) -> None:
        """Raise ``error`` at the consumer, and end the epoch there."""
        self.ready.put(Failed(error))
        self.ready.put(None)

    def _next(self, source: Ahead) -> Item:
        doing = "taken"
        try:
            self.taking_since = time.monotonic()
            with record_function("dataloaders: take"):
                batch = next(source)
            self.taking_since = None
            self._taken += 1
            doing = "copied"
            return self._transfer.send(batch)
        except StopIteration:
            return None
        except Cancelled:
            raise
        except BaseException as error:
            # Raised where the batch is asked for. As with torch's iterators, later batches can
            # still be asked for.
            self.taking_since = None
            if doing == "taken":
                self._taken += 1
            add_note(
                error, f"dataloaders: while batch {self._taken} of this epoch was {doing} ahead"
            )
            if isinstance(error, torch.AcceleratorError):
                add_note(error, _LATE)
            return Failed(error)


class PrefetchThread(threading.Thread):
    """A thread that runs epochs one after the other, started by the first one.

    A daemon: an interpreter that exits must not wait for a batch that nobody wants.
    """

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(name="dataloaders-prefetch", daemon=True)
        self._transfer = transfer
        self._inbox: SimpleQueue[Epoch | None] = SimpleQueue()

    def begin(self, epoch: Epoch) -> None:
        """Have ``epoch`` run, after those before it."""
        if self.ident is None:
            self.start()
        self._inbox.put(epoch)

    def end(self) -> None:
        """End the thread after the epochs that it was given."""
        self._inbox.put(None)

    def run(self) -> None:
        """Run epochs until `end`."""
        failure: BaseException | None = None
        try:
            self._transfer.enter_thread()
        except BaseException as error:
            failure = error
        while (epoch := self._inbox.get()) is not None:
            epoch.run(failure)
            del epoch  # before waiting for the next one
