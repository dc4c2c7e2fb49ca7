"""What is written down while a dataset runs on stand-ins, and how a batch of it travels.

    Node        one step: an operation, the steps that it takes, arguments, what comes out
    pack()      a collated batch with stand-ins ──> RecordedBatch: one blob of bytes, builtins
    unpack()    RecordedBatch ──> nodes

Steps without inputs are sources, whose first argument is a byte string; in a RecordedBatch it is a
slot, the number of that byte string:

    open(bytes, format)                         an encoded file, as Pillow opens it
    decode(bytes, function, *args)              an encoded file, as ``torch.ops.image`` decodes it
    array(bytes, shape)                         pixels in uint8, as ``Image.fromarray`` takes them
    tensor(bytes, shape, dtype, flavour, strides)   a dense tensor

Other operations:

    pil.crop, pil.resize, ...                   methods of Pillow's Image
    enhance.Color, imageops.equalize, ...       ``ImageEnhance.Color(image).enhance(x)``, ImageOps
    fpil.adjust_hue, ...                        torchvision's ``_functional_pil``
    to_tensor, pil_to_tensor, to_pil_image      torchvision's ``functional``
    v1t.normalize, ...                          torchvision's ``_functional_tensor``
    v2.normalize, ...                           torchvision's ``v2.functional``, by flavour
    torch.stack, tensor.__add__, ...            a function of ``torch``, a method of ``Tensor``

The first input comes before the arguments, further ones stand among them as `Input`; of ``torch.``
and ``tensor.`` operations all of them do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch

from dataloaders.batches.tree import map_children


class Image(NamedTuple):
    """An image of Pillow's: mode and (width, height)."""

    mode: str
    size: tuple[int, int]


class Tensor(NamedTuple):
    """A tensor; ``flavour`` is the name of its class in ``torchvision.tv_tensors``, or "Tensor"."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    flavour: str = "Tensor"


class Input(NamedTuple):
    """Stands among arguments for the input with this number."""

    number: int


class Ref(NamedTuple):
    """Stands in a batch for what the step with this number makes."""

    number: int


class Node:
    """One recorded step, compared by identity; only its last two fields change later.

    Attributes:
        op: the operation.
        inputs: the steps that it takes.
        args: its arguments.
        kwargs: its keyword arguments.
        what: what comes out, an `Image` or a `Tensor`.
        uses: how many steps take this one.
        value: what it made, if that was needed while recording.
    """

    __slots__ = ("args", "inputs", "kwargs", "op", "uses", "value", "what")

    def __init__(
        self,
        op: str,
        inputs: tuple[Node, ...],
        args: tuple[Any, ...],
        kwargs: tuple[tuple[str, Any], ...],
        what: Any,
    ) -> None:
        self.op, self.inputs, self.args, self.kwargs, self.what = op, inputs, args, kwargs, what
        self.uses, self.value = 0, None  # type: int, Any
        for node in inputs:
            node.uses += 1


def stacks(node: Node) -> bool:
    """Whether ``node`` stacks all of its inputs, in their order, along a new first dimension."""
    first, *others = (*node.args, *dict(node.kwargs).values(), None)
    order = [Input(number) for number in range(len(node.inputs))]
    return node.op == "torch.stack" and list(first) == order and others in ([None], [0, None])


class Again(NamedTuple):
    """What it takes to ask the dataset for a batch again, for real.

    Attributes:
        keys: what the loader's sampler yielded; None for an iterable dataset.
        states: of torch's, NumPy's and ``random``'s generators before the batch.
    """

    keys: Any
    states: tuple[Any, Any, Any]


_Row: TypeAlias = tuple[str, tuple[int, ...], tuple[Any, ...], tuple[tuple[str, Any], ...], Any]


class RecordedBatch(NamedTuple):
    """A batch as a worker sends it.

    Attributes:
        files: uint8 [bytes], all byte strings one after the other, and perhaps unused bytes.
        offsets: begin and end of each slot.
        program: for each step the operation, the numbers of its inputs, arguments, what comes out.
        rest: what the user's collate_fn returned, with a `Ref` for each stand-in.
    """

    files: torch.Tensor
    offsets: list[tuple[int, int]]
    program: list[_Row]
    rest: Any
    again: Again | None


def ordered(wanted: Iterable[Node], found: dict[Node, int] | None = None) -> dict[Node, int]:
    """Return ``wanted`` and all that they need, each once with its number, inputs first.

    Args:
        wanted: steps.
        found: steps that have numbers already; the new ones are added.
    """
    found = {} if found is None else found
    pending = [(node, False) for node in wanted]
    while pending:
        node, ready = pending.pop()
        if ready:
            found.setdefault(node, len(found))
        elif node not in found:
            pending.append((node, True))
            pending.extend((each, False) for each in reversed(node.inputs))
    return found


def is_image(value: Any) -> bool:
    """Whether ``value`` is one of Pillow's images, or a stand-in; Pillow is not imported."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``batch`` with ``function`` applied to whatever `map_children` does not look into."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    made = map_children(batch, lambda child: mapped(child, function))
    return function(batch) if made is batch else made


def pack(
    batch: Any,
    sent: Callable[[Any], Any],
    again: Again | None,
    empty: Callable[[int], torch.Tensor],
) -> Any:
    """Return ``batch`` as a `RecordedBatch`, or as it is if there is no stand-in in it.

    Args:
        batch: what the user's collate_fn returned.
        sent: returns the step of a stand-in; what is to be sent for anything else.
        again: see `Again`.
        empty: returns uint8 memory of so many bytes.
    """
    numbers: dict[Node, int] = {}
    changed = False

    def replaced(value: Any) -> Any:
        nonlocal changed
        found = sent(value)
        changed |= found is not value
        return Ref(ordered([found], numbers)[found]) if isinstance(found, Node) else found

    rest = mapped(batch, replaced)
    if not numbers:
        return rest if changed else batch
    files: dict[int, Any] = {}
    slots: dict[int, int] = {}
    rows: list[_Row] = []
    for node in numbers:
        args = node.args
        if not node.inputs:
            slot = slots.setdefault(id(args[0]), len(slots))
            files[slot] = args[0]
            args = (slot, *args[1:])
        inputs = tuple([numbers[each] for each in node.inputs])
        rows.append((node.op, inputs, args, node.kwargs, tuple(node.what)))
    offsets, end = [], 0
    for data in files.values():
        offsets.append((end, end + len(data)))
        end += len(data)
    blob = empty(end)
    if end:
        memory = memoryview(blob.numpy())  # type: ignore[arg-type]
        for (begin, stop), data in zip(offsets, files.values(), strict=True):
            memory[begin:stop] = data
    return RecordedBatch(blob, offsets, rows, rest, again)


def unpack(batch: RecordedBatch) -> list[Node]:
    """Return the steps of ``batch``, by number; byte strings are views of ``files``."""
    memory = memoryview(batch.files.numpy())  # type: ignore[arg-type]
    nodes: list[Node] = []
    for op, inputs, args, kwargs, what in batch.program:
        if not inputs:
            begin, end = batch.offsets[args[0]]
            args = (memory[begin:end], *args[1:])
        made = Image(*what) if isinstance(what[0], str) else Tensor(*what)
        nodes.append(Node(op, tuple([nodes[each] for each in inputs]), args, kwargs, made))
    return nodes


def wanted_of(rest: Any) -> list[int]:
    """Return the numbers of the steps that a batch refers to, each once."""
    found: dict[int, None] = {}
    _put_back(rest, found.setdefault)
    return list(found)


def filled(batch: RecordedBatch, make: Callable[[list[Node]], list[Any]]) -> Any:
    """Return the batch, given a function that returns what the steps make that it refers to."""
    nodes, numbers = unpack(batch), wanted_of(batch.rest)
    values = make([nodes[number] for number in numbers])
    return _put_back(batch.rest, dict(zip(numbers, values, strict=True)).__getitem__)


def _put_back(rest: Any, value_of: Callable[[int], Any]) -> Any:
    """Return ``rest`` with each `Ref` replaced by ``value_of`` its number."""
    if type(rest) is Ref:
        return value_of(rest.number)
    return map_children(rest, lambda child: _put_back(child, value_of))
