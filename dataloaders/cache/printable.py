"""Make text from a file safe to print: on one line, without control characters.

"a\\x1b[2Jb" ──> a\\x1b[2Jb, as text
"""

from __future__ import annotations

from typing import Any

_LONGEST_SHOWN = 60


def printable(text: str, most: int = 1000) -> str:
    """Return ``text`` up to ``most`` characters, with those that are not visible escaped."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in cut
    )


def shown(value: Any) -> str:
    """Return ``value`` in a few characters, for messages."""
    text = value if isinstance(value, int) and abs(value) < 1 << 70 else repr(value)
    return str(text)[:_LONGEST_SHOWN]
