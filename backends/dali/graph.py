"""Run one DALI graph, kept across epochs: decode images, then apply the steps that have a node.

    feed(images, actions, sizes) ──> inputs of a run ──> DALI's threads ──> take(): uint8 images
      on one thread, `depth` runs ahead                                      on another one

    encoded files   first step a Crop, windows inside   only the window is decoded, on the CPU
                    else                                decoded whole, then cropped
    pixels                                              as they are

DALI's executor may not be called from two threads at once: calls take turns. A failed run does not
affect the others: the pipeline is rebuilt and fed with the runs that were still due.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nvidia.dali import Pipeline, fn, types
from torch import Tensor

from dataloaders.transforms.actions import Action, Sizes

from .nodes import Images, Input, Node, Window
from .outputs import handed_over

__all__ = ["Graph", "GraphFailed"]

Array = npt.NDArray[Any]

_IMAGES = "images"

_TYPES = {np.int32: types.INT32, np.uint8: types.UINT8, np.float32: types.FLOAT}


class GraphFailed(Exception):
    """DALI failed at one run.

    Attributes:
        cause: DALI's own error.
        sample: the position in the batch of the image that it failed at, if DALI says so.
    """

    def __init__(self, cause: BaseException, sample: int | None = None) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.sample = sample


@dataclass(frozen=True)
class _Run:
    """One batch in flight. DALI reads the images where they are, so they are held here."""

    images: list[Array]
    values: Mapping[str, Array]
    windowed: bool


class Graph:
    """Files or pixels in, uint8 images out, batch by batch.

    Args:
        nodes: its steps, in order.
        batch_size: the most images in a run.
        device: where it decodes and works: the CPU, or a CUDA device.
        threads: the number of DALI's threads.
        depth: the most runs that may be fed before the oldest is taken.
        encoded: whether it gets files, or pixels.
        channels: the channels of the images: 3 (RGB) or 1 (grey); pixels may have 4 if no node
            looks at them.
        windows: whether the decoder crops if the first node is a crop; None: on the CPU. On a
            device nvImageCodec 0.9.0 fails at it or ends the process (its issue 55), and before
            nvJPEG 13.2 the chroma at a window's edge would differ.
        engine: the share of a device's JPEG files that its hardware engine may decode. None: 0,
            because it decodes differently, and a sample's pixels would depend on its place in a
            batch.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        *,
        batch_size: int,
        device: torch.device,
        threads: int,
        depth: int = 2,
        encoded: bool = True,
        channels: int = 3,
        windows: bool | None = None,
        engine: float | None = None,
    ) -> None:
        self._nodes = tuple(nodes)
        self._batch_size = batch_size
        self._device = device
        self._threads = threads
        self._depth = depth
        self._encoded = encoded
        self._channels = [channels]  # before each node, and at the end
        for node in self._nodes:
            self._channels.append(node.channels_of(self._channels[-1]))
        self._inputs = [
            node.used(channels) for node, channels in zip(self._nodes, self._channels, strict=False)
        ]
        self._windows = device.type == "cpu" if windows is None else windows
        self._engine = engine or 0.0
        self._pipelines: dict[bool, Pipeline] = {}  # by whether the decoder crops
        self._runs: deque[_Run] = deque()
        self._gate, self._lock = threading.Lock(), threading.Lock()
        self._copied: _Run | None = None
        self._closed = False
        _ALIVE.add(self)

    def __len__(self) -> int:
        """Runs that were fed and not yet taken."""
        return len(self._runs)

    def feed(
        self, images: Sequence[Array], actions: Sequence[Action], sizes: Sizes | None = None
    ) -> None:
        """Start a run; DALI works on it from now on.

        Args:
            images: 1 to ``batch_size`` images: files, uint8 [bytes], or pixels, uint8 [H, W, C].
                They are read where they are and must not change until taken.
            actions: one for each node, in order, drawn for these images.
            sizes: the sizes of the images; not needed for pixels.

        Raises:
            RuntimeError: ``depth`` runs wait to be taken already, or the graph was closed.
            ValueError: the arguments do not fit the graph.
        """
        run = self._run_of(images, actions, sizes)
        with self._turn():
            if len(self._runs) >= self._depth:
                raise RuntimeError(
                    f"{len(self._runs)} runs wait to be taken, and depth={self._depth}: "
                    "take() one before the next feed()"
                )
            try:
                self._begin(run)
            except Exception:
                self._begin_anew()  # DALI may hold some of the run's inputs, and not the others
                raise
            self._runs.append(run)

    def take(self) -> Tensor | list[Tensor]:
        """Wait for the oldest run and return its images, which may be kept.

        uint8 [n, C, H, W], or a list of n [C, H, W] if their sizes differ or their memory is not
        one piece; on the graph's device, ready for CUDA's current stream.

        Raises:
            GraphFailed: DALI failed at it. The other runs go on.
            RuntimeError: nothing was fed, or the graph was closed.
        """
        with self._turn():
            if not self._runs:
                raise RuntimeError("no run waits to be taken: feed() one first")
            run = self._runs.popleft()
            try:
                return self._made(run)
            except Exception as error:
                # Its frames hold the failed pipeline, and with it that pipeline's threads.
                cause = error.with_traceback(None)
            self._begin_anew()
            try:
                raise GraphFailed(cause, _sample_in(str(cause))) from cause
            finally:
                del cause, run  # no cycle of error, frame and error

    def close(self) -> None:
        """End the pipelines and their threads; drop runs in progress. Tensors stay valid."""
        with self._turn(closing=True):
            self._closed = True
            self._runs.clear()
            self._pipelines.clear()
            self._copied = None

    @contextmanager
    def _turn(self, closing: bool = False) -> Iterator[None]:
        # Waiting threads queue at the gate: a thread that takes again and again cannot overtake the
        # one that feeds.
        with self._gate:
            self._lock.acquire()
        try:
            if self._closed and not closing:
                raise RuntimeError("this graph was closed, or was made before a fork")
            yield
        finally:
            self._lock.release()

    def _run_of(
        self, images: Sequence[Array], actions: Sequence[Action], sizes: Sizes | None
    ) -> _Run:
        if not 1 <= len(images) <= self._batch_size:
            raise ValueError(f"{len(images)} images: a run takes 1 to {self._batch_size}")
        if len(actions) != len(self._nodes):
            raise ValueError(f"{len(actions)} actions for a graph of {len(self._nodes)} nodes")
        if sizes is not None:
            sizes = Sizes(sizes.height, sizes.width)  # updated node by node
        elif not self._encoded:
            sizes = Sizes([len(image) for image in images], [image.shape[1] for image in images])
        elif self._nodes:
            raise ValueError("files were given without the sizes of their images")
        values: dict[str, Array] = {}
        windowed = False
        for place, (node, action) in enumerate(zip(self._nodes, actions, strict=True)):
            assert sizes is not None
            before = sizes.height, sizes.width
            own = node.values(action, sizes)
            if place == 0 and self._encoded and self._windows and isinstance(node, Window):
                windowed = _decodable(own, *before)
            values.update({_name(place, i): own[i.name] for i in self._inputs[place]})
        return _Run(list(images), values, windowed)

    def _begin(self, run: _Run) -> None:
        pipeline = self._pipelines.get(run.windowed)
        if pipeline is None:
            pipeline = self._defined(run.windowed)
            pipeline.build()
            self._pipelines[run.windowed] = pipeline
        pipeline.feed_input(_IMAGES, run.images)
        for name, array in run.values.items():
            pipeline.feed_input(name, array)
        pipeline.schedule_run()

    def _made(self, run: _Run) -> Tensor | list[Tensor]:
        pipeline = self._pipelines[run.windowed]
        (made,) = pipeline.share_outputs(self._stream())
        pipeline.release_outputs()
        if self._device.type == "cuda":
            self._copied = run  # a device may still be reading its input
        return handed_over(made)

    def _begin_anew(self) -> None:
        """Rebuild the pipeline: DALI says that it is no longer valid after an error."""
        self._pipelines.clear()
        for run in self._runs:
            self._begin(run)

    def _stream(self) -> Any:
        """Return the stream on which the images are used: DALI orders its own work before it."""
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _defined(self, windowed: bool) -> Pipeline:
        cuda = self._device.type == "cuda"
        pipeline = Pipeline(
            batch_size=self._batch_size,
            num_threads=self._threads,
            device_id=self._device.index or 0 if cuda else None,
            # With this executor each output has memory of its own, and runs begin when they are
            # scheduled, however many: a larger depth would have the first schedule_run() begin
            # as many at once, fed or not.
            exec_dynamic=True,
            prefetch_queue_depth=1,
        )
        with pipeline:
            given = [
                {input_.name: _source(_name(place, input_), input_) for input_ in inputs}
                for place, inputs in enumerate(self._inputs)
            ]
            images = self._decoded(given[0] if windowed else None)
            steps = list(zip(self._nodes, given, self._channels[:-1], strict=True))
            for node, own, channels in steps[1 if windowed else 0 :]:
                images = node.build(images, own, channels)
            pipeline.set_outputs(images)
        return pipeline

    def _decoded(self, window: Mapping[str, Images] | None) -> Images:
        cuda = self._device.type == "cuda"
        if not self._encoded:
            pixels = fn.external_source(
                name=_IMAGES, dtype=types.UINT8, ndim=3, layout="HWC", no_copy=True
            )
            if cuda:
                return pixels.gpu()
            # The output of a graph without steps must not be the memory that was fed.
            return pixels if self._nodes else fn.copy(pixels)
        files = fn.external_source(name=_IMAGES, dtype=types.UINT8, ndim=1, no_copy=True)
        options: dict[str, Any] = {
            "device": "mixed" if cuda else "cpu",
            "output_type": types.RGB if self._channels[0] == 3 else types.GRAY,
            "adjust_orientation": False,  # torchvision does not rotate images by their EXIF data
        }
        if cuda:
            # Chroma as in libjpeg.
            options.update(jpeg_fancy_upsampling=True, hw_decoder_load=self._engine)
        decoders = _decoders()
        if window is None:
            return decoders.image(files, **options)
        return decoders.image_slice(
            files, start=window["anchor"], shape=window["shape"], axis_names="HW", **options
        )


def _decoders() -> Any:
    """Return DALI's nvImageCodec decoders; older versions of DALI call them experimental."""
    known = inspect.signature(fn.decoders.image).parameters
    return fn.decoders if "adjust_orientation" in known else fn.experimental.decoders


def _decodable(window: Mapping[str, Array], height: Array, width: Array) -> bool:
    """Whether the decoder may crop all of these windows.

    It has no pixels outside of an image. And in a window one pixel wide, libjpeg ignores the
    neighbouring chroma: up to 4 levels off.
    """
    (top, left), (rows, columns) = window["anchor"].T, window["shape"].T
    inside = (top >= 0) & (left >= 0) & (top + rows <= height) & (left + columns <= width)
    return bool((inside & (rows > 0) & ((columns > 1) | (width == 1))).all())


def _name(place: int, input_: Input) -> str:
    return f"{place}_{input_.name}"


def _source(name: str, input_: Input) -> Images:
    return fn.external_source(name=name, dtype=_TYPES[input_.dtype], ndim=input_.ndim)


def _sample_in(message: str) -> int | None:
    found = re.search(r"sample #(\d+)", message)
    return int(found.group(1)) if found else None


_ALIVE: weakref.WeakSet[Graph] = weakref.WeakSet()


def _in_forked_child() -> None:
    """Keep pipelines alive in a child, where ending them would wait for the parent's threads."""
    for graph in _ALIVE:
        graph._closed = True
        graph._gate, graph._lock = threading.Lock(), threading.Lock()
        graph._runs.clear()
        for pipeline in graph._pipelines.values():
            backend = pipeline._pipe
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # it is never destroyed
            pipeline._pipe = None
        graph._pipelines.clear()


def _at_exit() -> None:
    """Close the graphs before DALI's own exit handler, which aborts a thread that is taking.

    Registered after DALI's own, so this runs before it.
    """
    for graph in list(_ALIVE):
        graph.close()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
