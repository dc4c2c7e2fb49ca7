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
from typing import Any, TypeAlias, cast

from dataloaders.transforms.actions import Fixed, Primitive
from dataloaders.transforms.kernels.kernel import Form
from dataloaders.transforms.kinds import torchvision_name
from dataloaders.transforms.operators import Chain, chain_of
from dataloaders.transforms.primitives.convert import Converted
from dataloaders.transforms.read import Member
from dataloaders.transforms.trailing import arithmetic_of, trailing

from .nodes import Node, node_for
from .sorts import NotServed, Sort, behind, looks_at_types

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
        forms: what each primitive is given; see `Sort`.
        by_type: whether the class of a tensor matters to one of them.
        wraps: whether the first one is given tensors of torchvision's ``tv_tensors.Image``.
    """

    primitives: tuple[Primitive, ...]
    places: tuple[int, ...]
    members: tuple[Member, ...]
    forms: tuple[str, ...]
    by_type: bool = False
    wraps: bool = False

    @property
    def form(self) -> str:
        """What the first one is given."""
        return self.forms[0]


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
        form: what an image is in the end: "bytes", "ints" or "floats".
        wraps: whether it is a torchvision ``tv_tensors.Image`` in the end; None: some are.
    """

    chain: Chain
    graph: InGraph
    parts: tuple[Part, ...]
    form: str
    wraps: bool | None


@dataclass(frozen=True)
class _Place:
    """One primitive of the chain: its number, whose it is, what it is given and makes.

    ``alone``: it is all that its member does. ``few``: it is one of many, of which each image takes
    a few.
    """

    number: int
    primitive: Primitive
    member: Member
    before: Sort
    after: Sort
    alone: bool
    few: bool

    @property
    def form(self) -> str:
        """What it is given."""
        return self.before.form

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
        places = list(_places(chain, Sort(cast(Form, form), wraps)))
    except _Obstacle as obstacle:
        return str(obstacle)
    last = places[-1].after if places else Sort(cast(Form, form), wraps)
    if last.form == "pil":
        return (
            "the chain of transforms ends in a PIL image, of which no batch can be made; end it "
            "in ToTensor(), or in ToImage() of torchvision.transforms.v2"
        )
    graph = _graph(places, device, fast)
    done = set(graph.places)
    begin = graph.places[-1] + 1 if done else 0
    return Work(chain, graph, tuple(_parts(places[begin:])), last.form, last.wraps)


def _places(chain: Chain, sort: Sort) -> Iterator[_Place]:
    number = 0
    for member, operator in zip(chain.members, chain.operators, strict=True):
        alone = isinstance(operator, Fixed) and len(operator.primitives) == 1
        for primitive in operator.primitives:
            try:
                after = behind(primitive, sort)
            except NotServed as error:
                raise _Obstacle(f"{member}: {error}") from None
            if after.form != sort.form and not alone:
                raise _Obstacle(
                    f"{member} makes tensors of some images and not of others; put "
                    f"{_called(primitive)} behind it"
                )
            if after != sort and not alone:
                after = after._replace(wraps=None)
            yield _Place(number, primitive, member, sort, after, alone, operator.few)
            sort = after
            number += 1


def _graph(places: Sequence[_Place], device: str, fast: Collection[str]) -> InGraph:
    nodes: list[Node] = []
    taken: list[_Place] = []
    why = None
    for place in places:
        if _is_nothing(place):
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
    if all(map(_is_nothing, places)):
        return
    by_type = any(p.form != "pil" and looks_at_types(p.primitive) for p in places)
    kept = [p for p in places if by_type or p.form != "bytes" or not _is_nothing(p)]
    yield Behind(
        tuple(place.primitive for place in kept),
        tuple(place.number for place in kept),
        _members(kept),
        tuple(place.form for place in kept),
        by_type,
        by_type and bool(kept[0].before.wraps),
    )


def _is_nothing(place: _Place) -> bool:
    return place.converts and _changes_no_value(place)


def _changes_no_value(place: _Place) -> bool:
    primitive = place.primitive
    return isinstance(primitive, Converted) and (
        torchvision_name(primitive.transform) in _NO_VALUES
    )


def _members(places: Sequence[_Place]) -> tuple[Member, ...]:
    return tuple({id(place.member): place.member for place in places}.values())


def _called(primitive: Primitive) -> str:
    return str(getattr(primitive, "name", type(primitive).__name__))
