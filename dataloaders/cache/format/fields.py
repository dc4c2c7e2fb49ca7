"""Decode untrusted JSON as dataclasses are annotated, or raise Malformed.

bytes ──loads──> values, not too deep ──typed──> a dataclass, each field of its type and range
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from itertools import repeat
from typing import Any, Union, get_args, get_origin, get_type_hints

from dataloaders.cache.printable import shown

LARGEST = 1 << 48  # rows, values, bytes: no disk has more, and no product of two overflows
_DEEPEST = 300  # lists and objects in each other; a structure that is allowed has four a level


class Malformed(Exception):
    """What is wrong with a field; the caller adds the name of the file."""


def require(holds: object, otherwise: str) -> None:
    """Raise Malformed, with the message ``otherwise``, unless it ``holds``."""
    if not holds:
        raise Malformed(otherwise)


def loads(text: bytes) -> Any:
    """Return what the JSON says: no key twice, nothing too deep to be compared or shown."""
    try:
        found = json.loads(text.decode("ascii"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is no JSON that a cache has ({error})") from error
    level = [found]
    for _ in range(_DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return found
    raise Malformed(f"it is nested more than {_DEEPEST} deep")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def typed(found: Any, kind: Any, where: str) -> Any:
    """Return ``found`` as a ``kind``: Any, int, str, dict, tuple, dataclass, or ``None |`` one.

    A tuple is a list in JSON, and a dataclass an object with the names of its fields as keys. An
    int is one from 0 to `LARGEST`. ``where`` is what it is called in messages.
    """
    origin, of = _generic(kind)
    if kind is Any or (found is None and type(None) in of):
        return found
    if origin in (Union, types.UnionType):
        return typed(found, of[0], where)
    is_object = dataclasses.is_dataclass(kind)
    wanted = kind if kind in (int, str) else dict if is_object or origin is dict else list
    # Texts are made where they are needed: of a long list that takes longer than to read it.
    own: Any = type(found)
    if own is not wanted:
        raise Malformed(f"{where} is {shown(found)}, and no {wanted.__name__}")
    if wanted is int and not 0 <= found <= LARGEST:
        raise Malformed(f"{where} is {shown(found)}, not from 0 to {LARGEST}")
    if not is_object and wanted is not list:
        return found
    if of[1:] == (...,):
        return tuple(typed(each, of[0], where) for each in found)
    hints: Any = dict(enumerate(of)) or _hints(kind)  # of a dataclass or NamedTuple
    names = found.keys() if is_object else range(len(found))
    is_whole = set(names) == set(hints) if is_object else len(names) == len(hints)
    if not is_whole:
        raise Malformed(f"{where} has {shown(sorted(map(str, names)))}")
    if is_object:
        return kind(**{n: typed(found[n], of, f"{where}.{n}") for n, of in hints.items()})
    values = map(typed, found, hints.values(), repeat(where))
    return tuple(values) if origin is tuple else kind(*values)


_hints = functools.cache(get_type_hints)


@functools.cache
def _generic(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)
