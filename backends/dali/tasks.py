"""Make an epoch's tasks, from keys that are drawn or samples that workers have recorded.

    keys         next(order) on the loop's thread ──> read by threads ────────────> Trip.inbox
    recordings   dataset's code in torch's workers ──> taken by a thread here ────> Trip.inbox
                 or here, with num_workers=0, on the loop's thread ───────────────>

Samplers run on the loop's thread either way, one batch a hand-over.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from dataloaders.backend import Ahead, Cancelled
from dataloaders.batches.whole import SeededRows, SeededSamples, WholeBatches
from dataloaders.seeding.philox import words

from .sources import Image
from .sources.opaque import Opaque, Recordings
from .task import Failed, Redo, Task

__all__ = ["Keys", "Pack", "Recorded", "ShowDataset", "Tasks", "TasksBeside", "TasksHere", "Writer"]

_PATIENCE_S = 5.0


@dataclass
class Broken:
    """Stands for a sample at which the dataset's own code raised ``error``.

    In a worker it is torch's own wrapping of the error, which can be sent.
    """

    error: Any


class Keys(WholeBatches):
    """A collate_fn that returns the keys, or the `SeededRows`, of a batch."""

    def __call__(self, rows: Any) -> Any:
        """See `WholeBatches`."""
        return rows


class Recorded:
    """A dataset in workers that returns each key with what it recorded for it, or `Broken`.

    Samples before a broken one may fail further down the chain, and then come first.
    """

    def __init__(self, opaque: Opaque) -> None:
        self.recording = opaque.dataset

    def __len__(self) -> int:
        return len(self.recording)

    def __getitem__(self, key: Any) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        if len(keys) > 1 and hasattr(self.recording, "__getitems__"):
            return list(zip(keys, self.recording.record(keys), strict=True))
        found: list[Any] = []
        for key in keys:
            found.append((key, self._one(key)))
            if isinstance(found[-1][1], Broken):
                break  # torch would not ask for more, either
        return found

    def _one(self, key: Any) -> Any:
        try:
            return self.recording[key]
        except Exception as error:
            worker = get_worker_info()
            if worker is None:
                return Broken(error)
            where = f"in DataLoader worker process {worker.id}"
            return Broken(ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]


class Packed(NamedTuple):
    """A batch of recorded samples, as a worker sends it; up to the first broken one."""

    keys: list[Any]
    recordings: Recordings
    words: npt.NDArray[np.uint32] | None
    collation: tuple[int, int, int, int] | None
    broken: Broken | None = None


class Pack(WholeBatches):
    """A collate_fn that packs what `Recorded` returns."""

    def __call__(self, rows: Any) -> Packed:
        """See `WholeBatches`."""
        samples, seeds, collation = rows, None, None
        if isinstance(rows, SeededSamples):
            samples, seeds, collation = rows
        keys, whole, broken = [], [], None
        for key, found in samples:
            keys.append(key)
            if isinstance(found, Broken):
                broken = found
                break
            whole.append(found)
        return Packed(keys, Recordings.of(whole), seeds, collation, broken)


class ShowDataset:
    """A worker_init_fn: call the user's, which sees the dataset as the worker's."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        """See torch's ``worker_init_fn``."""
        info: Any = get_worker_info()
        if isinstance(info.dataset, Recorded):
            # info forbids assignment.
            object.__setattr__(info, "dataset", info.dataset.recording.dataset)
        self._function(worker_id)


class Writer:
    """Make tasks from what an order yields.

    Args:
        read: starts to read the images of some keys.
        seed: (base seed, epoch), from which the words derive without ``seed=``.
    """

    def __init__(self, read: Callable[[Sequence[Any]], Future[Any]], seed: tuple[int, int]) -> None:
        self._read = read
        self._seed = seed
        self._batches = self._samples = 0

    def task(self, rows: Any) -> Task:
        """Return the next task."""
        self._batches += 1
        if isinstance(rows, Packed):
            return self._recorded(rows)
        if isinstance(rows, SeededRows):
            keys = list(rows.keys)
            return Task(self._batches, keys, rows.words, self._read(keys), rows.collation)
        keys = list(rows)
        return Task(self._batches, keys, self._words(len(keys)), self._read(keys))

    def failed(self, error: BaseException) -> Failed:
        """Return what stands for the next task, which could not be made."""
        self._batches += 1
        return Failed(error)

    def _recorded(self, packed: Packed) -> Task:
        recordings = packed.recordings
        reading: Future[Any] = Future()
        reading.set_result([Image(pixels, *pixels.shape[:2]) for pixels in recordings.images])
        count = len(recordings.samples)
        seeds = self._words(len(packed.keys)) if packed.words is None else packed.words
        task = Task(self._batches, packed.keys, seeds, reading, packed.collation)
        task.parts, task.draws = recordings.samples, recordings.draws(seeds[:count])
        if packed.broken is not None:
            # Taken out: torch's frames, which the error's traceback holds, hold its samples.
            error, packed.broken.error = packed.broken.error, None
            task.broken = _raised(error)
            del error
            if not count:
                task.item = Redo(task, task.broken, 0, own=True)
        return task

    def _words(self, count: int) -> npt.NDArray[np.uint32]:
        places = np.arange(self._samples, self._samples + count)
        self._samples += count
        return words(*self._seed, places)


def _raised(error: Any) -> BaseException:
    """Return the error; a worker's error as torch raises it here."""
    if not isinstance(error, ExceptionWrapper):
        return cast(BaseException, error)
    try:
        error.reraise()  # type: ignore[no-untyped-call]
    except Exception as raised:
        return raised
    raise AssertionError("torch raises a worker's error")


class Tasks(ABC):
    """One epoch's tasks, put into ``inbox`` in order, with None after the last one.

    Attributes:
        due: batches to be drawn when the first one is requested.
    """

    due: int

    @abstractmethod
    def draw(self, batches: int) -> None:
        """Draw from the sampler for this many more batches; on the loop's thread."""

    def received(self) -> None:
        """Note that a batch has come, which is not handed over yet; on the loop's thread.

        Raises:
            Exception: the sampler's, to be raised in place of this batch.
        """
        return

    def permit(self) -> None:
        """Allow one more batch to be taken, because one was handed over."""
        return

    @abstractmethod
    def stop(self) -> None:
        """Make no more tasks. May be called twice, from any thread, at exit."""


class TasksHere(Tasks):
    """Tasks made on the loop's thread, when their keys are drawn."""

    def __init__(
        self, order: Iterator[Any], writer: Writer, inbox: SimpleQueue[Any], depth: int
    ) -> None:
        self.due = depth
        self._order: Iterator[Any] | None = order
        self._writer = writer
        self._inbox = inbox

    def draw(self, batches: int) -> None:
        """See `Tasks`; an error waits in its place."""
        for _ in range(batches):
            if self._order is None:
                return
            try:
                rows = next(self._order)
            except StopIteration:
                self.stop()
                return
            except Exception as error:  # the sampler's, or a dataset's that is read here
                self._inbox.put(self._writer.failed(error))
                return
            self._inbox.put(self._writer.task(rows))

    def stop(self) -> None:
        """See `Tasks`."""
        self._order = None
        self._inbox.put(None)


class TasksBeside(Tasks):
    """Tasks of batches that torch's workers send, taken by a background thread."""

    def __init__(self, ahead: Ahead, writer: Writer, inbox: SimpleQueue[Any], depth: int) -> None:
        self.due = 0
        self._ahead: Ahead | None = ahead
        self._permits: SimpleQueue[bool] = SimpleQueue()
        for _ in range(depth):
            self._permits.put(True)
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_take,
            args=(ahead, writer, inbox, self._permits),
            name="dataloaders-dali-take",
            daemon=True,
        )
        self._thread.start()

    def draw(self, batches: int) -> None:
        """See `Tasks`; draws nothing, since torch's iterator has sent the first tasks."""

    def received(self) -> None:
        """See `Tasks`; as torch, which draws for a further task when a batch has come."""
        if self._ahead is not None:
            self._ahead.supply(1)

    def permit(self) -> None:
        """See `Tasks`."""
        self._permits.put(True)

    def stop(self) -> None:
        """See `Tasks`."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or os.getpid() != self._pid:
            return
        ahead.cancel()
        self._permits.put(False)
        del ahead  # workers end with their last reference
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_S)


def _take(
    ahead: Ahead, writer: Writer, inbox: SimpleQueue[Any], permits: SimpleQueue[bool]
) -> None:
    while permits.get():
        try:
            rows = next(ahead)
            inbox.put(writer.task(rows))
            del rows
        except (StopIteration, Cancelled):
            break
        except BaseException as error:  # in place of its batch; later ones may still be taken
            inbox.put(writer.failed(error))
    inbox.put(None)
