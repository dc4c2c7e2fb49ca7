"""Reads the broken versions of `broken.toml` and makes the source of each.

A version replaces one text of one file. It is no unified diff, so the lines around that text may
change, and a renamed file is one word to edit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

__all__ = ["ROOT", "changed", "read", "versions"]

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> dict[str, Any]:
    """Return what a TOML file of this folder holds."""
    return tomllib.loads((Path(__file__).parent / name).read_text())


def versions() -> dict[str, dict[str, Any]]:
    """Return name -> file, before, after, tests of each broken version."""
    return {version["name"]: version for version in read("broken.toml")["version"]}


def changed(version: dict[str, Any]) -> bytes:
    """Return the source of the version's file with its text replaced.

    Raises:
        ValueError: the file does not hold the text exactly once, or is no file.
    """
    place = ROOT / version["file"]
    source = place.read_text() if place.is_file() else ""
    count = source.count(version["before"])
    if count != 1:
        found = f"holds its text {count} times, not once" if source else "is no file"
        raise ValueError(
            f"tests/mutants/broken.toml, {version['name']!r}: {version['file']} {found}. Write the "
            "version anew for the code as it is now, or delete it if what it breaks is gone"
        )
    return source.replace(version["before"], version["after"]).encode()
