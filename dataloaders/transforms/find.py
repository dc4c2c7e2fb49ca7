"""Find where a dataset holds its transforms, and make a shallow copy of it that holds others.

    Subset ─dataset─> ImageFolder ─transform──> Compose
    CocoDetection ─transforms─> StandardTransform ─transform─> Compose

Searched are attributes that hold datasets (Subset, ConcatDataset, a user's own wrapper, any
object with a ``__getitem__``), callable objects of the user's own (two crops of one image), and
short lists and dicts of these. Functions, lambdas and closures cannot be searched.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from dataloaders.transforms.read import Member, is_chain, read

_DEEPEST = 8
_CONTAINERS = (list, tuple, dict)
_ARRAYS = (np.ndarray, torch.Tensor)
_MOST_NESTED = 2
_LONGEST = 64
"""Containers longer or deeper than this are data, unless they hold datasets."""


class NotCopyable(Exception):
    """This dataset must not be copied; the message says why."""


class Found(NamedTuple):
    """One chain of transforms in a dataset."""

    chain: Any  # the user's own object
    where: str  # its place, such as ``dataset.transform``
    members: tuple[Member, ...]  # what it consists of


def find_chains(dataset: Any, *, opaque: bool = False) -> list[Found]:
    """Return every chain of transforms in ``dataset``, each object once, in attribute order.

    With ``opaque``, any callable that is an attribute ``transform`` is one, too.
    """
    walked = _walk(dataset, "dataset", opaque=opaque)
    return [Found(v, where, read(v, where)) for where, v in walked if _is_leaf(v, where, opaque)]


def find_generators(dataset: Any) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return (get, set) of the state of each generator that ``dataset`` or its transforms hold."""
    found: dict[int, tuple[Callable[[], Any], Callable[[Any], Any]]] = {}
    for _, value in _walk(dataset, "dataset"):
        owners = [m.transform for m in read(value)] if is_chain(value) else [value]
        for owner in owners:
            for own in (owner, *getattr(owner, "__dict__", {}).values()):
                access = _state_access(own)
                if access is not None:
                    found[id(own)] = access
    return list(found.values())


def find_indices(dataset: Any) -> list[Any]:
    """Return the indices of each Subset in ``dataset``."""
    walked = _walk(dataset, "dataset")
    return [vars(value).get("indices") for _, value in walked if isinstance(value, Subset)]


def find_values(dataset: Any) -> list[tuple[str, Any]]:
    """Return (name, value) of each attribute that has as many entries as a dataset in ``dataset``.

    These are lists, tuples, dicts, arrays, tensors and tables; not a Subset's indices.
    """
    walked = list(_walk(dataset, "dataset"))
    indices = {id(each) for each in find_indices(dataset)}
    data = [
        (where.rpartition(".")[2], value)
        for where, value in walked
        if (
            type(value) in _CONTAINERS
            or isinstance(value, _ARRAYS)
            or hasattr(type(value), "to_numpy")
        )
        and id(value) not in indices
    ]
    is_data = {id(value) for _, value in data}
    lengths = {_length(value) for _, value in walked if id(value) not in is_data} - {None}
    return [(name, value) for name, value in data if _length(value) in lengths]


def _length(value: Any) -> int | None:
    with suppress(Exception):  # of a user's class, or it has none
        return len(value) if not isinstance(value, str) else None
    return None


def copied(dataset: Any, instead: Mapping[int, Any]) -> Any:
    """Return a shallow copy of ``dataset`` with other objects in place of some.

    Everything that leads to one of these is copied, everything else is shared; the user's objects
    are never changed.

    Args:
        dataset: the user's.
        instead: what stands in the place of objects, by their id.

    Raises:
        NotCopyable: if a class on the way has a ``__del__``, which would run for the copy too.
        TypeError: if a class on the way cannot be copied without running its own code.
    """
    made = dict(instead)

    def copy(value: Any, depth: int) -> Any:
        if id(value) in made:
            return made[id(value)]
        leads = depth <= _DEEPEST and any(id(one) in made for _, one in _walk(value, "", depth))
        if not leads:
            return value
        kind = type(value)
        if kind in (list, tuple):
            made[id(value)] = kind(copy(inner, depth + 1) for inner in value)
        elif kind is dict:
            made[id(value)] = {key: copy(inner, depth + 1) for key, inner in value.items()}
        elif hasattr(kind, "__del__"):
            raise NotCopyable(
                f"{kind.__name__} has a __del__, which would also run for the copy of it that the "
                "cut needs; release what it holds by weakref.finalize or a with block"
            )
        else:
            clone = object.__new__(kind)  # not copy.copy: a __reduce__ may drop open files
            made[id(value)] = clone  # before its attributes: one of them may lead back here
            for name, inner in vars(value).items():
                clone.__dict__[name] = copy(inner, depth + 1)
        return made[id(value)]

    return copy(dataset, 0)


def _walk(
    value: Any,
    where: str,
    depth: int = 0,
    nested: int = 0,
    seen: set[int] | None = None,
    opaque: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Yield (place, object) for ``value`` and what it holds, each once; chains are leaves."""
    seen = set() if seen is None else seen
    nested = nested + 1 if type(value) in _CONTAINERS else 0
    if id(value) in seen or depth > _DEEPEST or nested > _MOST_NESTED:
        return
    seen.add(id(value))
    yield where, value
    if _is_leaf(value, where, opaque):
        return
    for place, inner in _held(value, where, top=depth == 0):
        yield from _walk(inner, place, depth + 1, nested, seen, opaque)


def _is_leaf(value: Any, where: str, opaque: bool) -> bool:
    named = opaque and where.endswith(".transform") and not isinstance(value, Dataset)
    return (named and callable(value)) or is_chain(value)


def _held(value: Any, where: str, *, top: bool) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind in (list, tuple):
        if len(value) <= _LONGEST or isinstance(value[0], Dataset):
            for position, inner in enumerate(value):
                yield f"{where}[{position}]", inner
    elif kind is dict:
        if len(value) <= _LONGEST:
            for key, inner in value.items():
                yield f"{where}[{key!r}]", inner
    elif top or isinstance(value, Dataset) or _is_object_with(value, "__call__", "__getitem__"):
        for name, inner in getattr(value, "__dict__", {}).items():
            if name != "transforms" or not _applies_transform_alone(kind):
                yield f"{where}.{name}", inner


def _applies_transform_alone(kind: type) -> bool:
    """Return whether torchvision's own ``__getitem__`` reads ``transform`` only.

    Its ``transforms`` is then what the dataset was made with, and may be out of date.
    """
    reads = getattr(kind, "__getitem__", None)
    if not getattr(reads, "__module__", "").startswith("torchvision.datasets."):
        return False
    names = reads.__code__.co_names if isinstance(reads, FunctionType) else ()
    alone = "transform" in names and "transforms" not in names
    return alone and not hasattr(kind, "__getitems__")


def _is_object_with(value: Any, *methods: str) -> bool:
    """Return whether it is an object of a Python class with one of these methods, and no module."""
    kind = type(value)
    return (
        not isinstance(value, (type, torch.nn.Module))
        and any(name in vars(base) for base in kind.__mro__[:-1] for name in methods)
        and bool(kind.__flags__ & 1 << 9)  # a class that a class statement made
    )


def _state_access(own: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    if isinstance(own, torch.Generator):
        return own.get_state, own.set_state
    if isinstance(own, random.Random):
        return own.getstate, own.setstate
    if isinstance(own, np.random.RandomState):
        return own.get_state, own.set_state
    if isinstance(own, np.random.Generator):
        bits = own.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None
