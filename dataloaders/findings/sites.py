"""Find on the stack where an operator was called, and which modules run.

user's frame ──> torch's frames ──> this mode ──> site_here()
file:line        which part of it
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_MODES = ("ours", "torch/_dynamo/", "torch/_compile.py", "torch/utils/")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple(
    str(Path(sysconfig.get_path(kind))) + os.sep for kind in ("stdlib", "purelib", "platlib")
)


class Site(NamedTuple):
    """Says where an operator was called."""

    where: str | None  # file:line of the user's innermost frame
    torch: tuple[str, ...]  # torch's files and functions between that frame and the operator
    call: tuple[object, int] | None  # the innermost call; None in a thread of autograd

    def within(self, *prefixes: str) -> bool:
        """Return whether it was called from one of these parts of torch."""
        return any(name.startswith(prefixes) for name in self.torch)


def modules_running() -> list[torch.nn.Module]:
    """Return the modules whose methods are on the stack, innermost first.

    A global hook would do the same, but torch warns of it when a model is compiled.
    """
    running = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            running.append(owner)
        frame = frame.f_back
    return running


def site_here() -> Site:
    """Return where the operator being dispatched was called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and owner_of(frame.f_code.co_filename).startswith(_MODES):
        frame = frame.f_back  # dispatch modes and torch's wrappers of them
    call = None if frame is None else (frame.f_code, frame.f_lasti)
    between: list[str] = []
    while frame is not None:
        owner = owner_of(frame.f_code.co_filename)
        if owner == "ours":
            break
        if owner == "user":
            return Site(
                f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}", tuple(between), call
            )
        if owner != "installed":
            between += [owner, frame.f_code.co_name]
        frame = frame.f_back
    return Site(None, tuple(between), call)


@functools.cache
def owner_of(path: str) -> str:
    """Return whose file it is: "ours", "user", "installed", or its path below torch's folder."""
    if path.startswith(_OURS):
        return "ours"
    if path.startswith(_TORCH):
        return "torch/" + path[len(_TORCH) :].replace(os.sep, "/")
    generated = path.startswith("<") and not path.startswith(("<stdin", "<string", "<ipython"))
    if generated or path.startswith(_INSTALLED) or f"-packages{os.sep}" in path:
        return "installed"
    return "user"


def _short(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path
