"""Make recorded batches in threads of the CPU.

each image: window of its file ──decoder──> resized, flipped ──steps──> bytes ──> its place in
the batch, whose memory is used again after its last reference is gone
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from dataloaders.batches.memory import HostPool
from dataloaders.machine.threads import limit_torch_threads
from dataloaders.recording import program
from dataloaders.recording.ops import as_flavour, run
from dataloaders.recording.program import Node, RecordedBatch, ordered
from dataloaders.recording.tail import planes

from . import ReplayError
from .plan import TURNS, Box, Head, Row, Stack, heads_of, plan
from .pointwise import Pointwise

Job: TypeAlias = tuple[int, Callable[[], None]]
"""What a thread does, with the position in the batch that it is for."""


_Place: TypeAlias = tuple[int, Row, Pointwise, Tensor]
"""A row, its position in its stack, and what its last pass fills."""


_MOST_WINDOWS = 3
"""Of a file of which more views are made, all pixels are decoded, once."""


class Decoder(Protocol):
    """Decodes files on the CPU, in whatever threads call it."""

    def decode(self, file: Any, window: Box) -> Any:
        """Return uint8 [H, W, 3] of a file's window; None: Pillow has to do it."""


class _Whole:
    """Decodes one file whole, and returns its windows."""

    def __init__(self, decoder: Decoder, source: Node) -> None:
        what = source.what
        width, height = what.size if isinstance(what, program.Image) else what.shape[:0:-1]
        self._decoder, self._file = decoder, source.args[0]
        self._pixels = decoder.decode(self._file, (0, 0, width, height))

    def decode(self, file: Any, window: Box) -> Any:
        """See `Decoder`."""
        left, upper, right, lower = window
        if file is not self._file or self._pixels is None:
            return self._decoder.decode(file, window)
        return np.ascontiguousarray(self._pixels[upper:lower, left:right])


class HostReplay:
    """Batches on the CPU.

    Args:
        decoder: decodes JPEG files as Pillow does, to the bit.
        threads: how many.
        exact: whether Pillow resizes its images itself. Else torch does where the filter is
            bilinear, for a third of the time: 1 level off, rarely 2.
    """

    def __init__(self, decoder: Decoder, threads: int, exact: bool = True) -> None:
        self.decoder = decoder
        self._exact = exact
        self._count = threads
        self._threads = ThreadPoolExecutor(threads, "replay", limit_torch_threads, (1,))
        self._pool = HostPool()

    def apply(self, batch: RecordedBatch) -> Any:
        """Return the batch.

        Raises:
            ReplayError: some of its samples cannot be made of what was recorded.
        """
        return program.filled(batch, self._made_of)

    def _made_of(self, wanted: list[Node]) -> list[Any]:
        stacks, apart = plan(wanted)
        known: dict[Node, Any] = {}
        jobs = [*self.stacks(stacks, known), *self.values(apart, known)]
        self.wait(self.start(jobs))
        return made_of(wanted, known)

    def close(self) -> None:
        """End the threads when they have done what was begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def start(self, jobs: Iterable[Job]) -> list[Future[Any]]:
        """Begin with ``jobs``: threads share them, each taking the next one."""
        jobs = list(jobs)
        pending = iter(jobs)
        return [self._threads.submit(_work, pending) for _ in jobs[: self._count]]

    def wait(self, begun: Sequence[Future[Any]]) -> None:
        """Wait for jobs.

        Raises:
            ReplayError: some failed.
            Exception: memory or the device failed.
        """
        failed = [failure for future in begun for failure in future.result()]
        if failed:
            cause = failed[0][1]
            raise ReplayError(sorted({place for place, _ in failed}), cause) from cause

    def images(self, rows: Iterable[tuple[int, Row]], made: dict[int, Tensor]) -> list[Job]:
        """Return jobs that put the bytes of each row, uint8 [H, W, 3], into ``made``."""

        def job(place: int, row: Row) -> None:
            made[place] = self._image(row, {}, self.decoder).permute(1, 2, 0)

        return [(place, partial(job, place, row)) for place, row in rows]

    def stacks(self, stacks: Iterable[Stack], known: dict[Node, Any]) -> list[Job]:
        """Return jobs that put ``stacks`` into ``known``."""
        groups: dict[Node, list[_Place]] = {}  # by file, whose views have first steps in common
        for stack in stacks:
            tail = stack.pointwise()
            shape = len(stack.rows), *stack.node.inputs[0].what.shape
            out = known[stack.node] = self._pool.empty(shape, tail.dtype)
            for place, row in enumerate(stack.rows):
                source = next(iter(ordered([row.image])))
                groups.setdefault(source, []).append((place, row, tail, out))
        return [(rows[0][0], partial(self._fill, rows)) for rows in groups.values()]

    def values(self, nodes: Iterable[Node], known: dict[Node, Any]) -> list[Job]:
        """Return jobs that put what ``nodes`` make into ``known``."""

        def job(node: Node) -> None:
            image = isinstance(node.what, program.Image)  # whose ``info`` comes from the file
            known[node] = run([node])[0] if image else self._value(node, {}, self.decoder)

        return [(place, partial(job, node)) for place, node in enumerate(nodes)]

    def _fill(self, rows: Sequence[_Place]) -> None:
        shared: dict[Node, Any] = {}
        head, decoder = rows[0][1].head, self.decoder
        if head is not None and len(rows) > _MOST_WINDOWS:
            decoder = _Whole(decoder, head.source)
        for place, row, tail, out in rows:
            tail(self._image(row, shared, decoder), out[place])
            if row.last is not row.done:  # such as an erased box
                done = out[place].clone()
                out[place].copy_(run([row.last], {row.done: done})[0])

    def _image(self, row: Row, shared: dict[Node, Any], decoder: Decoder) -> Tensor:
        """Return the bytes of ``row.image``, uint8 [3, H, W]; ``shared``: what rows share."""
        made = None if row.head is None or row.steps else self._made(row.head, decoder)
        if made is None:
            made = self._value(row.image, shared, decoder)
            if isinstance(made, Tensor):
                return made.as_subclass(Tensor)
        return made.permute(2, 0, 1) if isinstance(made, Tensor) else planes(made)

    def _value(self, node: Node, shared: dict[Node, Any], decoder: Decoder) -> Any:
        known = dict(shared)
        for head in heads_of(node):
            made = None if head.node in known else self._made(head, decoder)
            if made is not None:
                known[head.node] = _as_recorded(made, head)
        kept = [each for each in ordered([node], dict.fromkeys(known, 0)) if each.uses > 1]
        value, *others = run([node, *kept], known)
        shared.update(zip(kept, others, strict=True))
        return value

    def _made(self, head: Head, decoder: Decoder) -> Any:
        """Return uint8 [H, W, 3], or Pillow's image; None: Pillow has to decode the file."""
        found = decoder.decode(head.source.args[0], head.window)
        if found is None:
            return None
        if head.size is not None and head.by_pillow and (self._exact or head.by != 2):
            return _resized(found, head)
        pixels = torch.from_numpy(found)
        if head.size is not None:
            mode = "bilinear" if head.by == 2 else "bicubic"
            image = pixels.permute(2, 0, 1).unsqueeze(0)
            image = functional.interpolate(image, head.size[::-1], mode=mode, antialias=True)
            pixels = image[0].permute(1, 2, 0)
        if head.crop is not None:
            left, upper, right, lower = head.crop
            pixels = pixels[upper:lower, left:right]
        turned = [axis for axis, flip in zip((1, 0), head.flips, strict=True) if flip]
        return pixels.flip(turned) if turned else pixels


def made_of(wanted: Sequence[Node], known: dict[Node, Any]) -> list[Any]:
    """Return what `run` does.

    Raises:
        ReplayError: it failed, and neither memory nor a device is the cause.
    """
    try:
        return run(wanted, known)
    except Exception as error:
        raise (error if _is_fatal(error) else ReplayError([], error)) from error


def _work(jobs: Iterator[Job]) -> list[tuple[int, Exception]]:
    failed: list[tuple[int, Exception]] = []
    for place, job in jobs:
        try:
            job()
        except Exception as error:  # the dataset is asked for that sample, and raises its own
            if _is_fatal(error):
                raise
            failed.append((place, error))
    return failed


def _is_fatal(error: Exception) -> bool:
    """Whether memory or a device caused ``error``, and not a sample."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    known = "CUDA", "out of memory", "bad_alloc", "DefaultCPUAllocator"
    return isinstance(error, RuntimeError) and any(text in str(error) for text in known)


def finished(value: Any, dtype: torch.dtype | None, memory_format: torch.memory_format) -> Any:
    """Return ``value`` as it is asked for, if it is a tensor of images: of 3 dimensions or more.

    Its floats are of ``dtype``; with 4 dimensions it has the order of ``memory_format``.
    """
    if not isinstance(value, Tensor) or value.ndim < 3:
        return value
    wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
    order = memory_format if value.ndim == 4 else torch.preserve_format
    return value.to(wanted, memory_format=order)


def _resized(pixels: npt.NDArray[np.uint8], head: Head) -> Any:
    """Return what Pillow makes of the window ``pixels``."""
    from PIL import Image

    image: Any = Image.new("RGB", pixels.shape[1::-1], None)
    image.frombytes(pixels)
    image = image.resize(head.size, head.by)
    if head.crop is not None:
        image = image.crop(head.crop)
    turns = [method for method, flips in TURNS.items() if flips == head.flips]
    return image.transpose(*turns) if turns else image


def _as_recorded(made: Any, head: Head) -> Any:
    """Return ``made`` as what the last step of ``head`` makes."""
    what = head.node.what
    if isinstance(what, program.Image):
        from PIL import Image

        return Image.fromarray(made.numpy()) if isinstance(made, Tensor) else made
    made = made if isinstance(made, Tensor) else torch.from_numpy(np.array(made))
    return as_flavour(made.permute(2, 0, 1), what.flavour)
