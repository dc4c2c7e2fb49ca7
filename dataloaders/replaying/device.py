"""Make recorded batches on a device: files by one graph, then each step for all images at once.

    images that the CPU makes ──┐ in its threads, meanwhile
    files ──graph───────────────┤ decoded, cropped, resized, flipped
                                └─> uint8 [n, H, W, 3] ──steps──> last pass ──steps──> floats

Images of equal size and last pass are made together, whatever they are stacked in. The CPU makes
images whose file is no common JPEG, or that have a step before the last pass without a kernel
here; and all images of a stack if a step after it has none. Nothing waits for the device: the
graph returns when its work is queued, so that the CPU's part of the next batch's decoding runs
beside the device's work on this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dataloaders.recording import program
from dataloaders.recording.program import Node, RecordedBatch, ordered, unpack, wanted_of
from dataloaders.recording.tail import step_of

from . import DecodeError
from .grouped import Step, bytes_steps, do, float_steps
from .host import HostReplay, made_of
from .jpeg import is_common
from .kernels import Array, upload
from .plan import Row, Stack, plan
from .pointwise import Pointwise


class Graph(Protocol):
    """What decodes on a device: see `backends.dali.graph.Graph`."""

    def decode(self, files: Sequence[Any], table: Array, out: Tensor) -> None:
        """Fill ``out`` with the images of ``files``; raises `DecodeError`."""


class _Group(NamedTuple):
    """Stacks whose images are made together, and what is done to each of these.

    Attributes:
        stacks: their rows, one stack after the other, are ``rows``.
        size: height and width.
        tail: the last pass.
        rows: of all the stacks.
        before: the steps before it, of the rows that the graph makes.
        after: those after it, of all rows.
        others: bytes of the rows that the CPU makes.
    """

    stacks: list[Stack]
    size: tuple[int, int]
    tail: Pointwise
    rows: list[Row]
    before: dict[int, list[Step]]
    after: list[list[Step]]
    others: dict[int, Tensor]


class DeviceReplay:
    """Batches on a device.

    Args:
        graph: decodes files on the device.
        host: makes what the graph does not.
        device: where.
    """

    def __init__(self, graph: Graph, host: HostReplay, device: torch.device) -> None:
        self._graph = graph
        self._host = host
        self._device = device
        self._refused: set[tuple[int, bytes]] = set()

    def apply(self, batch: RecordedBatch) -> Any:
        """Return the batch, in the order of the current stream.

        Raises:
            ReplayError: some of its samples cannot be made of what was recorded.
        """
        return program.filled(batch, self._made_of)

    def _made_of(self, wanted: list[Node]) -> list[Any]:
        host = self._host
        stacks, apart = plan(wanted)
        groups, left = self._groups(stacks, wanted)
        values: dict[Node, Any] = {}
        jobs = [*host.stacks(left, values), *host.values(apart, values)]
        for group in groups:
            rows = [(k, row) for k, row in enumerate(group.rows) if k not in group.before]
            jobs += host.images(rows, group.others)
        begun = host.start(jobs)
        decoded = [self._decoded(group) for group in groups]
        host.wait(begun)
        # What needs nothing of the device is made here, and copied once. So are tensors that the
        # calls there take beside images.
        stacked = [stack.node for group in groups for stack in group.stacks]
        on_host = [node for node in wanted if set(stacked).isdisjoint(ordered([node]))]
        values.update(zip(on_host, made_of(on_host, values), strict=True))
        needed = ordered(wanted, dict.fromkeys([*stacked, *values], 0))
        tensors = [node for node in needed if node.op == "tensor" and node not in values]
        values.update(zip(tensors, made_of(tensors, {}), strict=True))
        known = {node: self._moved(value) for node, value in values.items()}
        for group, images in zip(groups, decoded, strict=True):
            known.update(self._made(group, images))
        return made_of(wanted, known)

    def _groups(
        self, stacks: Iterable[Stack], wanted: Sequence[Node]
    ) -> tuple[list[_Group], list[Stack]]:
        """Return what is made together, and the stacks that are left to the CPU."""
        groups: dict[Any, _Group] = {}
        left: list[Stack] = []
        for stack in stacks:
            after = [float_steps(row) for row in stack.rows]
            if None in after:
                left.append(stack)
                continue
            _, height, width = stack.node.inputs[0].what.shape
            tail = stack.pointwise()
            steps = repr([step_of(node) for node in stack.tail])
            # What the user gets as it is has memory of its own.
            key = height, width, steps, stack.node if stack.node in wanted else None
            new = _Group([], (height, width), tail, [], {}, [], {})
            group = groups.setdefault(key, new)
            for row in stack.rows:
                before = _made_by_graph(row, height, width)
                if before is not None and _mark(_file(row)) not in self._refused:
                    group.before[len(group.rows)] = before
                group.rows.append(row)
            group.stacks.append(stack)
            group.after.extend(each or [] for each in after)
        return list(groups.values()), left

    def _decoded(self, group: _Group) -> Tensor:
        """Return the images that the graph makes; none if it refuses one: the CPU makes all."""
        places = list(group.before)
        images = torch.empty(len(places), *group.size, 3, dtype=torch.uint8, device=self._device)
        if places:
            rows = [group.rows[place] for place in places]
            files = [_file(row) for row in rows]
            try:
                self._graph.decode(files, _table_of([row.head for row in rows]), images)
            except DecodeError as error:
                if error.sample is not None:
                    self._refused.add(_mark(files[error.sample]))
                host, again = self._host, zip(places, rows, strict=True)
                host.wait(host.start(host.images(again, group.others)))
                group.before.clear()
                images = images[:0]
        return images

    def _made(self, group: _Group, images: Tensor) -> Iterator[tuple[Node, Tensor]]:
        """Yield the stacks of ``group``; ``images``: those that the graph made."""
        count, others = len(group.rows), sorted(group.others)
        do(images, list(group.before.values()))
        if others:
            whole = images.new_empty(count, *group.size, 3)
            rest = upload(torch.stack([group.others[k] for k in others]), self._device)
            for places, some in ((list(group.before), images), (others, rest)):
                whole.index_copy_(0, upload(np.array(places, np.int64), self._device), some)
            images = whole
        out = torch.empty((count, 3, *group.size), dtype=group.tail.dtype, device=self._device)
        group.tail(images.permute(0, 3, 1, 2), out)
        do(out, group.after)
        begin = 0
        for stack in group.stacks:
            end = begin + len(stack.rows)
            yield stack.node, out[begin:end]
            begin = end

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cpu:
            return value
        # An expanded tensor cannot be pinned.
        dense = value if value.is_contiguous() else value.clone()
        return upload(dense, self._device).as_subclass(type(value))  # pinned, it is a plain tensor


def made_on_device(batch: RecordedBatch) -> list[bool]:
    """Return for each step of ``batch``, by number, whether the device makes it, or the CPU."""
    nodes = unpack(batch)
    wanted = [nodes[number] for number in wanted_of(batch.rest)]
    found: dict[Node, bool] = {}
    for stack in plan(wanted)[0]:
        _, height, width = stack.node.inputs[0].what.shape
        on_device = all(float_steps(row) is not None for row in stack.rows)
        for row in stack.rows:
            image = on_device and _made_by_graph(row, height, width) is not None
            found.update(dict.fromkeys(ordered([row.last]), on_device))
            found.update(dict.fromkeys(ordered([row.image]), image))
        found[stack.node] = on_device
    after = {node for node, on_device in found.items() if on_device and node.op == "torch.stack"}
    for node in nodes:
        if not after.isdisjoint(node.inputs):
            after.add(node)
    return [node in after or found.get(node, False) for node in nodes]


def _made_by_graph(row: Row, height: int, width: int) -> list[Step] | None:
    """Return the steps of ``row`` before the last pass; None: the CPU makes its bytes."""
    steps = bytes_steps(row, height, width)
    return steps if steps is not None and is_common(_file(row)) else None


def _file(row: Row) -> Any:
    return row.head.source.args[0]  # type: ignore[union-attr]


def _table_of(heads: Sequence[Any]) -> Array:
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
