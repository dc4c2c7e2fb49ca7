"""Images of coming batches, read by a few threads: in order, in bounded memory, and with an end.

    read(keys) ──> Reading (a Future)     images of the oldest batch first, by any free thread;
                                          no more bytes ahead of the consumer than it was said

The threads run `Source.images`, which is no code of the user's and gives errors in the place of
images. They hold neither the reader nor its readings: dropping these ends the work on them.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from .sources import Failed, Found, Source

__all__ = ["ReadAhead", "Reading"]

_PATIENCE_S = 5.0
_POLL_S = 0.1
_MOST_BYTES = 512 << 20


class Reading(Future[list[Found]]):
    """The images of one batch, in the order of its keys.

    They count as read ahead until `result` was called, or nobody holds this any more.
    """

    def __init__(self, batch: _Batch, shelf: _Shelf) -> None:
        super().__init__()
        self._batch = batch
        self._shelf = shelf
        weakref.finalize(self, shelf.dropped.put, batch).atexit = False

    def result(self, timeout: float | None = None) -> list[Found]:
        """See `Future`.

        Raises:
            CancelledError: the reader was closed before it was read.
        """
        found = super().result(timeout)
        self._shelf.release(self._batch)
        return found


class ReadAhead:
    """Reads what it is asked for, on threads of its own, until it is closed or dropped.

    Args:
        source: of the images.
        threads: how many read at once. More than there are cores help where files are slow to come.
        most_bytes: what may be read and not taken. The batch that is due is read all the same.
    """

    def __init__(self, source: Source, *, threads: int, most_bytes: int = _MOST_BYTES) -> None:
        self._source = source
        self._threads = max(1, threads)
        self._most_bytes = most_bytes
        self._begin()

    def __call__(self, keys: Sequence[Any]) -> Reading:
        """Begin to read the images of ``keys``.

        Raises:
            RuntimeError: it is closed.
        """
        if os.getpid() != self._pid:
            self._begin()  # in a fork: the threads, and perhaps a lock, are the parent's
        return self._shelf.add(keys)

    def close(self) -> None:
        """End the threads; readings that are not done are cancelled. Safe to call twice."""
        self._end()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._shelf = _Shelf(self._source, self._threads, self._most_bytes)
        self._end = weakref.finalize(self, _end, self._shelf, self._pid)


def _end(shelf: _Shelf, pid: int) -> None:
    if os.getpid() == pid:
        shelf.close()


class _Batch:
    """What threads know of a reading."""

    def __init__(self, keys: Sequence[Any]) -> None:
        self.keys = keys
        self.found: list[Any] = [None] * len(keys)
        self.begun = 0
        self.left = len(keys)
        self.bytes = 0
        self.kept = True  # whether it counts as read ahead
        self.reading: Any = None  # a weak reference


class _Shelf:
    """What reader and threads share: batches, oldest first."""

    def __init__(self, source: Source, threads: int, most_bytes: int) -> None:
        self.dropped: SimpleQueue[_Batch] = SimpleQueue()  # may be put to inside of anything
        self._source = source
        self._most_threads = threads
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[_Batch] = deque()  # of which not every image is begun
        self._kept: deque[_Batch] = deque()
        self._bytes = 0
        self._idle = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    def add(self, keys: Sequence[Any]) -> Reading:
        batch = _Batch(keys)
        reading = Reading(batch, self)
        batch.reading = weakref.ref(reading)
        with self._changed:
            if self._closed:
                raise RuntimeError("this reader of images is closed; begin an epoch of its own")
            self._forget_dropped()
            self._kept.append(batch)
            if batch.keys:
                self._waiting.append(batch)
                wanted = 1 if self._source.at_once else len(batch.keys)
                self._start(wanted)
                self._changed.notify(wanted)
        if not batch.keys:  # not `left`: threads may be done with all of it by now
            reading.set_result([])
        return reading

    def release(self, batch: _Batch) -> None:
        """It is the consumer's now."""
        with self._changed:
            if batch.kept:
                self._forget(batch)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            readings = [batch.reading() for batch in self._kept]
            self._waiting.clear()
            self._kept.clear()
            self._changed.notify_all()
        for reading in readings:
            if reading is not None:
                reading.cancel()
        end = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))  # a file may never come

    def run(self) -> None:
        """Read until it is closed."""
        while (taken := self._next()) is not None:
            batch, first, last = taken
            try:
                self._done(batch, first, self._source.images(batch.keys[first:last]))
            except BaseException as error:  # a mistake of ours must not leave anybody waiting
                self._failed(batch, error)
            del taken, batch  # before waiting for the next one

    def _start(self, wanted: int) -> None:
        """As many threads as there is work for, of those that there may be."""
        missing = min(wanted - self._idle, self._most_threads - len(self._threads))
        for _ in range(missing):
            name = f"dataloaders-dali-read-{len(self._threads)}"
            thread = threading.Thread(target=self.run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next(self) -> tuple[_Batch, int, int] | None:
        """What to read: a batch, and the first of its images and the one behind the last."""
        with self._changed:
            while not self._closed:
                self._forget_dropped()
                if self._waiting and self._may_begin(self._waiting[0]):
                    batch = self._waiting[0]
                    first, whole = batch.begun, len(batch.keys)
                    batch.begun = whole if self._source.at_once else first + 1
                    if batch.begun == whole:
                        self._waiting.popleft()
                    return batch, first, batch.begun
                self._idle += 1
                # A reading is dropped without this lock, at any moment, so it cannot notify: who is
                # kept waiting by its bytes looks again.
                self._changed.wait(_POLL_S if self._waiting else None)
                self._idle -= 1
        return None

    def _may_begin(self, batch: _Batch) -> bool:
        return self._bytes < self._most_bytes or batch is self._kept[0]

    def _done(self, batch: _Batch, first: int, found: list[Found]) -> None:
        read = sum(0 if isinstance(image, Failed) else image.data.nbytes for image in found)
        with self._changed:
            if not batch.kept:
                return
            batch.found[first : first + len(found)] = found
            batch.left -= len(found)
            batch.bytes += read
            self._bytes += read
            reading = None if batch.left or self._closed else batch.reading()
        if reading is not None:
            with suppress(InvalidStateError):  # it was cancelled in this moment
                reading.set_result(batch.found)

    def _failed(self, batch: _Batch, error: BaseException) -> None:
        with self._changed:
            reading = batch.reading() if batch.kept and not self._closed else None
            self._forget(batch)
        if reading is not None:
            with suppress(InvalidStateError):  # as above
                reading.set_exception(error)

    def _forget_dropped(self) -> None:
        with suppress(Empty):
            while True:
                self._forget(self.dropped.get_nowait())

    def _forget(self, batch: _Batch) -> None:
        if not batch.kept:
            return
        batch.kept = False
        self._bytes -= batch.bytes
        for line in (self._waiting, self._kept):
            with suppress(ValueError):
                line.remove(batch)
        self._changed.notify_all()  # its bytes are free, and the next batch may be due
