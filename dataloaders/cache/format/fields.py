"""JSON that anybody may have written, field by field: of the right type and range, or Malformed.

bytes ──loads──> values, not too deep ──typed: as a class is annotated──> what may be relied on
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from dataloaders.cache.printable import shown

__all__ = [
    "LARGEST",
    "Malformed",
    "fields_in",
    "list_in",
    "loads",
    "number_in",
    "text_in",
    "texts_in",
    "typed",
]

LARGEST = 1 << 48
"""Rows, values, bytes: no disk has more, and no product of two overflows."""

_DEEPEST = 300  # lists and objects in each other; a structure that is allowed has four a level


class Malformed(Exception):
    """What is wrong with a field; whoever knows the file's name tells it."""


def loads(text: bytes) -> Any:
    """What the JSON says: no key twice, no infinite number, nothing too deep."""
    try:
        found = json.loads(
            text.decode("ascii"),
            object_pairs_hook=_once,
            parse_constant=_constant,
            parse_int=_whole,
        )
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is no JSON that a cache has ({error})") from error
    _check_depth(found)
    return found


def _check_depth(found: Any) -> None:
    """Whether all that goes into it, later, stays clear of Python's limit."""
    level = [found]
    for _ in range(_DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise Malformed(f"it is nested more than {_DEEPEST} deep")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _whole(text: str) -> int:
    # Python 3.10 takes time that grows with the square of the digits.
    if len(text) > 40:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def fields_in(found: Any, where: str, names: Sequence[str]) -> dict[str, Any]:
    """An object with these keys and no other."""
    if type(found) is not dict:
        raise Malformed(f"{where} is no object")
    if found.keys() != set(names):
        wrong = sorted(found.keys() ^ set(names))
        raise Malformed(f"{where} lacks, or should not have, {shown(wrong[0])}")
    return found


def list_in(found: Any, where: str, length: int | None = None) -> list[Any]:
    """A list; of this length, unless it is None."""
    if type(found) is not list or (length is not None and len(found) != length):
        raise Malformed(f"{where} is no list" + ("" if length is None else f" of {length}"))
    return found


def number_in(found: Any, where: str, *, least: int = 0, most: int = LARGEST) -> int:
    """A whole number from ``least`` to ``most``."""
    if type(found) is not int or not least <= found <= most:
        raise Malformed(f"{where} is {shown(found)}, and no whole number from {least} to {most}")
    return found


def text_in(found: Any, where: str) -> str:
    """A text."""
    if type(found) is not str:
        raise Malformed(f"{where} is {shown(found)}, and no text")
    return found


def texts_in(found: Any, where: str) -> tuple[str, ...]:
    """A list of texts."""
    return tuple(text_in(each, where) for each in list_in(found, where))


def typed(found: Any, kind: Any, where: str, between: str = ": ") -> Any:
    """``found`` as a value of type ``kind``: None, int, str, tuples of these, or a dataclass.

    A tuple is a list in JSON, and a dataclass an object with the names of its fields as keys.

    Args:
        found: what the JSON says.
        kind: the type, as annotations have it.
        where: what it is called in messages.
        between: that and the name of a field.
    """
    if kind is int:
        return number_in(found, where)
    if kind is str:
        return text_in(found, where)
    origin, of = _parts(kind)
    if origin in (Union, types.UnionType):
        return None if found is None else typed(found, of[0], where, between)
    if origin is tuple:
        some = list_in(found, where, None if of[1:] == (...,) else len(of))
        kinds = [of[0]] * len(some) if of[1:] == (...,) else of
        return tuple(typed(each, one, where) for each, one in zip(some, kinds, strict=True))
    hints = _hints(kind)
    if not dataclasses.is_dataclass(kind):  # a NamedTuple
        some = list_in(found, where, len(hints))
        pairs = zip(some, hints.values(), strict=True)
        return kind(*(typed(each, one, where) for each, one in pairs))
    fields = fields_in(found, where, tuple(hints))
    made: Any = kind
    return made(**{n: typed(fields[n], of, f"{where}{between}{n}", ".") for n, of in hints.items()})


_hints = functools.cache(get_type_hints)


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)
