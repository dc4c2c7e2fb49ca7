"""Make recorded batches in threads of the CPU.

each image: window of its file ──decoder──> resized, flipped ──steps──> bytes ──> its place in
the batch, whose memory is used again after its last reference is gone
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from dataloaders.batches.memory import HostPool
from dataloaders.machine.threads import limit_torch_threads
from dataloaders.recording import program
from dataloaders.recording.ops import run
from dataloaders.recording.program import Node, RecordedBatch, unpack

from . import ReplayError
from .evaluate import put_back, wanted_of
from .plan import TURNS, Box, Head, Row, Stack, heads_of, plan
from .pointwise import Pointwise, Tails


class Decoder(Protocol):
    """Decodes files on the CPU, in whatever threads call it."""

    def decode(self, file: Any, window: Box | None = None) -> Any:
        """Return uint8 [H, W, 3] of a file's window; None: Pillow has to do it."""


class HostReplay:
    """Batches on the CPU.

    Args:
        decoder: decodes JPEG files as Pillow does, to the bit.
        threads: how many.
        exact: whether Pillow resizes its images itself. Else torch does where the filter is
            bilinear, for a third of the time: 1 level off at most, in one value of six.
        dtype: what stacked images are rounded to in their last pass; None: they stay.
        memory_format: the memory order of stacked images.

    Attributes:
        tails: the last passes that it has made.
    """

    def __init__(
        self,
        decoder: Decoder,
        threads: int,
        exact: bool = True,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.decoder = decoder
        self._exact = exact
        self.memory_format = memory_format
        self.tails = Tails(dtype)
        self._shares = Shares(threads)
        self._pool = HostPool()

    def apply(self, batch: RecordedBatch) -> Any:
        """Return the batch.

        Raises:
            ReplayError: some of its samples cannot be made of what was recorded.
        """
        nodes, slots = unpack(batch)
        numbers = wanted_of(batch.rest)
        wanted = [nodes[number] for number in numbers]
        stacks, apart = plan(wanted)
        known: dict[Node, Any] = {}
        begun = self.start_stacks(stacks, wanted, slots, known)
        self.wait(begun + self.start_values(apart, slots, known))
        values = made_of(wanted, slots, known)
        return put_back(batch.rest, dict(zip(numbers, values, strict=True)).__getitem__)

    def close(self) -> None:
        """End the threads."""
        self._shares.close()

    def image(self, row: Row, slots: Sequence[Any], shared: dict[Node, Any]) -> Tensor:
        """Return the bytes of ``row.image``, uint8 [H, W, 3]; ``shared``: what rows share."""
        made = None if row.head is None or row.steps else self._made(row.head, slots)
        if made is None:
            made = self._value(row.image, slots, shared)
            if isinstance(made, Tensor):
                return made.as_subclass(Tensor).permute(1, 2, 0)
        return made if isinstance(made, Tensor) else _bytes_of(made)

    def start(self, rows: Iterable[tuple[int, Row]], slots: Sequence[Any], put: Any) -> list[Any]:
        """Begin to ``put(place, image(row))`` in the threads; to be waited for with `wait`."""
        jobs = [(k, lambda k=k, row=row: put(k, self.image(row, slots, {}))) for k, row in rows]
        return self._shares.start(jobs)

    def start_stacks(
        self,
        stacks: Iterable[Stack],
        wanted: Sequence[Node],
        slots: Sequence[Any],
        known: dict[Node, Any],
    ) -> list[Any]:
        """Begin to put ``stacks`` into ``known``; to be waited for with `wait`."""
        jobs: list[tuple[int, Callable[[], None]]] = []
        for stack in stacks:
            tail = self.tails.of_stack(stack, wanted)
            out = known[stack.node] = self._empty(stack, tail.dtype)
            for rows in _sharing(stack):
                jobs.append((rows[0][0], partial(self._fill, rows, slots, tail, out)))
        return self._shares.start(jobs)

    def start_values(
        self, nodes: Iterable[Node], slots: Sequence[Any], known: dict[Node, Any]
    ) -> list[Any]:
        """Begin to put what ``nodes`` make into ``known``; to be waited for with `wait`."""
        return self._shares.start(
            [(k, partial(self._make, node, slots, known)) for k, node in enumerate(nodes)]
        )

    def wait(self, begun: Sequence[Future[Any]]) -> None:
        """Wait for what was started; raises `ReplayError`."""
        self._shares.wait(begun)

    def _fill(
        self, rows: Sequence[tuple[int, Row]], slots: Sequence[Any], tail: Pointwise, out: Tensor
    ) -> None:
        shared: dict[Node, Any] = {}
        for place, row in rows:
            tail(self.image(row, slots, shared).unsqueeze(0), out[place : place + 1])
            if row.last is not row.done:  # such as an erased box
                done = out[place].clone()
                out[place].copy_(run([row.last], slots, {row.done: done})[0])

    def _make(self, node: Node, slots: Sequence[Any], known: dict[Node, Any]) -> None:
        if isinstance(node.what, program.Image):  # whose ``info`` comes from the file
            known[node] = run([node], slots)[0]
        else:
            known[node] = self._value(node, slots, {})

    def _value(self, node: Node, slots: Sequence[Any], shared: dict[Node, Any]) -> Any:
        known = dict(shared)
        for head in heads_of(node):
            made = None if head.node in known else self._made(head, slots)
            if made is not None:
                known[head.node] = _as_recorded(made, head)
                if head.node.uses > 1:
                    shared[head.node] = known[head.node]
        return run([node], slots, known)[0]

    def _made(self, head: Head, slots: Sequence[Any]) -> Any:
        """Return uint8 [H, W, 3], or Pillow's image; None: Pillow has to decode the file."""
        found = self.decoder.decode(slots[head.source.args[0]], head.window)
        if found is None:
            return None
        if head.size is not None and isinstance(head.by, int) and (self._exact or head.by != 2):
            return _resized(found, head)
        pixels = torch.from_numpy(found)
        if head.size is not None:
            mode = "bilinear" if head.by == 2 else str(head.by)
            image = pixels.permute(2, 0, 1).unsqueeze(0)
            image = image.float() if head.floats and self._exact else image
            image = functional.interpolate(image, head.size[::-1], mode=mode, antialias=True)
            if image.is_floating_point():
                image = image.clamp_(0, 255).round_().to(torch.uint8)
            pixels = image[0].permute(1, 2, 0)
        if head.crop is not None:
            left, upper, right, lower = head.crop
            pixels = pixels[upper:lower, left:right]
        turned = [axis for axis, flip in zip((1, 0), head.flips, strict=True) if flip]
        return pixels.flip(turned) if turned else pixels

    def _empty(self, stack: Stack, dtype: torch.dtype) -> Tensor:
        channels, height, width = stack.node.inputs[0].what.shape
        if self.memory_format is not torch.channels_last:
            return self._pool.empty((len(stack.rows), channels, height, width), dtype)
        out = self._pool.empty((len(stack.rows), height, width, channels), dtype)
        return out.permute(0, 3, 1, 2)


def made_of(wanted: Sequence[Node], slots: Sequence[Any], known: dict[Node, Any]) -> list[Any]:
    """Return what `run` does.

    Raises:
        ReplayError: it failed, and neither memory nor a device is the cause.
    """
    try:
        return run(wanted, slots, known)
    except Exception as error:
        raise (error if _is_fatal(error) else ReplayError([], error)) from error


def _sharing(stack: Stack) -> list[list[tuple[int, Row]]]:
    """Return the rows of ``stack`` and their places; those that share a first step together."""
    groups: dict[Node, list[tuple[int, Row]]] = {}
    for place, row in enumerate(stack.rows):
        shares = row.head is not None and row.head.node.uses > 1
        groups.setdefault(row.head.node if shares else row.last, []).append((place, row))  # type: ignore[union-attr]
    return list(groups.values())


class Shares:
    """Threads that share jobs, each taking the next one."""

    def __init__(self, threads: int) -> None:
        self._count = threads
        self._threads = ThreadPoolExecutor(threads, "replay", limit_torch_threads, (1,))

    def start(self, jobs: Iterable[tuple[int, Callable[[], None]]]) -> list[Future[Any]]:
        """Begin with ``jobs``, each with the position in the batch that it is for."""
        jobs = list(jobs)
        pending = iter(jobs)
        count = min(self._count, len(jobs))
        return [self._threads.submit(_work, pending) for _ in range(count)]

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

    def close(self) -> None:
        """End the threads when they have done what was begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _work(jobs: Iterator[tuple[int, Callable[[], None]]]) -> list[tuple[int, Exception]]:
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


def _bytes_of(image: Any) -> Tensor:
    """Return the pixels of an RGB image of Pillow's, uint8 [H, W, 3]: its own memory, if it can."""
    try:
        held = image.__arrow_c_array__()
    except (AttributeError, ValueError):  # Pillow before 11.3; an image in several blocks
        return torch.from_numpy(np.array(image))
    array = _address(held[1], b"arrow_array")  # a struct of 8-byte fields: a list of 4 a pixel
    values = _field(_field(array + 48))  # its first child
    memory = (ctypes.c_uint8 * (4 * image.width * image.height)).from_address(
        _field(_field(values + 40) + 8)
    )
    memory.held = held
    pixels = torch.frombuffer(memory, dtype=torch.uint8).view(image.height, image.width, 4)
    return pixels[:, :, :3]


_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _field(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _as_recorded(made: Any, head: Head) -> Any:
    """Return ``made`` as what the last step of ``head`` makes."""
    what = head.node.what
    if isinstance(what, program.Image):
        from PIL import Image

        return Image.fromarray(made.numpy()) if isinstance(made, Tensor) else made
    made = (made if isinstance(made, Tensor) else torch.from_numpy(np.array(made))).permute(2, 0, 1)
    if what.flavour == "Tensor":
        return made
    from torchvision import tv_tensors

    return made.as_subclass(getattr(tv_tensors, what.flavour))
