"""Hands every ``iter()`` of a DataLoader in this process to one function.

    for batch in loader:      DataLoader.__iter__, torch's and ours, replaced
        └── iterate(loader, original)

Subclasses and frameworks that call ``loader.__iter__()`` arrive there too. A subclass whose own
``__iter__`` gives its batches to a thread (DataLoaderX) is caught one level further out, since the
thread asks for batches ahead of the loop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
import torch.utils.data

from dataloaders.batches.tree import Batch
from dataloaders.loader import DataLoader

__all__ = ["Loader", "Original", "passing", "replaced_iter"]

Loader: TypeAlias = "torch.utils.data.DataLoader[Any]"
Original: TypeAlias = Callable[[Any], Iterator[Batch]]
Iterate: TypeAlias = Callable[[Loader, Original], Iterator[Batch]]

_inside = threading.local()


@contextmanager
def passing() -> Iterator[None]:
    """Inside, on this thread: loaders are iterated by their own ``__iter__``."""
    before = passes()
    _inside.active = True
    try:
        yield
    finally:
        _inside.active = before


def passes() -> bool:
    """Return whether this thread is inside `passing`."""
    return getattr(_inside, "active", False)


@contextmanager
def replaced_iter(iterate: Iterate, outermost: Iterate | None = None) -> Iterator[None]:
    """Inside: ``iter()`` of torch's DataLoader and of ours calls ``iterate(loader, original)``.

    What ``iterate`` itself iterates, and a process forked meanwhile (a worker), get the originals.

    Args:
        iterate: called for each new epoch; what it returns is what the program iterates.
        outermost: the same for a loader whose class hands its batches to a thread, with that
            class's own ``__iter__``; None leaves such classes as they are.
    """
    process, root = os.getpid(), torch.utils.data.DataLoader
    threaded: set[type] = set()

    def elsewhere() -> bool:
        return os.getpid() != process or passes()

    def base(original: Original) -> Original:
        def __iter__(self: Loader) -> Iterator[Batch]:
            if elsewhere():
                return original(self)
            with passing():
                return iterate(self, original)

        return __iter__

    def outer(original: Original) -> Original:
        def __iter__(self: Loader) -> Iterator[Batch]:
            if elsewhere() or outermost is None:
                return original(self)
            begun = []
            if type(self) not in threaded:
                begun = [original(self)]
                if not _owns_thread(begun[0]):
                    return begun[0]
                threaded.add(type(self))
            with passing():
                return outermost(self, lambda loader: begun.pop() if begun else original(loader))

        return __iter__

    def patch(cls: Any, how: Callable[[Original], Original]) -> None:
        original = cls.__dict__.get("__iter__")
        if original is not None:
            undo.callback(setattr, cls, "__iter__", original)
            cls.__iter__ = how(original)

    def later(cls: Any, /, **options: Any) -> None:
        super(root, cls).__init_subclass__(**options)
        patch(cls, outer)

    with ExitStack() as undo:
        patch(root, base)
        patch(DataLoader, base)
        if outermost is not None:
            for cls in _below(root) - {DataLoader}:
                patch(cls, outer)
            setattr(root, "__init_subclass__", classmethod(later))  # noqa: B010
            undo.callback(delattr, root, "__init_subclass__")
        yield


def _owns_thread(batches: object) -> bool:
    attributes = getattr(batches, "__dict__", {})
    return any(isinstance(one, threading.Thread) for one in (batches, *attributes.values()))


def _below(cls: type) -> set[type]:
    found: set[type] = set(cls.__subclasses__())
    return found.union(*(_below(one) for one in found))
