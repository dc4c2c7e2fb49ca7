"""Decode untrusted JSON as dataclasses are annotated, or raise Malformed.

bytes ──loads──> values, not too deep ──typed──> a dataclass, each field of its type and range
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Iterable
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


def fields_in(found: Any, where: str, names: Iterable[str]) -> dict[str, Any]:
    """Return an object with these keys and no other."""
    if type(found) is not dict:
        raise Malformed(f"{where} is no object")
    if wrong := sorted(found.keys() ^ set(names)):
        raise Malformed(f"{where} lacks, or should not have, {shown(wrong[0])}")
    return found


def list_in(found: Any, where: str, length: int | None = None) -> list[Any]:
    """Return a list; of this length, unless it is None."""
    if type(found) is not list or (length is not None and len(found) != length):
        raise Malformed(f"{where} is no list" + ("" if length is None else f" of {length}"))
    return found


def number_in(found: Any, where: str, *, least: int = 0, most: int = LARGEST) -> int:
    """Return a whole number from ``least`` to ``most``."""
    if type(found) is not int or not least <= found <= most:
        raise Malformed(f"{where} is {shown(found)}, and no whole number from {least} to {most}")
    return found


def text_in(found: Any, where: str) -> str:
    """Return a text."""
    if type(found) is not str:
        raise Malformed(f"{where} is {shown(found)}, and no text")
    return found


def typed(found: Any, kind: Any, where: str, between: str = ": ") -> Any:
    """Return ``found`` as a ``kind``: Any, int, str, dict, tuple, dataclass, or ``None |`` one.

    A tuple is a list in JSON, and a dataclass an object with the names of its fields as keys.
    ``where`` is what it is called in messages, and ``between`` stands before a field's name.
    """
    if kind is Any:
        return found
    if kind is int:
        return number_in(found, where)
    if kind is str:
        return text_in(found, where)
    origin, of = _generic(kind)
    if origin is dict:
        require(type(found) is dict, f"{where} is no object")
        return found
    if origin in (Union, types.UnionType):
        return None if found is None else typed(found, of[0], where, between)
    if origin is tuple and of[1:] == (...,):
        is_object = dataclasses.is_dataclass(of[0])
        return tuple(
            typed(each, of[0], f"{where.removesuffix('s')} {number}" if is_object else where)
            for number, each in enumerate(list_in(found, where))
        )
    if origin is tuple:
        return tuple(map(typed, list_in(found, where, len(of)), of, repeat(where)))
    hints, is_object = _hints(kind), dataclasses.is_dataclass(kind)
    if not is_object:  # a NamedTuple
        return kind(*map(typed, list_in(found, where, len(hints)), hints.values(), repeat(where)))
    fields = fields_in(found, where, hints)
    return kind(**{n: typed(fields[n], of, f"{where}{between}{n}", ".") for n, of in hints.items()})


_hints = functools.cache(get_type_hints)


@functools.cache
def _generic(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)
