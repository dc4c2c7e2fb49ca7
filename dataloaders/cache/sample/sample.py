"""Split a sample into a structure and leaves, and join them again.

    {"image": <PIL RGB 640x480>, "label": 3}
        structure  {"dict": [["image", 0], ["label", 1]]}
        leaves     Leaf("image:RGB", uint8 (3, 480, 640)), Leaf("int", int64 ())

Containers are dict, list, tuple and namedtuple; a namedtuple comes back as one of the same name and
fields. A list of what JSON keeps (numbers, strings, None, lists, dicts) is one leaf, so that its
length may differ from sample to sample.
"""

from __future__ import annotations

import unicodedata
from collections import namedtuple
from collections.abc import Iterator
from functools import lru_cache
from keyword import iskeyword
from typing import Any, TypeAlias

from dataloaders.cache.printable import shown
from dataloaders.cache.sample.leaf import (
    DEEPEST,
    DTYPES,
    Leaf,
    fits,
    has_surrogates,
    is_int64,
    is_plain,
    leaf_of,
    value_of,
)
from dataloaders.errors import CacheError

__all__ = [
    "DTYPES",
    "MOST_LEAVES",
    "Classes",
    "Leaf",
    "Structure",
    "column_names",
    "fits",
    "join",
    "leaf_paths",
    "namedtuples_in",
    "split",
    "value_of",
]  # fmt: skip

Structure: TypeAlias = "int | dict[str, Any]"
"""JSON: a leaf's number, or {"dict" | "list" | "tuple" | "namedtuple": members}."""

MOST_LEAVES = 10_000
"""Leaves of a sample, each of which is a column of the file."""

_LONGEST_NAME = 200  # characters of a key that go into a column's name
_LONGEST_NAMES = 8 << 20  # characters of all of them; keys are in each name below them
_MOST_FIELDS = 255
_MOST_NAMEDTUPLES = 1000


def split(sample: Any) -> tuple[Structure, list[Leaf]]:
    """Return the structure of ``sample``, and its leaves in order.

    Raises:
        CacheError: something in it cannot be kept; the message names its place and type.
    """
    leaves: list[Leaf] = []
    return _split(sample, "sample", leaves, 0), leaves


Classes: TypeAlias = "dict[tuple[str, tuple[str, ...]], Any]"
"""Namedtuple classes by their name and fields."""


def join(
    structure: Structure,
    values: list[Any],
    classes: Classes | None = None,
    tuples: type[list[Any]] | type[tuple[Any, ...]] = tuple,
) -> Any:
    """Return the sample of this structure with these values; the inverse of `split`.

    A namedtuple is one of ``classes``, else of a class that is made here. Tuples are ``tuples``.
    """
    if isinstance(structure, int):
        return values[structure]
    ((kind, members),) = structure.items()
    if kind in ("list", "tuple"):
        inside = [join(inner, values, classes, tuples) for inner in members]
        return inside if kind == "list" else tuples(inside)
    name, members = members if kind == "namedtuple" else ("", members)
    made = {key: join(inner, values, classes, tuples) for key, inner in members}
    if kind == "dict":
        return made
    known = (classes or {}).get((name, tuple(made)))
    return (known or _namedtuple(name, tuple(made)))(*made.values())


def namedtuples_in(structure: Structure | None) -> _Named:
    """Return the name and fields of each namedtuple in samples of this structure."""
    return set() if structure is None else _walked(structure)[1]


def leaf_paths(structure: Structure) -> list[tuple[Any, ...]]:
    """Return the keys to each leaf, in order: of a dict its key, a position, or a field's name.

    Raises:
        CacheError: this is no structure, its leaves are not numbered in order, or too many.
    """
    return [path for path, _ in _walked(structure)[0]]


def column_names(structure: Structure) -> list[str]:
    """Return a name for each leaf, in order: its keys joined by slashes; ``sample`` without any.

    They are different from each other, and valid as paths in HDF5.

    Raises:
        CacheError: as `leaf_paths`, or they are too long.
    """
    found, length = [], 0
    for _, names in _walked(structure)[0]:
        name = "/".join(names) or "sample"
        length += len(name)
        if length > _LONGEST_NAMES:
            raise CacheError(
                f"the names of the columns have more than {_LONGEST_NAMES} characters, which is "
                "the most that a cache keeps; use shorter keys, or fewer leaves"
            )
        found.append(name)
    return found


_Paths = tuple[tuple[Any, ...], tuple[str, ...]]
"""The keys to a leaf, and the same as parts of a name."""
_Named = set[tuple[str, tuple[str, ...]]]
"""Namedtuples, by their name and fields."""


def _walked(structure: Structure) -> tuple[list[_Paths], _Named]:
    leaves: list[_Paths] = []
    classes: _Named = set()
    for number, path, names in _walk(structure, (), (), classes):
        if number != len(leaves):
            raise CacheError(
                "the structure of the samples is malformed: its leaves are out of order"
            )
        if number >= MOST_LEAVES:
            raise CacheError(
                f"each sample has more than {MOST_LEAVES} leaves, which is the most that a cache "
                "keeps; return fewer and larger ones"
            )
        leaves.append((path, names))
    return leaves, classes


def _walk(
    structure: Structure, path: tuple[Any, ...], names: tuple[str, ...], classes: _Named
) -> Iterator[tuple[int, tuple[Any, ...], tuple[str, ...]]]:
    """Yield each leaf's number, the keys to it, and these as parts of a name."""
    if type(structure) is int:
        yield structure, path, names
        return
    if len(path) > DEEPEST or type(structure) is not dict or len(structure) != 1:
        raise CacheError("the structure of the samples is malformed")
    ((kind, members),) = structure.items()
    try:
        inside = _members(kind, members)
    except (TypeError, ValueError) as error:
        raise CacheError(f"the structure of the samples is malformed: {error}") from error
    if kind == "namedtuple":
        classes.add((members[0], tuple(field for field, _ in inside)))
        if len(classes) > _MOST_NAMEDTUPLES:
            raise CacheError(
                f"each sample has namedtuples of more than {_MOST_NAMEDTUPLES} sorts, which is the "
                "most that a cache keeps; return dicts"
            )
    taken: dict[str, int] = {}
    for key, inner in inside:
        name = _escaped(key)
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:  # 1 and "1"; a tilde in a key is escaped, so that this name is new
            name = f"{name}~{taken[name]}"
        yield from _walk(inner, (*path, key), (*names, name), classes)


def _members(kind: Any, members: Any) -> list[tuple[Any, Structure]]:
    """Return the (key, structure) pairs in a container.

    Raises:
        TypeError, ValueError: it is malformed.
    """
    if type(members) is not list:
        raise ValueError(f"no list in a container of kind {shown(kind)}")
    if kind in ("list", "tuple"):
        return list(enumerate(members))
    if kind == "namedtuple":
        name, fields = members
        inside = _pairs(fields)
        _check_names(name, tuple(field for field, _ in inside))
        return inside
    if kind != "dict":
        raise ValueError(f"a container of kind {shown(kind)}")
    inside = _pairs(members)
    keys = [key for key, _ in inside]
    if not all(map(_is_key, keys)) or len(set(keys)) != len(keys):
        raise ValueError("a dict with keys that are neither str nor int, or twice the same")
    return inside


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    pairs = type(value) is list and all(type(each) is list and len(each) == 2 for each in value)
    if not pairs:
        raise ValueError("no list of pairs")
    return [(first, second) for first, second in value]


def _is_key(key: Any) -> bool:
    """Return whether JSON keeps ``key``: a str that is Unicode, an int of 64 bits."""
    if type(key) is str:
        return not has_surrogates(key)
    return type(key) is int and is_int64(key)


def _split(value: Any, where: str, leaves: list[Leaf], depth: int) -> Structure:
    if depth > DEEPEST:
        raise CacheError(f"{where} is nested more than {DEEPEST} deep; flatten the sample")
    kind = type(value)
    is_named = isinstance(value, tuple) and hasattr(kind, "_fields")
    if not is_named and kind not in (dict, tuple) and (kind is not list or is_plain(value)):
        leaves.append(leaf_of(value, where))
        return len(leaves) - 1
    for key in value if kind is dict else ():
        if not _is_key(key):
            raise CacheError(
                f"{where} has the key {key!r} of type {type(key).__name__}; a cache keeps "
                "keys that are str (Unicode without surrogates) or int (64 bits)"
            )
    if is_named:
        try:
            _check_names(kind.__name__, kind._fields)
        except (ValueError, TypeError) as error:
            raise CacheError(
                f"{where} is a namedtuple that cannot be kept: {error}; return a dict"
            ) from error
    inside = [
        _split(inner, f"{where}[{key!r}]", leaves, depth + 1)
        for key, inner in (value.items() if kind is dict else enumerate(value))
    ]
    if kind is dict:
        return {"dict": [list(pair) for pair in zip(value, inside, strict=True)]}
    if is_named:
        pairs = zip(kind._fields, inside, strict=True)
        return {"namedtuple": [kind.__name__, [list(pair) for pair in pairs]]}
    return {kind.__name__: inside}


def _check_names(name: Any, fields: tuple[Any, ...]) -> None:
    """Check that there can be a namedtuple of this name and fields.

    Raises:
        ValueError: they are no names. `namedtuple` builds source code of them.
    """
    for each in (name, *fields):
        # Source code is made of them, and Python normalises the names in it.
        if (
            type(each) is not str
            or not each.isidentifier()
            or iskeyword(each)
            or unicodedata.normalize("NFKC", each) != each
        ):
            raise ValueError(f"{shown(each)} is no name")
    if any(field.startswith("_") for field in fields) or len(set(fields)) != len(fields):
        raise ValueError(f"fields of {shown(name)} that are the same, or begin with _")
    if len(fields) > _MOST_FIELDS:
        raise ValueError(f"{len(fields)} fields in a namedtuple, of at most {_MOST_FIELDS}")


# Bounded, so that hostile files cannot fill the memory with classes.
@lru_cache(maxsize=_MOST_NAMEDTUPLES)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    """Return the class of this name and fields, the same one each time.

    Raises:
        ValueError: as `_check_names`.
    """
    _check_names(name, fields)
    base = namedtuple(name, fields)  # type: ignore[misc]
    # No module holds this class, so that pickle (on the way out of a worker) calls a function.
    return type(name, (base,), {"__slots__": (), "__reduce__": _reduced, "__module__": __name__})


def _reduced(value: Any) -> tuple[Any, ...]:
    return _filled, (type(value).__name__, value._fields, tuple(value))


def _filled(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _namedtuple(name, fields)(*values)


_SAFE = frozenset(".-_+= ()[]{}<>,;:!?@#$^&*|")


def _escaped(key: Any) -> str:
    safe = "".join(
        c if c.isalnum() or c in _SAFE else "".join(f"%{byte:02x}" for byte in c.encode())
        for c in str(key)[:_LONGEST_NAME]
    )
    return safe if safe.strip(". ") else f"%{safe}"
