"""A chain of transforms, cut into what DALI does, what is done behind it, and the tail.

    RandomResizedCrop  flip   │ ColorJitter        │ ToTensor  Normalize │ RandomErasing
    Crop Resize        Flip   │ Brightness Hue ..  │                     │ Erase
    ──── in the graph ─────── │ ──── behind ────── │ ──── the tail ───── │ ── behind ──

The graph takes the longest beginning that DALI can do as torchvision does it. What is behind it
keeps torchvision's own values, given the graph's pixels. Nothing is left out in silence: what
cannot be done at all is an obstacle, in words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dataloaders.transforms.actions import Fixed, Primitive
from dataloaders.transforms.kinds import torchvision_name
from dataloaders.transforms.operators import Chain, chain_of
from dataloaders.transforms.primitives.convert import Converted
from dataloaders.transforms.read import Member
from dataloaders.transforms.trailing import arithmetic_of, trailing

from .nodes import Node, node_for

__all__ = ["Behind", "InGraph", "Part", "TailRun", "Work", "work_of"]

_TO_BYTES = ("PILToTensor", "ToImage")
_NO_VALUES = (*_TO_BYTES, "ToPureTensor", "Identity")
"""They change the type of an image and no value of it: nothing has to be done for them."""


@dataclass(frozen=True)
class InGraph:
    """What DALI does.

    Attributes:
        nodes: in order.
        places: of the primitive of each node, its number in the whole chain.
        members: the transforms that are wholly or partly done by them, each once.
        why: what keeps the next primitive out; None if there is none.
    """

    nodes: tuple[Node, ...] = ()
    places: tuple[int, ...] = ()
    members: tuple[Member, ...] = ()
    why: str | None = None


@dataclass(frozen=True)
class Behind:
    """What is done behind the graph, image by image, as torchvision does it.

    Attributes:
        primitives: in order.
        places: of each primitive, its number in the whole chain.
        members: the transforms that are wholly or partly done by them, each once.
        form: what the first one is given: "pil", "bytes" or "floats".
    """

    primitives: tuple[Primitive, ...]
    places: tuple[int, ...]
    members: tuple[Member, ...]
    form: str


@dataclass(frozen=True)
class TailRun:
    """Members that make floats of bytes one by one: done to a whole batch."""

    members: tuple[Member, ...]


Part: TypeAlias = "Behind | TailRun"


@dataclass(frozen=True)
class Work:
    """How the images of one chain are made.

    Attributes:
        chain: as it was read.
        graph: what DALI does.
        parts: what follows, in order.
        form: what an image is in the end, "bytes" or "floats".
        wraps: whether it is a torchvision ``tv_tensors.Image`` in the end.
    """

    chain: Chain
    graph: InGraph
    parts: tuple[Part, ...]
    form: str
    wraps: bool


@dataclass(frozen=True)
class _Place:
    """One primitive of the chain: its number, whose it is, what it is given and makes.

    ``alone``: it is all that its member does. ``few``: it is one of many, of which each image takes
    a few.
    """

    number: int
    primitive: Primitive
    member: Member
    form: str
    after: str
    alone: bool
    few: bool

    @property
    def converts(self) -> bool:
        """Whether it is a member by itself that has one result for one value."""
        return self.alone and isinstance(self.primitive, Converted)


class _Obstacle(Exception):
    pass


def work_of(
    transform: Any,
    *,
    form: str,
    device: str,
    fast: Collection[str] = (),
    wraps: bool = False,
    where: str = "transform",
) -> Work | str:
    """How ``transform`` is done with DALI; or why it cannot be, and what to do.

    Args:
        transform: the dataset's chain, or None.
        form: what the dataset gives to it: "pil", or "bytes" for uint8 tensors [C, H, W].
        device: where DALI works, "cpu" or "cuda".
        fast: as `Dali.fast`.
        wraps: whether those tensors are torchvision's ``tv_tensors.Image``.
        where: what ``transform`` is called in messages.
    """
    chain = chain_of(transform, where)
    if chain.rest:
        member = chain.rest[0]
        called = " ".join(repr(member.transform).split())[:60]
        return (
            f"dali cannot run {called} at {member.where}: {chain.why}; replace it by transforms "
            "that docs/transforms.md lists, move it into the training step, or use "
            "backend='prefetch'"
        )
    try:
        places = list(_places(chain, form))
    except _Obstacle as obstacle:
        return str(obstacle)
    last = places[-1].after if places else form
    if last == "pil":
        return (
            "the chain of transforms ends in a PIL image, of which no batch can be made; end it "
            "in ToTensor(), or in ToImage() of torchvision.transforms.v2"
        )
    graph = _graph(places, device, fast)
    done = set(graph.places)
    begin = graph.places[-1] + 1 if done else 0
    return Work(chain, graph, tuple(_parts(places[begin:])), last, _wraps(places, wraps))


def _places(chain: Chain, form: str) -> Iterator[_Place]:
    number = 0
    for member, operator in zip(chain.members, chain.operators, strict=True):
        alone = isinstance(operator, Fixed) and len(operator.primitives) == 1
        for primitive in operator.primitives:
            after = _after(primitive, form)
            if after != form and not alone:
                raise _Obstacle(
                    f"{member} makes tensors of some images and not of others; put "
                    f"{_called(primitive)} behind it"
                )
            yield _Place(number, primitive, member, form, after, alone, operator.few)
            form = after
            number += 1


def _after(primitive: Primitive, form: str) -> str:
    """What an image is behind ``primitive``."""
    if not isinstance(primitive, Converted):
        return form
    name = torchvision_name(primitive.transform)
    if form == "pil":
        return {"ToTensor": "floats"}.get(name or "", "bytes" if name in _TO_BYTES else form)
    if name in ("ConvertImageDtype", "ToDtype"):
        dtype = getattr(primitive.transform, "dtype", None)
        if isinstance(dtype, torch.dtype):
            return "floats" if dtype.is_floating_point else "bytes"
    return form


def _graph(places: Sequence[_Place], device: str, fast: Collection[str]) -> InGraph:
    nodes: list[Node] = []
    taken: list[_Place] = []
    why = None
    for place in places:
        if place.converts and _changes_no_value(place):
            continue
        if place.form not in ("pil", "bytes") or place.converts:
            break
        if place.few and device == "cuda":
            why = (
                f"of the steps of {place.member.name} each image takes a few, and a graph would "
                "put every image through all of them"
            )
            break
        node = node_for(place.primitive, form=place.form, device=device, fast=fast)
        if isinstance(node, str):
            why = node
            break
        nodes.append(node)
        taken.append(place)
    return InGraph(tuple(nodes), tuple(place.number for place in taken), _members(taken), why)


def _parts(places: Sequence[_Place]) -> Iterator[Part]:
    pending: list[_Place] = []
    position = 0
    while position < len(places):
        end = position
        while end < len(places) and places[end].converts:
            end += 1
        run = _tail(places[position:end])
        if not run:
            pending.append(places[position])
            position += 1
            continue
        before = end - len(run)
        pending += places[position:before]
        yield from _behind(pending)
        pending = []
        yield TailRun(tuple(place.member for place in run))
        position = end
    yield from _behind(pending)


def _tail(places: Sequence[_Place]) -> Sequence[_Place]:
    """The last of ``places``, if they are a tail; else none."""
    run = trailing([place.member for place in places])
    if isinstance(run, str):
        return ()
    found = places[len(places) - len(run) :]
    arithmetic = arithmetic_of(run)
    first = next(place for place in found if place.member.transform is arithmetic[0])
    # ToTensor scales a PIL image; of a tensor, v1's raises and v2's makes nothing.
    from_image = torchvision_name(arithmetic[0]) == "ToTensor"
    return found if first.form == ("pil" if from_image else "bytes") else ()


def _behind(places: Sequence[_Place]) -> Iterator[Behind]:
    kept = [p for p in places if not (p.converts and _changes_no_value(p) and p.form == "bytes")]
    if all(place.converts and _changes_no_value(place) for place in kept):
        return
    numbers = tuple(place.number for place in kept)
    yield Behind(tuple(p.primitive for p in kept), numbers, _members(kept), kept[0].form)


def _changes_no_value(place: _Place) -> bool:
    primitive = place.primitive
    return isinstance(primitive, Converted) and (
        torchvision_name(primitive.transform) in _NO_VALUES
    )


def _members(places: Sequence[_Place]) -> tuple[Member, ...]:
    return tuple({id(place.member): place.member for place in places}.values())


def _wraps(places: Sequence[_Place], wraps: bool) -> bool:
    for place in places:
        name = torchvision_name(getattr(place.primitive, "transform", None))
        if name == "ToImage":
            wraps = True
        elif name == "ToPureTensor":
            wraps = False
    return wraps


def _called(primitive: Primitive) -> str:
    return str(getattr(primitive, "name", type(primitive).__name__))
