"""Split a sample into a structure and leaves, and join them again.

    {"image": <PIL RGB 640x480>, "label": 3}
        structure  {"dict": [["image", 0], ["label", 1]]}
        leaves     Leaf("image:RGB", uint8 (3, 480, 640)), Leaf("int", int64 ())

Containers are dict, list, tuple and namedtuple; a namedtuple comes back as one of the same name and
fields. A list of what JSON keeps (numbers, strings, None, lists, dicts) is one leaf, so that its
length may differ from sample to sample.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from dataloaders.cache.printable import printable, shown
from dataloaders.cache.sample.leaf import (
    DEEPEST,
    Leaf,
    has_surrogates,
    is_int64,
    is_plain,
    leaf_of,
)
from dataloaders.errors import CacheError

Path: TypeAlias = tuple[Any, ...]
"""The keys to a part of a sample: of a dict its key, a position, the name of a field."""

Tail: TypeAlias = tuple[Path, Callable[[Any], Any]]
"""A part of a sample, and the function that is called on it."""

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
    values: Sequence[Any] | Mapping[int, Any],
    classes: Classes | None = None,
    tuples: type[list[Any]] | type[tuple[Any, ...]] = tuple,
) -> Any:
    """Return the sample of this structure with these values, by number; the inverse of `split`.

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


def finished(sample: Any, tails: Iterable[Tail]) -> Any:
    """Return ``sample`` with each tail applied to its part, in order; containers are new."""
    for path, tail in tails:
        sample = _changed(sample, path, tail)
    return sample


def _changed(sample: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(sample)
    key, rest = path[0], path[1:]
    if isinstance(sample, dict):
        return {**sample, key: _changed(sample[key], rest, change)}
    if hasattr(sample, "_fields"):
        return sample._replace(**{key: _changed(getattr(sample, key), rest, change)})
    members = list(sample)
    members[key] = _changed(members[key], rest, change)
    return members if isinstance(sample, list) else tuple(members)


def namedtuples_in(structure: Structure | None) -> _Named:
    """Return the name and fields of each namedtuple in samples of this structure."""
    return set() if structure is None else _walked(structure)[1]


def leaf_paths(structure: Structure) -> list[Path]:
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
    """Return the paths of all leaves, and the namedtuples; CacheError: it is no structure."""
    leaves: list[_Paths] = []
    classes: _Named = set()
    try:
        _walk(structure, (), (), leaves, classes)
    except (TypeError, ValueError) as error:
        raise CacheError(f"the structure of the samples is malformed: {error}") from error
    return leaves, classes


def _walk(
    structure: Structure,
    path: tuple[Any, ...],
    names: tuple[str, ...],
    leaves: list[_Paths],
    classes: _Named,
) -> None:
    if type(structure) is int:
        if structure != len(leaves):
            raise ValueError("its leaves are out of order")
        if structure >= MOST_LEAVES:
            raise CacheError(
                f"each sample has more than {MOST_LEAVES} leaves, which is the most that a cache "
                "keeps; return fewer and larger ones"
            )
        leaves.append((path, names))
        return
    if len(path) > DEEPEST or type(structure) is not dict or len(structure) != 1:
        raise ValueError(f"{shown(structure)} is no container")
    taken: dict[str, int] = {}
    for key, inner in _members(*next(iter(structure.items())), classes):
        name = _escaped(key)
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:  # 1 and "1"; a tilde in a key is escaped, so that this name is new
            name = f"{name}~{taken[name]}"
        _walk(inner, (*path, key), (*names, name), leaves, classes)


def _members(kind: Any, members: Any, classes: _Named) -> list[tuple[Any, Structure]]:
    """Return the (key, structure) pairs in a container; add it to ``classes`` if it is named.

    Raises:
        TypeError, ValueError: it is malformed.
    """
    if type(members) is not list:
        raise ValueError(f"no list in a container of kind {shown(kind)}")
    if kind in ("list", "tuple"):
        return list(enumerate(members))
    if kind not in ("dict", "namedtuple"):
        raise ValueError(f"a container of kind {shown(kind)}")
    name, members = members if kind == "namedtuple" else ("", members)
    pairs = [(key, inner) for key, inner in members]
    keys = tuple(key for key, _ in pairs)
    if kind == "namedtuple":
        classes.add((name, keys))
        if len(classes) > _MOST_NAMEDTUPLES:
            raise ValueError(f"it has namedtuples of more than {_MOST_NAMEDTUPLES} sorts")
        _namedtuple(name, keys)
    elif not all(map(_is_key, keys)) or len(set(keys)) != len(keys):
        raise ValueError("a dict with keys that are neither str nor int, or twice the same")
    return pairs


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
            _namedtuple(kind.__name__, kind._fields)
        except (TypeError, ValueError) as error:
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


# Bounded, so that hostile files cannot fill the memory with classes.
@lru_cache(maxsize=_MOST_NAMEDTUPLES)
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    """Return the class of this name and fields, the same one each time.

    Raises:
        TypeError, ValueError: there can be no such class.
    """
    if len(fields) > _MOST_FIELDS or not all(type(each) is str for each in (name, *fields)):
        raise ValueError(f"a namedtuple has up to {_MOST_FIELDS} fields, each a str")
    try:
        base = namedtuple(name, fields)  # type: ignore[misc]  # makes source code of identifiers
    except (ValueError, SyntaxError) as error:  # SyntaxError: of names that Python normalises
        raise ValueError(f"no namedtuple: {printable(str(error), 100)}") from error
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
