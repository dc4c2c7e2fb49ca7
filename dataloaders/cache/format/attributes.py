"""What a dataset says of its classes, kept beside the rows: `classes` and `class_to_idx`.

    ImageFolder.class_to_idx, through Subset ──> JSON in the file, 8 MiB at most
    CachedDataset.class_to_idx <──checked: texts and numbers, nothing else──┘

They are no part of the fingerprint, since no row depends on how a class is called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import index
from typing import Any

from torch.utils.data import Subset

from dataloaders.cache.format.fields import Malformed, loads, require
from dataloaders.cache.printable import printable, shown
from dataloaders.cache.sample.leaf import is_int64

_NAMES = ("classes", "class_to_idx")
_LONGEST = 8 << 20  # bytes of all; 100,000 classes of 30 characters take 7 MB
_LONGEST_SHOWN = 40


def attributes_of(dataset: Any, get: Callable[[Any, str], Any] = getattr) -> dict[str, Any]:
    """Return what ``dataset`` says, by name, as far as a cache keeps it.

    ``classes``: a list of texts, or of tuples of texts (the synonyms of ImageNet).
    ``class_to_idx``: a dict from text to int. Anything else is left out, and all of it where it
    takes more than 8 MiB. A Subset says what its dataset says. ``get`` reads an attribute; `held`
    runs no code of the dataset.
    """
    found = _said_by(dataset, get)
    return found if len(encoded(found)) <= _LONGEST else {}


def _said_by(dataset: Any, get: Callable[[Any, str], Any]) -> dict[str, Any]:
    found = {}
    for name in _NAMES:
        try:
            found[name] = _kept(name, get(dataset, name))
        except Exception:  # there is none, or it is something else; a property may run anything
            continue
    if not found and isinstance(dataset, Subset):
        return _said_by(dataset.dataset, get)
    return found


def _kept(name: str, value: Any) -> Any:
    """Return ``value`` as plain lists, tuples, texts and ints; Malformed: it is something else."""
    if name == "classes":
        require(isinstance(value, (list, tuple)), f"{name} is no list")
        return [tuple(map(_text, e)) if isinstance(e, (list, tuple)) else _text(e) for e in value]
    require(isinstance(value, Mapping), f"{name} is no object")
    return {_text(key): _number(number) for key, number in value.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Malformed(f"a class is {shown(value)}, and no text")
    return str(value)


def _number(value: Any) -> int:
    is_number = hasattr(value, "__index__") and not isinstance(value, bool)
    whole = "class_to_idx has a value that is no number of 64 bits"
    require(is_number and is_int64(index(value)), whole)
    return index(value)


def encoded(attributes: Mapping[str, Any]) -> bytes:
    """Return JSON of them, ASCII; nothing if there are none."""
    return json.dumps(attributes, separators=(",", ":")).encode("ascii") if attributes else b""


def attributes_in(text: bytes) -> dict[str, Any]:
    """Return what `encoded` wrote; Malformed: it did not."""
    require(len(text) <= _LONGEST, f"it has {len(text)} bytes, of {_LONGEST} that it may")
    found = loads(text)
    is_known = type(found) is dict and found and set(found) <= set(_NAMES)
    require(is_known, f"it is no object of {' and '.join(_NAMES)}")
    return {name: _kept(name, value) for name, value in found.items()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say of each attribute that both have, with other values, what differs first."""
    found = []
    for name in (name for name in before if name in now and before[name] != now[name]):
        then, here = (
            each if isinstance(each, dict) else dict(enumerate(each))
            for each in (before[name], now[name])
        )
        key = next(key for key in {**then, **here} if then.get(key) != here.get(key))
        one, other = (_shown(each.get(key, "nothing")) for each in (then, here))
        found.append(
            f"{name}: {len(then):,} when it was built, {len(here):,} now; the first that differs "
            f"is {_shown(key)}: {one} then, {other} now"
        )
    return found


def summary(value: Any) -> str:
    """Return ``10 (airplane, automobile, bird, ...)``, fit to be shown."""
    names = list(map(_shown, list(value)[:3]))
    if isinstance(value, dict):
        names = [f"{name}: {n}" for name, n in zip(names, value.values(), strict=False)]
    return f"{len(value):,} ({', '.join(names)}{', ...' if len(value) > len(names) else ''})"


def _shown(value: Any) -> str:
    return printable("/".join(value) if isinstance(value, tuple) else str(value), _LONGEST_SHOWN)
