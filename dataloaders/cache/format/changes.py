"""What differs between two fingerprints, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dataloaders.cache.printable import printable


def changes(before: Mapping[str, Any], now: Mapping[str, Any], when: str) -> list[str]:
    """Return each entry of ``now`` that is another one in ``before``, which was so ``when``."""
    found, contents = [], []
    for name, value in json.loads(json.dumps(dict(now))).items():
        if name in before and before[name] == value:
            continue
        if name not in before and name.startswith("values of "):
            continue  # it is of an earlier version
        if name.startswith("sample "):  # a digest says nothing to a reader
            contents.append(name.removeprefix("sample "))
        elif name not in before:
            found.append(f"{name}: not known {when}, {_shown(value)} now")
        else:
            found.append(f"{name}: {_shown(before[name])} {when}, {_shown(value)} now")
    if contents:
        found.append(f"the contents of sample {', '.join(contents)}")
    return found


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return printable(value if isinstance(value, str) else json.dumps(value), 200)
