"""Decode, crop, resize, crop and flip files by one DALI graph, whose arguments are fed by batch.

    decode(files, ..., out) ──> runs of a bounded number of pixels ──> DALI ──> uint8 images in out
      decoders.image (mixed) ─> slice ─> resize (triangular) ─> slice ─> flip

The same graph runs on the CPU, for tests. Images are copied out on the current stream: DALI's
DLPack tensors would synchronise the device when they are dropped, which breaks the capture of CUDA
graphs. Files are decoded whole: nvImageCodec 0.9 fails at windows on a device (its issue 55).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nvidia.dali import Pipeline, backend, fn, types

from dataloaders.replaying import DecodeError

Array = npt.NDArray[Any]

# The first build for a device would warn that NPP or cuFFT is missing, which DALI's wheels do not
# bring: no operator of this graph uses them, and those that do raise errors of their own.
backend.cuda_checked = True  # type: ignore[attr-defined]

_ARGUMENTS = ("start", "shape", "size", "start2", "shape2", "flip")
"""What is fed for each image, each int32 (down, across)."""


class Graph:
    """Files in, uint8 images out, batch by batch.

    Args:
        batch_size: the most files in a batch.
        device: where it decodes and works.
        threads: of DALI's own; each takes 16 MiB on a device, and as much pinned memory.
        engine: the share of JPEG files that go to a device's hardware decoder, which decodes
            differently. nvImageCodec makes a number of it at the first run, and so many of each
            run's files go there. So a file's pixels depend on its place in a run, unless it is 0,
            or 1 and no run has more files than the first.
        most_pixels: of the files of one run, decoded whole; 3 bytes each. A file alone may have
            more.
    """

    def __init__(
        self,
        batch_size: int,
        device: torch.device,
        *,
        threads: int = 4,
        engine: float = 1.0,
        most_pixels: int = 1 << 28,
    ) -> None:
        self._batch_size = batch_size
        self._device = device
        self._index = (device.index or 0) if device.type == "cuda" else -1  # -1: of no device
        self._threads = threads
        self._engine = engine
        self._most_pixels = most_pixels
        self._pipeline: Pipeline | None = None
        self._fed: deque[list[Array]] = deque(maxlen=2)  # a device may still be reading these
        self._lock = Lock()
        self._closed = False
        _ALIVE.add(self)

    def decode(self, files: Sequence[Any], table: Array, out: torch.Tensor) -> None:
        """Fill ``out`` with the images of ``files``, in the order of the current stream.

        Args:
            files: bytes of each, which are read where they are.
            table: int32 [n, 14]: height and width of each file's image; top, left, height and
                width of the window that is needed of it; height and width that this is resized to;
                top, left, height and width of what is cut out then; whether top and bottom, and
                left and right, are exchanged.
            out: uint8 [n, height, width, 3] on the device.

        Raises:
            DecodeError: a file cannot be decoded.
            RuntimeError: any other error of DALI's, such as a lack of memory.
        """
        values = [np.ascontiguousarray(pair) for pair in np.split(table[:, 2:], 6, 1)]
        begin = 0
        with self._lock, ExitStack() as current:
            if self._closed:  # asked first: after a fork the device cannot be entered
                raise RuntimeError("this graph was closed, or was made before a fork")
            current.enter_context(torch.cuda.device(self._index))
            try:
                for begin, end in self._runs(table[:, :2].prod(1, np.int64).tolist()):
                    some = [np.frombuffer(file, np.uint8) for file in files[begin:end]]
                    self._run(some, [value[begin:end] for value in values], out[begin:end])
            except Exception as error:
                self._pipeline = None  # DALI gives up after an error
                raise _failure(error, begin) from None

    def _runs(self, pixels: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield where runs begin and end, of files with so many pixels."""
        begin, total = 0, 0
        for place, own in enumerate(pixels):
            full = place - begin == self._batch_size or total + own > self._most_pixels
            if full and place > begin:
                yield begin, place
                begin, total = place, 0
            total += own
        yield begin, len(pixels)

    def _run(self, files: list[Array], values: Sequence[Array], out: torch.Tensor) -> None:
        if self._pipeline is None:
            self._pipeline = self.defined()
            self._pipeline.build()
        self._fed.append(files)
        self._pipeline.feed_input("files", files)
        for name, value in zip(_ARGUMENTS, values, strict=True):
            self._pipeline.feed_input(name, value)
        self._pipeline.schedule_run()
        (made,) = self._pipeline.share_outputs(self._stream())
        self._copy(made, out)
        self._pipeline.release_outputs()

    def _copy(self, made: Any, out: torch.Tensor) -> None:
        if made.shape() != [tuple(out.shape[1:])] * len(out):
            raise ValueError(f"images of {made.shape()[0]} do not fit {tuple(out.shape)}")
        place = ctypes.c_void_p(out.data_ptr())
        if self._device.type == "cuda":
            stream = types._raw_cuda_stream_ptr(self._stream())
            made.copy_to_external(place, stream, non_blocking=True)
        else:
            made.copy_to_external(place)

    def close(self) -> None:
        """End the pipeline and its threads."""
        with self._lock:
            if not self._closed:  # after a fork the device cannot be entered
                with torch.cuda.device(self._index):
                    self._closed, self._pipeline = True, None
                self._fed.clear()

    def _stream(self) -> Any:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def defined(self) -> Pipeline:
        """Return the pipeline, not built."""
        cuda = self._device.type == "cuda"
        pipeline = Pipeline(
            batch_size=self._batch_size,
            num_threads=self._threads,
            device_id=self._index if cuda else None,
            set_affinity=False,
            exec_dynamic=True,  # each output has memory of its own
            exec_pipelined=False,  # else the first schedule_run() begins several runs, fed or not
            prefetch_queue_depth=2,  # a device works on a run while the next one's files are read
        )
        with pipeline:
            files = fn.external_source(name="files", dtype=types.UINT8, ndim=1, no_copy=True)
            given = {
                name: fn.external_source(name=name, dtype=types.INT32, ndim=1)
                for name in _ARGUMENTS
            }
            options: dict[str, Any] = {"device": "cpu"}
            if cuda:
                options = {"device": "mixed", "hw_decoder_load": self._engine}
                options["jpeg_fancy_upsampling"] = True  # chroma as in libjpeg
            images = fn.decoders.image(
                files, output_type=types.RGB, adjust_orientation=False, affine=False, **options
            )
            images = fn.slice(images, start=given["start"], shape=given["shape"], axes=(0, 1))
            size = fn.cast(given["size"], dtype=types.FLOAT)
            images = fn.resize(images, size=size, interp_type=types.INTERP_TRIANGULAR)
            images = fn.slice(images, start=given["start2"], shape=given["shape2"], axes=(0, 1))
            flip = given["flip"]
            images = fn.flip(images, vertical=flip[0], horizontal=flip[1])
            pipeline.set_outputs(images)
        return pipeline


# By their numbers: what nvImageCodec and its extensions cannot read or have no decoder for.
_BAD_FILE = re.compile(r"Failed to decode sample #(\d+)|nvImageCodec failure: '#(?:3|4|1[349])'")


def _failure(error: Exception, first: int) -> Exception:
    """Return a `DecodeError`, if that is what it is; else the very error.

    DALI's text has the paths of this file and of its caller, so that no word alone tells.
    """
    found = _BAD_FILE.search(str(error))
    if found is None:
        return error
    number = found.group(1)
    return DecodeError(None if number is None else first + int(number), error.with_traceback(None))


_ALIVE: weakref.WeakSet[Graph] = weakref.WeakSet()


def _in_forked_child() -> None:
    """Keep pipelines alive in a child, where ending them would wait for the parent's threads."""
    for graph in _ALIVE:
        graph._closed, graph._lock = True, Lock()
        if graph._pipeline is not None:
            backend, graph._pipeline._pipe = graph._pipeline._pipe, None
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # it is never destroyed
            graph._pipeline = None


def _at_exit() -> None:
    """Close the graphs before DALI's own exit handler, which aborts a thread that is taking.

    Registered after DALI's own, so this runs before it.
    """
    for graph in list(_ALIVE):
        graph.close()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
