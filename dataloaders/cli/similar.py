"""What somebody may have meant who wrote a name that there is not."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator

__all__ = ["options_of", "similar"]


def similar(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'train'?``, or nothing if none of ``known`` is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every option of ``parser`` and of its subcommands, such as ``--images``."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from options_of(each)
