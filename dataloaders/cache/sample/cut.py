"""A dataset's transforms, cut in two: the head gives the rows of a cache, the tail stays live.

    transform   Resize, CenterCrop │ RandomCrop, ToTensor, Normalize
    a copy      Head ──> the row's leaf       at sample[0], found by being the very object
    the reader  the leaf ──> Run ──> what the dataset itself would have given

The cut is before the first member that draws random numbers or is a user's own code. If what is
before it ends in a run that makes floats of bytes (ToTensor, ConvertImageDtype, ToDtype, then
Normalize), it is before that run: a row then takes a quarter of the room.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Subset

from dataloaders.cache.sample.sample import Path, Tail
from dataloaders.errors import CacheError
from dataloaders.transforms.find import Found, NotCopyable, copied, find_chains
from dataloaders.transforms.read import CONVERTERS, Kind, Member, Run, trailing

Call: TypeAlias = tuple[int, Path]
"""Which head made a part of the sample, and where that part is."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_ORIENTATION = 0x0112
_DEEPEST = 64
_LONGEST = 1000  # characters of a transform as text


class Head(Run):
    """Replace a chain, in a copy of the dataset, by its members before the cut.

    Args:
        number: of this head among those of the dataset.
        made: shared by all heads of a dataset: (number, what it made) of each call.
        opaque: the tail's member that might read what a cache does not keep of a PIL image.
    """

    def __init__(
        self,
        transforms: Sequence[Any],
        number: int,
        made: list[tuple[int, Any]],
        opaque: str | None,
    ) -> None:
        super().__init__(transforms)
        self._number = number
        self._made = made
        self._opaque = opaque

    def __call__(self, *values: Any) -> Any:
        """Apply the members before the cut.

        Raises:
            CacheError: the chain was called with several values, or with an image whose EXIF
                matters to a user's own code in the tail.
        """
        if len(values) != 1:
            raise CacheError(f"the transform is called with {len(values)} values, not with one")
        value = super().__call__(values[0])
        if self._opaque is not None and _has_more_than_pixels(value):
            raise CacheError(
                f"the image has an EXIF orientation or a transparent colour, which a cache does "
                f"not keep and {self._opaque} might read; apply it where the dataset loads the "
                "image (ImageFolder(loader=...)), for instance with PIL.ImageOps.exif_transpose"
            )
        if any(other is value for _, other in self._made):
            value = copy.copy(value)  # two views of one image: the place of each is known
        self._made.append((self._number, value))
        return value


@dataclass(frozen=True)
class Cut:
    """One way to split what a dataset does.

    Attributes:
        dataset: gives the rows: a copy whose chains are `Head`s, or the user's own.
        tails: what is left of each chain that was cut, by the number of its head.
        made: where the heads put what they made; emptied before each sample.
        head: the members that the rows went through, as text.
        tail: the members that stay live, as text.
        name: of the class of the user's dataset, for messages.
    """

    dataset: Any
    tails: tuple[Run, ...]
    made: list[tuple[int, Any]]
    head: tuple[str, ...]
    tail: tuple[str, ...]
    name: str = ""

    def read(self, index: int, calls: Sequence[Call] | None = None) -> Any:
        """Return row ``index``, after checking that it went through ``calls``.

        Raises:
            CacheError: this sample went through the transforms in another way.
        """
        self.made.clear()
        row = sample_of(self.dataset, index)
        if calls is not None and self.calls_in(row) != tuple(calls):
            raise CacheError(
                "it goes through the dataset's transforms in another way than the first samples "
                f"did ({len(self.made)} calls, {len(calls)} for those; or what they make is "
                "elsewhere in the sample); take the random transform out of the dataset, and apply "
                "it to the samples of the cache"
            )
        return row

    def tails_of(self, calls: Sequence[Call]) -> list[Tail]:
        """Return what makes samples of rows that went through ``calls``."""
        return [(path, self.tails[number]) for number, path in calls]

    def calls_in(self, row: Any) -> tuple[Call, ...] | str:
        """Return where the heads' results are in the ``row`` just read, or why that is unclear."""
        calls = []
        for number, part in self.made:
            places = list(_places(row, part))
            if len(places) != 1:
                how = "stands more than once" if places else "is nowhere"
                return f"what the transform gives {how} in the sample as it is"
            calls.append((number, places[0]))
        paths = [path for _, path in calls]
        for one in paths:
            if sum(path[: len(one)] == one for path in paths) > 1:
                return "what the transform gives is used by the transform again"
        return tuple(calls)


def sample_of(dataset: Any, index: int) -> Any:
    """Return sample ``index`` as torch's loader gets it, which prefers ``__getitems__``."""
    many = getattr(dataset, "__getitems__", None)
    return dataset[index] if many is None else many([index])[0]


def _name_of(dataset: Any) -> str:
    """Return the name of the class of the user's dataset, of which there may be a Subset."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return type(dataset).__name__


def whole(dataset: Any) -> Cut:
    """Return the cut that keeps whole samples of ``dataset``, and has no tail."""
    chains = find_chains(dataset)
    head = _texts([(found, found.members) for found in chains])
    return Cut(dataset, (), [], head, (), _name_of(dataset))


def cut_of(dataset: Any, *, images: bool = False) -> tuple[Cut | None, str]:
    """Return the cut of ``dataset`` that keeps least, or None and why there is none but `whole`.

    With ``images`` it is before PILToTensor and ToImage, since PIL images are to be kept. Nothing
    is read: whether a cut dataset gives what it should is for `study` to find out.
    """
    chains = find_chains(dataset)
    if not chains:
        return None, "it holds no torchvision transform that could be cut"
    ends = [_end(found.members, images) for found in chains]
    if ends == [len(found.members) for found in chains]:
        return None, "all of its transforms are deterministic"
    try:
        return cut_at(dataset, chains, ends), ""
    except NotCopyable as error:
        return None, str(error)
    except Exception as error:  # a user's own classes on the way
        return None, f"it could not be copied ({type(error).__name__}: {error})"


def _end(members: Sequence[Member], images: bool) -> int:
    """Return how many members are before the cut.

    Those before the first one that is random or a user's own, without a run at their end that makes
    floats; and, for ``images``, without what makes tensors of PIL images in front of that.
    """
    most = next(
        (n for n, member in enumerate(members) if member.kind is not Kind.DETERMINISTIC),
        len(members),
    )
    end = most - len(trailing(members[:most]))
    while end < most and members[end].torchvision in CONVERTERS:
        end += 1
    while images and end and members[end - 1].torchvision in CONVERTERS:
        end -= 1
    return end


def cut_at(
    dataset: Any,
    chains: list[Found],
    ends: Sequence[int],
    head_of: Callable[[Any, int, list[tuple[int, Any]]], Any] | None = None,
) -> Cut:
    """Return the cut of these chains after the given number of members each.

    Args:
        dataset: the user's.
        chains: those in it.
        ends: how many members of each are before the cut.
        head_of: what stands for a chain, from it, its number and `Cut.made`; None: a `Head`.
    """
    made: list[tuple[int, Any]] = []
    tails: list[Run] = []
    states: list[bytes | None] = []
    heads: dict[int, Any] = {}
    before: list[tuple[Found, Sequence[Member]]] = []
    after: list[tuple[Found, Sequence[Member]]] = []
    for found, end in zip(chains, ends, strict=True):
        before.append((found, found.members[:end]))
        if end == len(found.members):
            continue
        first, rest = found.members[:end], found.members[end:]
        # Two datasets with equal transforms, each an object of its own, are one chain.
        state = equal_state([member.transform for member in found.members])
        number = states.index(state) if state is not None and state in states else len(tails)
        if number == len(tails):
            states.append(state)
            tails.append(Run([member.transform for member in rest]))
            after.append((found, rest))
        opaque = next((str(member) for member in rest if member.kind is Kind.OPAQUE), None)
        before_cut = [member.transform for member in first]
        heads[id(found.chain)] = (
            Head(before_cut, number, made, opaque)
            if head_of is None
            else head_of(found.chain, number, made)
        )
    return Cut(
        copied(dataset, heads),
        tuple(tails),
        made,
        _texts(before),
        _texts(after),
        _name_of(dataset),
    )


class _Pickler(pickle.Pickler):
    """Pickle tensors by value, without their addresses (v2.RandomResizedCrop has one)."""

    def reducer_override(self, value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor)
        return (np.asarray, (value.detach().cpu().numpy(),)) if is_tensor else NotImplemented


def equal_state(transforms: Any) -> bytes | None:
    """Return bytes that are equal for equal transforms; None where equality is unknown."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(transforms)
    except Exception:  # a lambda, an open file: anything
        return None
    return file.getvalue()


def _texts(parts: list[tuple[Found, Sequence[Member]]]) -> tuple[str, ...]:
    """Return these members as text, without addresses; of several chains also the place."""
    parts = [(found, members) for found, members in parts if members]
    lines = []
    for found, members in parts:
        where = f"{found.where}: " if len(parts) > 1 else ""
        for member in members:
            lines.append(where + _text_of(member))
    return tuple(lines)


def _text_of(member: Member) -> str:
    text = " ".join(_ADDRESS.sub("", repr(member.transform)).split())
    if member.torchvision is not None:  # which prints none of these
        for name, value in vars(member.transform).items():
            if isinstance(value, (torch.dtype, torch.Tensor, dict)) and not name.startswith("_"):
                text += f" {name}={value.tolist() if isinstance(value, torch.Tensor) else value}"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return text


def _places(value: Any, part: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths at which the very object ``part`` is in ``value``."""
    if value is part:
        yield path
        return
    if len(path) >= _DEEPEST:
        return
    if type(value) is dict:
        for key, inner in value.items():
            yield from _places(inner, part, (*path, key))
    elif isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", range(len(value)))
        for key, inner in zip(fields, value, strict=False):
            yield from _places(inner, part, (*path, key))


def _has_more_than_pixels(value: Any) -> bool:
    if not callable(getattr(value, "getexif", None)):
        return False
    if "transparency" in value.info and value.mode != "P":
        return True
    return bool(value.getexif().get(_ORIENTATION, 1) != 1)
