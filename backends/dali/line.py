"""Run the assembly line: files and random numbers into the graph, and images out of it.

    Task: read ──> drawn ──> fed ═══ DALI's threads or the GPU ═══ taken ──> behind ──> Made
                     └─ up to ``RUNS`` batches are in the graph at once ─┘

One thread works on it at a time. A batch on which DALI fails is made once more, from files that
Pillow decoded. If that fails too, the dataset itself is asked (`Redo`), and its error counts. Other
batches go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from dataloaders.batches.memory import HostPool
from dataloaders.machine.threads import limit_torch_threads, use_thread_local_capture
from dataloaders.transforms.actions import SampleError, Sizes
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.primitives.colour import PermuteChannels
from dataloaders.transforms.primitives.convert import Converted
from dataloaders.transforms.primitives.erasing import Erase, EraseByNoise
from dataloaders.transforms.primitives.geometry import Crop, HorizontalFlip, Pad, VerticalFlip

from .behind import (
    ByHost,
    Each,
    OnDevice,
    Step,
    Whole,
    apart,
    dense,
    memory_of,
    resizes_quickly,
)
from .graph import Graph, GraphFailed
from .job import Job
from .plan import Behind
from .sources import Failed as NotRead
from .sources import Found, Source
from .task import Made, Redo, Task

__all__ = ["RUNS", "Line"]

RUNS = 2
"""Batches inside the graph: the one in progress, and the next one for threads that are done."""


class Line:
    """Make images. The graph is kept from one epoch to the next if it fits both."""

    def __init__(self) -> None:
        self._graph: Graph | None = None
        self._key: Any = None
        self._largest = 1
        self._stream: Any = None
        self._empty = memory_of(HostPool())
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, job: Job) -> None:
        """Prepare for an epoch of ``job``, on the thread that then works on it."""
        if job.device.type == "cuda":
            # Before DALI builds a graph here, which might otherwise create a context on another
            # device.
            torch.cuda.set_device(job.device)
            use_thread_local_capture()
        key = (job.work.graph.nodes, job.kind, job.source.channels, job.device, job.threads)
        if key != self._key:
            self.end()
            self._stream = None
        self._job, self._key = job, key
        self._largest = max(self._largest, job.batch_size)
        parts = job.work.parts
        self._steps = [
            self._step(part, ordered=any(map(_adds_up, parts[place + 1 :])))
            for place, part in enumerate(parts)
        ]

    def start(self, task: Task) -> None:
        """Draw and feed a batch whose files are read; if it fails, set ``task.item``."""
        try:
            if task.item is not None:
                return
            assert task.reading is not None
            found = task.reading.result()
            task.reading = None  # a raised error in it would hold its raiser
            task.names = [image.name for image in found]
            if not found:  # empty, from a user's batch_sampler: torch says what it collates to
                task.item = Made(task, [])
            if task.item is not None or self._has_failed(task, found):
                return
            sizes = self._sizes(found)
            task.draws = task.draws or Draws(task.words)
            if not self._is_drawn(task, task.draws, sizes):
                return
            task.graph = self._graph_for(len(found))
            self._feed(task.graph, task, found)
        except Exception as error:
            task.item = Redo(task, error)

    def _is_drawn(self, task: Task, draws: Draws, sizes: Sizes) -> bool:
        """Draw the actions of each member, unless one of them refuses an image."""
        chain = self._job.work.chain
        for member, operator in zip(chain.members, chain.operators, strict=True):
            try:
                task.actions += operator.draw(draws, sizes)
            except SampleError as error:
                task.item = Redo(task, error, error.sample, str(member))
                return False
        return True

    def finish(self, task: Task) -> None:
        """Set ``task.item`` of the oldest batch in the graph."""
        if task.item is not None:
            return
        try:
            task.item = self._made(task, task.graph)
        except GraphFailed as failure:
            self._again(task, failure)
        except Exception as error:
            task.item = Redo(task, error)

    def drop(self, tasks: Iterable[Task]) -> None:
        """Drop what is in the graph: nobody wants it any more."""
        for task in tasks:
            if task.item is None and task.graph is not None:
                with suppress(Exception):  # it would have failed
                    task.graph.take()

    def close(self) -> None:
        """Release the graph; another one is made when it is needed."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(Exception):  # what failed may fail again when it is closed
                graph.close()

    def end(self) -> None:
        """Close, and end the threads."""
        self.close()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()  # nothing runs in them: this returns at once

    def _made(self, task: Task, graph: Graph) -> Made:
        with self._on_stream():
            taken = images = graph.take()
            for step in self._steps:
                images = step(images, task.actions)
            images = dense(images, self._empty)
            ready = None
            if self._stream is not None:
                # The loop gets torch's own memory, whose use on its stream the allocator knows.
                images = apart(images, taken)
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record(self._stream)
        return Made(task, images, ready)

    def _again(self, task: Task, failure: GraphFailed) -> None:
        """Make the batch from files that Pillow decoded, or find the one that it cannot decode."""
        graph = None
        source = self._job.source
        try:
            if not isinstance(source, Source):  # pixels: there is nothing to decode
                raise failure.cause
            found = source.images(task.keys, decode=True)
            if not self._has_failed(task, found):
                graph = self._new_graph(len(found))
                self._feed(graph, task, found)
                task.item = self._made(task, graph)
        except Exception:  # the dataset itself is asked then, and raises its own
            task.item = Redo(task, failure.cause, failure.sample)
        finally:
            if graph is not None:
                graph.close()

    def _has_failed(self, task: Task, found: Sequence[Found]) -> bool:
        for sample, image in enumerate(found):
            if isinstance(image, NotRead):
                task.item = Redo(task, image.error, sample, own=True)
                return True
        return False

    def _feed(self, graph: Graph, task: Task, found: Sequence[Any]) -> None:
        actions = [task.actions[place] for place in self._job.work.graph.places]
        graph.feed([image.data for image in found], actions, self._sizes(found))

    def _sizes(self, found: Sequence[Any]) -> Sizes:
        source = self._job.source
        heights, widths = [image.height for image in found], [image.width for image in found]
        return Sizes(heights, widths, source.channels, source.form == "bytes")

    def _graph_for(self, images: int) -> Graph:
        if self._graph is None or images > self._largest:
            # A graph that is still at work is held by its tasks, and ends with the last of them.
            self._largest = max(self._largest, images)
            self._graph = self._new_graph(self._largest)
        return self._graph

    def _new_graph(self, images: int) -> Graph:
        return Graph(
            self._job.work.graph.nodes,
            batch_size=images,
            device=self._job.device if self._job.device.type == "cuda" else torch.device("cpu"),
            threads=self._job.threads,
            depth=RUNS,
            encoded=self._job.kind == "encoded",
            channels=self._job.source.channels,
        )

    def _step(self, part: Any, *, ordered: bool) -> Step:
        if not isinstance(part, Behind):
            return Whole(part, self._empty, ordered=ordered)
        cuda = self._job.device.type == "cuda"
        if cuda and OnDevice.exactness(part) is not None:
            return OnDevice(part)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                self._job.threads,
                "dataloaders-dali-behind",
                initializer=limit_torch_threads,
                initargs=(1,),
            )
        fast = resizes_quickly(part, self._job.fast)
        options = {"fast": fast, "ordered": ordered}
        each = Each(part, self._threads, self._job.threads, self._empty, **options)
        return ByHost(each) if cuda else each

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._job.device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._job.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


_MOVES = (Converted, Crop, Erase, EraseByNoise, HorizontalFlip, Pad, PermuteChannels, VerticalFlip)


def _adds_up(part: Any) -> bool:
    """Whether it sums floats, where the last bit depends on the order of memory."""
    return isinstance(part, Behind) and not all(isinstance(p, _MOVES) for p in part.primitives)
