"""The thread that takes batches ahead of use and sends them to the device.

    consumer ──Trip──> inbox ──> thread: permit? take, send, ready ──> consumer
             <─────────────────── batches, an error, or the end

One courier serves one loader, epoch after epoch: a `Trip` is one epoch's errand. The thread runs
nothing with global state (see `dataloaders.backend.Ahead`) and holds nothing between trips.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import TypeAlias

from dataloaders.backend import Ahead, Cancelled
from dataloaders.errors import add_note

from .ranges import stage
from .transfer import Sent, Transfer

__all__ = ["Courier", "Ended", "Failed", "Item", "Trip"]

_PATIENCE_S = 5.0


class Ended:
    """The epoch is over."""


class Failed:
    """What was raised in place of a batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


Item: TypeAlias = "Sent | Failed | Ended"


class Trip:
    """One epoch, as both threads know it.

    Attributes:
        ready: what the thread hands over, in order.
        parked: set when the thread is done with this trip, and holds nothing of it.
    """

    def __init__(self, source: Ahead, transfer: Transfer) -> None:
        self.ready: SimpleQueue[Item] = SimpleQueue()
        self.parked = threading.Event()
        self.source: Ahead | None = source
        self.transfer = transfer
        self._stopping = False
        self._taken = 0
        self._pid = os.getpid()
        self._permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(transfer.permits):
            self._permits.put(None)

    def permit(self) -> None:
        """Allow one batch more to be taken: another one was handed over."""
        self._permits.put(None)

    def stop(self) -> None:
        """End the trip wherever it is; whatever the source holds open ends on this thread.

        Safe to call twice, from any thread, at interpreter exit.
        """
        if os.getpid() != self._pid:
            return  # the thread is the parent's: it never parks here
        source, self.source = self.source, None
        self._stopping = True
        self._permits.put(None)
        if source is None:
            return
        if not self.parked.is_set():
            source.cancel()
        if not isinstance(threading.current_thread(), _Thread):
            self.parked.wait(_PATIENCE_S)  # so that nothing stays behind when this returns

    def run(self) -> None:
        """Take and send until the epoch is over or stopped; on the courier's thread."""
        source = self.source
        try:
            while source is not None:
                self._permits.get()
                if self._stopping:
                    return
                item = self._next(source)
                if item is None:
                    return
                self.ready.put(item)
                if isinstance(item, Ended):
                    return
        finally:
            # The source first: what it holds open ends with its last reference, and whoever waits
            # for this trip to be parked must find it so.
            del source
            self.parked.set()

    def _next(self, source: Ahead) -> Item | None:
        doing = "taken ahead"
        try:
            with stage("take"):
                batch = next(source)
            self._taken += 1
            doing = "copied ahead"
            return self.transfer.send(batch)
        except StopIteration:
            return Ended()
        except Cancelled:
            return None
        except BaseException as error:
            # To be raised where the batch is asked for. As in torch's own iterators, later
            # batches can still be asked for.
            if doing == "taken ahead":
                self._taken += 1
            add_note(error, f"dataloaders: while batch {self._taken} of this epoch was {doing}")
            return Failed(error)


class _Thread(threading.Thread):
    pass


class Courier:
    """A thread that makes trips, started with the first one."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._inbox: SimpleQueue[Trip | None] = SimpleQueue()
        self._thread: _Thread | None = None

    def send(self, trip: Trip) -> None:
        """Have ``trip`` made, after those before it."""
        if self._thread is None:
            # A daemon: an interpreter that exits must not wait for a batch that nobody wants.
            self._thread = _Thread(
                target=_work,
                args=(self._inbox, self._transfer),
                name="dataloaders-prefetch",
                daemon=True,
            )
            self._thread.start()
        self._inbox.put(trip)

    def end(self) -> None:
        """End the thread once its trips are made."""
        self._inbox.put(None)


def _work(inbox: SimpleQueue[Trip | None], transfer: Transfer) -> None:
    transfer.enter_thread()
    del transfer
    while (trip := inbox.get()) is not None:
        trip.run()
        del trip  # before waiting for the next one
