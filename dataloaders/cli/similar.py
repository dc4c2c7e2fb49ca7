"""Suggests a known name for one that is misspelt."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator

__all__ = ["options_of", "similar"]


def similar(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'train'?``, or nothing if none of ``known`` is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield every option of ``parser`` and of its subcommands, such as ``--images``."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from options_of(each)
