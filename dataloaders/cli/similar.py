"""Suggests a known name for one that is misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def similar(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'train'?``, or nothing if none of ``known`` is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
