"""What of a recorded batch can be made in bulk: first steps, steps between, last pass, stack.

    open ─> crop ─> resize ─> flip ─> colour, warps, ... ─> to_tensor ─> normalize ─> torch.stack
    └────────── Head ───────────┘     └─ Row.steps ─┘     └──── Stack.tail ─────┘   └ Stack.node

Whatever is not recognised is left to the recorded functions themselves, which are always right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dataloaders.recording.program import Image, Input, Node, ordered, stacks
from dataloaders.recording.tail import is_pointwise, step_of

from .pointwise import Pointwise

Box = tuple[int, int, int, int]
"""left, upper, right, lower, as Pillow has them."""

TURNS = {0: (True, False), 1: (False, True), 3: (True, True)}  # Pillow's Transpose
_FLIPS = {
    "hflip": (True, False),
    "horizontal_flip": (True, False),
    "vflip": (False, True),
    "vertical_flip": (False, True),
}
_SAME = ("pil_to_tensor", "as_subclass", "v2.to_dtype")
"""Steps that make bytes of bytes, the same ones."""

_MOST_IN_A_SAMPLE = 4
"""Files; a step that takes more of them, such as torch.cat, is one of collation."""

_CROP = ("top", "left", "height", "width")
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "crop": _CROP,
    "pil.crop": ("box",),
    "pil.resize": ("size", "resample", "box", "reducing_gap"),
    "v2.resize": ("size", "interpolation", "max_size", "antialias"),
    "resized_crop": (*_CROP, "size", "interpolation", "antialias"),
}


@dataclass(slots=True)
class Head:
    """The first steps of an image: a window of a file, resized, cropped, flipped.

    Attributes:
        node: the last of these steps.
        source: the file's step, "open" or "decode".
        window: what of the file is needed.
        size: (width, height) that the window is resized to; None: as it is.
        by: the filter, as Pillow numbers it.
        by_pillow: whether Pillow resizes it; else torch does, antialiased.
        crop: what is cut out of the resized window; None: all.
        flips: whether left and right, and top and bottom, are exchanged.
    """

    node: Node
    source: Node
    window: Box
    size: tuple[int, int] | None = None
    by: int = 2
    by_pillow: bool = False
    crop: Box | None = None
    flips: tuple[bool, bool] = (False, False)


class Row(NamedTuple):
    """One image of a stack.

    Attributes:
        image: the step that makes its bytes.
        head: the first steps, if ``image`` is one chain from them.
        steps: those from ``head`` to ``image``.
        last: what is stacked.
        done: the last of the stack's tail; ``last`` if nothing follows it.
    """

    image: Node
    head: Head | None
    steps: list[Node]
    last: Node
    done: Node


class Stack(NamedTuple):
    """Images that become one tensor; ``tail``: the steps from bytes to ``done``, alike in all."""

    node: Node
    rows: list[Row]
    tail: list[Node]

    def pointwise(self) -> Pointwise:
        """Return what does ``tail``."""
        return Pointwise([step_of(node) for node in self.tail], 3)


def plan(wanted: Iterable[Node]) -> tuple[list[Stack], list[Node]]:
    """Return the stacks to make in bulk, and steps of other samples, each apart from the others."""
    stacks: list[Stack] = []
    apart: list[Node] = []
    pending, seen = list(wanted), set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        stack = _stack(node)
        if stack is not None:
            stacks.append(stack)
        elif _is_of_samples(node):
            pending.extend(node.inputs)
        elif node.op != "tensor":
            apart.append(node)
    return stacks, apart


def _is_of_samples(node: Node) -> bool:
    """Whether ``node`` takes several samples, which are made at the same time."""
    needed = ordered([node])
    files = sum(not each.inputs and each.op != "tensor" for each in needed)
    return files > _MOST_IN_A_SAMPLE or any(each.op == "torch.stack" for each in needed)


def heads_of(node: Node) -> list[Head]:
    """Return what can be decoded in bulk of all that ``node`` needs."""
    found: list[Head] = []
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        head, _ = _chain(node)
        if head is not None:
            found.append(head)
            continue
        while len(node.inputs) == 1:
            (node,) = node.inputs
        pending.extend(node.inputs)
    return found


def arguments(step: Node, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of ``step`` by name; ``names``: those of the positional ones."""
    given = [each for each in step.args if type(each) is not Input]
    return {**dict(zip(names, given, strict=False)), **dict(step.kwargs)}


def _stack(node: Node) -> Stack | None:
    if not stacks(node):
        return None
    what = node.inputs[0].what
    paths: list[list[Node]] = []
    for each in node.inputs:
        path = [each]
        while not _is_bytes(path[-1]) or path[-1].op in _SAME:
            others = path[-1].inputs[1:]  # such as the values of an erased box
            if not path[-1].inputs or path[-1].uses > 1 or any(one.inputs for one in others):
                return None
            path.append(path[-1].inputs[0])
        paths.append(path[::-1])
    tail: list[Node] = []  # what all begin with
    for steps in zip(*(path[1:] for path in paths), strict=False):
        if not all(is_pointwise(each) and step_of(each) == step_of(steps[0]) for each in steps):
            break
        tail.append(steps[0])
    rows = [Row(path[0], *_chain(path[0]), path[-1], path[len(tail)]) for path in paths]
    if any(row.last.what != what or row.done.what[:2] != what[:2] for row in rows):
        return None
    return Stack(node, rows, tail)


def _is_bytes(node: Node) -> bool:
    what = node.what
    if isinstance(what, Image):
        return what.mode == "RGB"
    return what.dtype is torch.uint8 and len(what.shape) == 3 and what.shape[0] == 3


def _chain(image: Node) -> tuple[Head | None, list[Node]]:
    """Return the first steps of ``image`` and the others, if it is one chain from a file."""
    path = [image]
    while len(path[-1].inputs) == 1:
        path.append(path[-1].inputs[0])
    source = path.pop()
    if source.op not in ("open", "decode"):
        return None, []
    if source.op == "open" and source.args[1] != "JPEG":
        return None, []
    what = source.what
    width, height = what.size if isinstance(what, Image) else what.shape[:0:-1]
    head = Head(source, source, (0, 0, width, height))
    while path:
        # What others need too is made once, but for the file: a window for each is less work.
        before = path[-1].inputs[0]
        shared = before.uses > 1 and before is not source and before.op != "pil.convert"
        if shared or not _is_bytes(path[-1]) or not _added(head, path[-1]):
            break
        head.node = path.pop()
    return (head, path[::-1]) if _is_bytes(head.node) else (None, [])


def _added(head: Head, step: Node) -> bool:
    """Add ``step`` to ``head``, if that can be."""
    if step.op in _SAME:
        return True
    if step.op == "pil.convert":
        return step.args == ("RGB",)
    home, _, name = step.op.rpartition(".")
    turned = _FLIPS.get(name)
    if step.op == "pil.transpose":
        turned = TURNS.get(int(step.args[0]))
    if turned is not None:
        head.flips = (head.flips[0] ^ turned[0], head.flips[1] ^ turned[1])
        return True
    names = _ARGUMENTS.get(step.op) or (_ARGUMENTS.get(name) if home in ("v1t", "v2") else None)
    if names is None or head.flips != (False, False):
        return False
    given = arguments(step, names)
    resized = _resized(step, given) if "size" in names else None
    if "size" in names and (resized is None or head.size is not None):
        return False
    box = given.get("box") if step.op == "pil.crop" else None
    if "top" in names:
        top, left, height, width = (given[each] for each in _CROP)
        box = (left, top, left + width, top + height)
    if box is not None and not _cut(head, box):
        return False
    if resized is not None:
        head.size, head.by = resized
        head.by_pillow = isinstance(step.what, Image)
    return box is not None or resized is not None


def _cut(head: Head, box: Any) -> bool:
    left, upper, right, lower = head.crop or (0, 0, *head.size) if head.size else head.window
    if any(int(side) != side for side in box):
        return False
    x0, y0, x1, y1 = (int(side) for side in box)
    if not (0 <= x0 < x1 <= right - left and 0 <= y0 < y1 <= lower - upper):
        return False
    box = (left + x0, upper + y0, left + x1, upper + y1)
    if head.size is None:
        head.window = box
    else:
        head.crop = box
    return True


def _resized(step: Node, given: dict[str, Any]) -> tuple[tuple[int, int], int] | None:
    """Return the size that comes out and the filter; None if it is another sort of resize."""
    if isinstance(step.what, Image):
        by = given.get("resample")
        plain = given.get("box") is None and given.get("reducing_gap") is None
        return (step.what.size, 3 if by is None else int(by)) if plain else None
    name = given.get("interpolation", "bilinear")
    number = {"bilinear": 2, "bicubic": 3}.get(str(getattr(name, "value", name)))
    if number is None or given.get("antialias") is not True:
        return None
    return (step.what.shape[2], step.what.shape[1]), number
