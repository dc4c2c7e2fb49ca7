"""Write a report as JSON and read it back; write its steps for ui.perfetto.dev.

JSON has no tuples, infinity or NaN: they are written as lists and null, and restored by the types
of a report's fields.
"""

from __future__ import annotations

import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dataloaders.errors import OptionError
from dataloaders.measuring.intervals import Interval

if TYPE_CHECKING:
    from dataloaders.bottleneck.report import Report

FORMAT = 1
"""The format's number. It changes when old and new reports would be misread, not for new fields."""

T = TypeVar("T")


def text(saved: Any) -> str:
    """Return a dataclass as JSON: the format's number, then one field a line."""
    finite = json.loads(json.dumps(asdict(saved), default=_plain), parse_constant=lambda name: None)
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in finite.items()]
    return "\n".join(["{", ",\n".join([f'  "format": {FORMAT}', *lines]), "}"])


def read(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Return the dataclass of type ``kind`` that a file holds; missing fields get their defaults.

    Raises:
        OptionError: there is no such file, it holds something else, or it has another format.
    """
    name = os.fspath(path)
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        found = data["format"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise OptionError(
            f"{name}: no report of a check ({error!r}); give a file that "
            "`dataloaders check --json` wrote"
        ) from error
    if found != FORMAT:
        raise OptionError(
            f"{name}: a report of format {found!r}, and this version reads format {FORMAT}; "
            "check again with this version"
        )
    try:
        return typing.cast("T", _restored(kind, data))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise OptionError(f"{name}: a damaged report: {error}") from error


def trace(report: Report) -> str:
    """Return the timeline as Chrome trace events in JSON, one row for each arm.

    The format is Catapult's "Trace Event Format": complete events (``ph`` "X"), in microseconds.
    """
    events: list[dict[str, Any]] = [
        _named("process_name", 0, f"dataloaders check: {report.loader}")
    ]
    for row, (arm, steps) in enumerate(report.timeline.items(), 1):
        events.append(_named("thread_name", row, arm))
        for number, one in enumerate(steps):
            at = one.begin
            for name, seconds in one.parts.items():
                if seconds > 0:
                    place = {"pid": 1, "tid": row, "ts": at * 1e6, "dur": seconds * 1e6}
                    events.append({"ph": "X", "name": name, **place, "args": {"step": number}})
                at += seconds
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(kind: str, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": row, "name": kind, "args": {"name": name}}


def _plain(value: Any) -> Any:
    """Return what JSON can hold in place of ``value``, such as a sampler's key."""
    if isinstance(value, Mapping):
        return dict(value)
    return int(value) if isinstance(value, Integral) else str(value)


def _restored(hint: Any, value: Any) -> Any:
    """Return JSON's ``value`` as the type ``hint``; a list without a type becomes a tuple."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if value is None:
        return None
    if origin in (typing.Union, types.UnionType):
        kinds = [each for each in args if each is not types.NoneType]
        return _restored(kinds[0] if len(kinds) == 1 else Any, value)
    if hint is Interval:
        gone = {"low": -math.inf, "estimate": math.nan, "high": math.inf}
        return Interval(**{key: gone[key] if end is None else end for key, end in value.items()})
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        named = [each.name for each in fields(hint) if each.name in value]
        return hint(**{name: _restored(hints[name], value[name]) for name in named})  # type: ignore[operator]
    if isinstance(value, list):
        if isinstance(hint, type) and hasattr(hint, "_fields"):
            kinds = [*typing.get_type_hints(hint).values()]
            # Those that an earlier version did not write have defaults.
            return hint(*(_restored(kind, each) for kind, each in zip(kinds, value, strict=False)))
        return tuple(_restored(args[0] if origin is tuple else Any, each) for each in value)
    if isinstance(value, dict):
        kind = args[1] if len(args) == 2 else Any
        return {key: _restored(kind, each) for key, each in value.items()}
    return value
