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
from contextlib import contextmanager
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
    process = os.getpid()
    threaded: set[type] = set()

    def base(original: Original) -> Original:
        def __iter__(self: Loader) -> Iterator[Batch]:
            if os.getpid() != process or passes():
                return original(self)
            with passing():
                return iterate(self, original)

        return __iter__

    def outer(original: Original) -> Original:
        def __iter__(self: Loader) -> Iterator[Batch]:
            if outermost is None or os.getpid() != process or passes():
                return original(self)
            if type(self) not in threaded:
                batches = original(self)
                if not _owns_thread(batches):
                    return batches
                threaded.add(type(self))
                begun = [batches]
                with passing():
                    return outermost(
                        self, lambda loader: begun.pop() if begun else original(loader)
                    )
            with passing():
                return outermost(self, original)

        return __iter__

    patched: list[tuple[Any, Original]] = []

    def patch(cls: Any, how: Callable[[Original], Original]) -> None:
        original = cls.__dict__.get("__iter__")
        if original is not None:
            patched.append((cls, original))
            cls.__iter__ = how(original)

    def later(cls: Any, /, **options: Any) -> None:
        super(torch.utils.data.DataLoader, cls).__init_subclass__(**options)
        if outermost is not None:
            patch(cls, outer)

    own: list[Any] = [torch.utils.data.DataLoader, DataLoader]
    for cls in own:
        patch(cls, base)
    if outermost is not None:
        for cls in _below(own[0]):
            if cls is not DataLoader:
                patch(cls, outer)
        own[0].__init_subclass__ = classmethod(later)
    try:
        yield
    finally:
        if outermost is not None:
            del own[0].__init_subclass__
        for cls, original in patched:
            cls.__iter__ = original


def _owns_thread(batches: object) -> bool:
    attributes = getattr(batches, "__dict__", {})
    return any(isinstance(one, threading.Thread) for one in (batches, *attributes.values()))


def _below(cls: type) -> set[type]:
    found: set[type] = set(cls.__subclasses__())
    return found.union(*(_below(one) for one in found))
