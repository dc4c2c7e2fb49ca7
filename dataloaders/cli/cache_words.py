"""What the cache's messages advise in Python, as options of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["as_options", "told_as_options"]

_OPTIONS = (
    (r'on_error="skip"', "--skip"),
    (r"allow_random=True", "--allow-random"),
    (r"overwrite=True", "--overwrite"),
    (r"wait=False", "--no-wait"),
    (r"num_workers=(\d+)", r"--workers \1"),
    (r'images="(\w+)"', r"--images \1"),
    (r'compress="(\w+)"', r"--compress \1"),
    (r"call precompute again with the same arguments", "give the same command again"),
)
_OURS = "dataloaders: "


def as_options(text: str) -> str:
    """``text`` with options for the arguments that it names."""
    for argument, option in _OPTIONS:
        text = re.sub(argument, option, text)
    return text


@contextmanager
def told_as_options() -> Iterator[None]:
    """What is raised within the block says it so: our errors' texts, our notes at all others."""
    from dataloaders.errors import DataLoadersError

    try:
        yield
    except BaseException as error:
        ours = isinstance(error, (DataLoadersError, KeyboardInterrupt))
        if ours and error.args and isinstance(error.args[0], str):
            error.args = (as_options(error.args[0]), *error.args[1:])
        notes = getattr(error, "__notes__", [])
        notes[:] = [as_options(n) if str(n).startswith(_OURS) else n for n in notes]
        raise
