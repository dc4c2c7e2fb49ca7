"""The recorder of a thread, and its notes."""

from __future__ import annotations

import copy
import enum
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch

_LOOKS = 16  # kept of one batch


class Unrecordable(Exception):
    """This call is made on pixels, and not recorded."""


class Recorder:
    """Notes of one batch.

    Args:
        files: record only files that Pillow opens and turns into RGB, of any format.
        tail: record only what follows from the bytes of an image on: `tail`.

    Attributes:
        sources: files and arrays for which a stand-in was handed out.
        looks: what needed pixels, with the line of the user's code: "Image.im at data.py:12".
        failed: whether making pixels failed, perhaps later than in the dataset's own order.
        names: with ``files``, the name of each file that was read, by the id of its bytes.
    """

    def __init__(self, *, files: bool = False, tail: bool = False) -> None:
        self.files = files
        self.tail = tail
        self.names: dict[int, str] = {}
        self.sources = 0
        self.looks: list[str] = []
        self.failed = False

    def looked(self, what: str) -> None:
        """Note that ``what`` needed pixels."""
        if len(self.looks) < _LOOKS:
            self.looks.append(f"{what} at {_place()}")


class _Local(threading.local):
    recorder: Recorder | None = None


_local = _Local()


def recorder() -> Recorder | None:
    """Return the recorder of the code that runs now; None if it is not recorded."""
    return _local.recorder


def files_only() -> bool:
    """Return whether only files are recorded of the code that runs now."""
    own = recorder()
    return own is not None and own.files


@contextmanager
def recording(own: Recorder | None) -> Iterator[None]:
    """Record in this thread, or nothing for None. Threads that a dataset starts get real images."""
    before, _local.recorder = _local.recorder, own
    try:
        yield
    finally:
        _local.recorder = before


_CONSTANTS = {int, float, bool, complex, str, bytes, type(None), type(...)}
_CONSTANTS |= {torch.dtype, torch.memory_format, torch.Size}
CONTAINERS = frozenset((tuple, list, dict, slice))


def map_inner(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``function`` applied to its members; itself if it is no container."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([function(each) for each in value])
    if kind is dict:
        return {name: function(each) for name, each in value.items()}
    if kind is slice:
        return slice(function(value.start), function(value.stop), function(value.step))
    return value


def frozen(value: Any) -> Any:
    """Return ``value`` as it is now, made of builtins, enums and copies of arrays.

    Raises:
        Unrecordable: it may change later, or cannot be sent cheaply.
    """
    kind = type(value)
    if kind in _CONSTANTS or isinstance(value, np.generic):
        return value
    if kind in CONTAINERS:
        return map_inner(value, frozen)
    if isinstance(value, enum.IntEnum):
        return int(value)
    if isinstance(value, enum.Enum):
        return value
    if kind.__module__ == "PIL.ImageFilter":
        return copy.deepcopy(value)
    if kind is np.ndarray and value.dtype != object:
        return value.copy()
    raise Unrecordable(kind.__name__)


_LIBRARIES = {"PIL", "dataloaders", "numpy", "torch", "torchvision"}
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


def is_users(frame: FrameType) -> bool:
    """Whether ``frame`` runs code that is in no library."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package not in _LIBRARIES and not frame.f_code.co_filename.startswith(_INSTALLED)


def _place() -> str:
    """Return "file:line" of the innermost frame of the user's code."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_users(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
