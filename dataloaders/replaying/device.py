"""Make recorded batches on a device: files by one graph, then each step for all images at once.

    begin()   images that the CPU makes ──┐ in its threads, meanwhile
    finish()  files ──graph───────────────┤ decoded, cropped, resized, flipped
                                          └─> uint8 [n, H, W, 3] ──step k of all, by kind──> batch

An image goes by the CPU if its file is no JPEG, or one of its steps has no kernel here. Nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataloaders.recording import program
from dataloaders.recording.ops import run
from dataloaders.recording.program import Node, RecordedBatch, unpack

from . import DecodeError, kernels
from .evaluate import put_back, wanted_of
from .host import HostReplay, complete, finished
from .kernels import Array, upload
from .plan import Head, Row, Stack, plan
from .pointwise import Tails

_MOST_VALUES = 1 << 26
"""Bytes that a kernel works on at a time; its temporary tensors take some 20 times that."""


class Graph(Protocol):
    """What decodes on a device: see `backends.dali.graph.Graph`."""

    def decode(self, files: Sequence[Any], table: Array, out: Tensor) -> None:
        """Fill ``out`` with the images of ``files``; raises `DecodeError`."""


class _Part(NamedTuple):
    """A stack that was begun: which rows the graph makes, their steps, and the other rows."""

    stack: Stack
    places: list[int]
    steps: list[list[tuple[Any, Any]]]
    others: dict[int, Tensor]


class DeviceReplay:
    """Batches on a device.

    Args:
        graph: decodes files on the device.
        host: makes what the graph does not.
        device: where.
        dtype: what a batch's floats are rounded to; None: they stay.
        memory_format: the memory order of stacked images.
    """

    def __init__(
        self,
        graph: Graph,
        host: HostReplay,
        device: torch.device,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self._graph = graph
        self._host = host
        self._device = device
        self._format = memory_format
        self._finish = partial(finished, dtype=dtype, memory_format=memory_format)
        self._tails = Tails(dtype)
        self._refused: set[tuple[int, bytes]] = set()

    def apply(self, batch: RecordedBatch) -> Any:
        """Return the batch, in the order of the current stream.

        Raises:
            ReplayError: some of its samples cannot be made of what was recorded.
        """
        return self.finish(self.begin(batch))

    def begin(self, batch: RecordedBatch) -> Any:
        """Start on what the CPU makes of ``batch``; the result is for `finish`."""
        nodes, slots = unpack(batch)
        wanted = [nodes[number] for number in wanted_of(batch.rest)]
        stacks, apart = plan(wanted)
        parts = [self._part(stack, slots) for stack in stacks]
        values: dict[Node, Any] = {}
        begun = self._host.start_values(apart, slots, values)
        for part in parts:
            rows = [(k, row) for k, row in enumerate(part.stack.rows) if k not in part.places]
            begun += self._host.start(rows, slots, part.others.__setitem__)
        return batch, wanted, slots, parts, values, begun

    def finish(self, begun: Any) -> Any:
        """Return a batch that was begun. See `apply`."""
        batch, wanted, slots, parts, values, jobs = begun
        decoded = [self._decoded(part, slots) for part in parts]
        self._host.wait(jobs)
        known = {node: _there(value, self._device) for node, value in values.items()}
        for part, images in zip(parts, decoded, strict=True):
            known[part.stack.node] = self._stacked(part, images, wanted, slots)
        values = [self._finish(_there(v, self._device)) for v in run(wanted, slots, known)]
        numbers = wanted_of(batch.rest)
        return put_back(batch.rest, dict(zip(numbers, values, strict=True)).__getitem__)

    def _part(self, stack: Stack, slots: Sequence[Any]) -> _Part:
        _, height, width = stack.node.inputs[0].what.shape
        places: list[int] = []
        own: list[list[tuple[Any, Any]]] = []
        for place, row in enumerate(stack.rows):
            steps = _kinds(row, height, width)
            if steps is None or row.head is None:
                continue
            file = slots[row.head.source.args[0]]
            if not self._host.decoder.takes(file) or _mark(file) in self._refused:
                continue
            places.append(place)
            own.append(steps)
        return _Part(stack, places, own, {})

    def _decoded(self, part: _Part, slots: Sequence[Any]) -> Tensor:
        """Return the images that the graph makes; none if it refuses one: the CPU makes all."""
        stack, places = part.stack, part.places
        _, height, width = stack.node.inputs[0].what.shape
        images = torch.empty(len(places), height, width, 3, dtype=torch.uint8, device=self._device)
        if places:
            heads: list[Any] = [stack.rows[place].head for place in places]
            files = [slots[head.source.args[0]] for head in heads]
            try:
                self._graph.decode(files, _table_of(heads), images)
            except DecodeError as error:
                if error.sample is not None:
                    self._refused.add(_mark(files[error.sample]))
                rows = [(place, stack.rows[place]) for place in places]
                self._host.wait(self._host.start(rows, slots, part.others.__setitem__))
                places.clear()
        return images

    def _stacked(
        self, part: _Part, images: Tensor, wanted: Sequence[Node], slots: Sequence[Any]
    ) -> Tensor:
        stack, places, others = part.stack, part.places, part.others
        count, (channels, height, width) = len(stack.rows), stack.node.inputs[0].what.shape
        for level in range(max(map(len, part.steps), default=0) if places else 0):
            _step(images, [steps[level : level + 1] for steps in part.steps])
        if len(places) < count:
            whole = images.new_empty(count, height, width, 3)
            if places:
                whole.index_copy_(0, upload(np.array(places), self._device), images)
            rest = torch.stack([others[k] for k in sorted(others)]).numpy()
            images = whole.index_copy_(
                0, upload(np.array(sorted(others)), self._device), upload(rest, self._device)
            )
        tail = self._tails.of_stack(stack, wanted)
        out = torch.empty(
            count,
            channels,
            height,
            width,
            dtype=tail.dtype,
            device=self._device,
            memory_format=self._format,
        )
        tail(images, out)
        for place, row in enumerate(stack.rows):
            complete(row, out[place], slots)
        return out


def _step(images: Tensor, steps: Sequence[list[tuple[Any, Any]]]) -> None:
    """Do at most one step of each image, in place, all of a kind at once."""
    groups: dict[Any, tuple[list[int], list[Any]]] = {}
    for place, own in enumerate(steps):
        for kind, number in own:
            places, numbers = groups.setdefault(kind, ([], []))
            places.append(place)
            numbers.append(number)
    most = max(1, _MOST_VALUES // images[0].numel())
    for kind, (places, numbers) in groups.items():
        for begin in range(0, len(places), most):
            some = slice(begin, begin + most)
            index = upload(np.array(places[some]), images.device)
            made = _KERNELS[kind](images.index_select(0, index), numbers[some])
            images.index_copy_(0, index, made)


def _factors(images: Tensor, numbers: Sequence[float]) -> Tensor:
    return upload(np.array(numbers, np.float32), images.device)


def _warped(images: Tensor, numbers: Sequence[tuple[Array, Array]]) -> Tensor:
    return kernels.affine(
        images, np.stack([m for m, _ in numbers]), np.stack([f for _, f in numbers])
    )


_KERNELS: dict[Any, Callable[[Tensor, Sequence[Any]], Tensor]] = {
    "table": lambda x, n: kernels.lookup(x, upload(np.stack(n), x.device)),
    "contrast": lambda x, n: kernels.lookup(x, kernels.contrast(x, _factors(x, n))),
    "autocontrast": lambda x, n: kernels.lookup(x, kernels.autocontrast(x)),
    "equalize": lambda x, n: kernels.lookup(x, kernels.equalize(x)),
    "saturation": lambda x, n: kernels.saturation(x, _factors(x, n)),
    "sharpness": lambda x, n: kernels.sharpness(x, _factors(x, n)),
    "hue": lambda x, n: kernels.hue(x, upload(np.array(n, np.int32), x.device)),
    "tint": lambda x, n: kernels.tint(x, _factors(x, n)),
    "affine": _warped,
    0: lambda x, n: x.flip(2),  # Pillow's Transpose
    1: lambda x, n: x.flip(1),
    2: lambda x, n: x.rot90(1, (1, 2)),
    3: lambda x, n: x.flip((1, 2)),
    4: lambda x, n: x.rot90(3, (1, 2)),
}

_FACTORS = {
    **dict.fromkeys(("enhance.Contrast", "v2.adjust_contrast"), "contrast"),
    **dict.fromkeys(("enhance.Color", "v2.adjust_saturation"), "saturation"),
    **dict.fromkeys(("enhance.Sharpness", "v2.adjust_sharpness"), "sharpness"),
    "v2.adjust_hue": "tint",
}
_PLAIN: dict[str, Any] = {
    **dict.fromkeys(("imageops.autocontrast", "v2.autocontrast"), "autocontrast"),
    **dict.fromkeys(("imageops.equalize", "v2.equalize"), "equalize"),
    **dict.fromkeys(("v2.hflip", "v2.horizontal_flip"), 0),
    **dict.fromkeys(("v2.vflip", "v2.vertical_flip"), 1),
}
_TABLES = ("imageops.invert", "imageops.posterize", "imageops.solarize", "fpil.adjust_gamma")
_GREYS = ("fpil.to_grayscale", "v2.rgb_to_grayscale", "v2.to_grayscale")
_LEVELS = np.arange(256, dtype=np.float32).reshape(1, 256)


def _kinds(row: Row, height: int, width: int) -> list[tuple[Any, Any]] | None:
    """Return (kernel, number) of each step of ``row``; None: it is for the CPU."""
    head = row.head
    if head is None or min(height, width) < 3:
        return None
    if head.size is not None and head.by not in (2, "bilinear"):
        return None
    for step in (head.node, *row.steps):
        what = step.what
        size = what.size[::-1] if isinstance(what, program.Image) else what.shape[1:]
        if tuple(size) != (height, width):
            return None
    kinds = [_kind(step, height, width) for step in row.steps]
    if None in kinds:
        return None
    return [kind for kind in kinds if kind is not None and kind[0] != "same"]


def _kind(step: Node, height: int, width: int) -> tuple[Any, Any] | None:
    given = [*step.args, *(value for _, value in step.kwargs)]
    op = step.op
    if op in ("pil_to_tensor", "to_pil_image", "as_subclass", "v2.to_dtype"):
        return "same", None
    if op in ("enhance.Brightness", "v2.adjust_brightness"):
        table = np.clip(_LEVELS * np.float32(given[0]), 0, 255).astype(np.uint8)
        return "table", table
    if op in _FACTORS:
        return _FACTORS[op], given[0]
    if op in _PLAIN:
        return None if any(given) else (_PLAIN[op], None)
    if op in _TABLES or op.replace("v2.", "imageops.") in _TABLES:
        return "table", _table(op.replace("v2.", "imageops."), step.args, step.kwargs)
    if op in _GREYS:
        return "saturation", 0.0
    if op == "fpil.adjust_hue":
        return "hue", int(given[0] * 255) & 255
    if op == "pil.transform":
        return _warp(step.args, height, width)
    return (int(given[0]), None) if op == "pil.transpose" and given[0] < 5 else None


@lru_cache(maxsize=512)
def _table(op: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> npt.NDArray[Any]:
    """Return uint8 [1, 256]: what Pillow makes of each level."""
    what = program.Image("RGB", (256, 1))
    levels = np.arange(256, dtype=np.uint8).reshape(1, 256, 1).repeat(3, 2)
    first = Node("array", (), (0, levels.shape, "|u1", "RGB"), (), what)
    made = run([Node(op, (first,), args, kwargs, what)], [levels.tobytes()])[0]
    return np.asarray(made)[:, :, 0]


def _warp(args: tuple[Any, ...], height: int, width: int) -> tuple[Any, Any] | None:
    """Return an affine step, by its matrix and the colour outside; None for any other."""
    _, method, matrix, resample, _, colour = args
    plain = method == 0 and resample == 0 and (not colour or np.shape(colour) == (3,))
    numbers = np.array(matrix[:6], np.float64)
    if not plain or not kernels.reaches(numbers, width, height):
        return None
    return "affine", (numbers, np.array(colour or (0, 0, 0)).clip(0, 255).astype(np.uint8))


def _table_of(heads: Sequence[Head]) -> Array:
    """Return what `Graph.decode` takes of ``heads``."""
    rows = []
    for head in heads:
        what = head.source.what
        full = what.size[::-1] if isinstance(what, program.Image) else what.shape[1:]
        left, upper, right, lower = head.window
        width, height = head.size or (right - left, lower - upper)
        x0, y0, x1, y1 = head.crop or (0, 0, width, height)
        window = (upper, left, lower - upper, right - left)
        across, down = head.flips
        rows.append((*full, *window, height, width, y0, x0, y1 - y0, x1 - x0, down, across))
    return np.array(rows, np.int32)


def _mark(file: Any) -> tuple[int, bytes]:
    return len(file), bytes(file[-64:])


def _there(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
