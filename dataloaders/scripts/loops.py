"""Hand every ``iter()`` of a DataLoader in this process to one function.

    for batch in loader:      DataLoader.__iter__, torch's and ours, replaced
        └── iterate(loader, original)

Subclasses and frameworks that call ``loader.__iter__()`` get there, too. So does torchdata's
StatefulDataLoader, which does not call torch's.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias
from unittest import mock

import torch.utils.data

from dataloaders.batches.tree import Batch
from dataloaders.loader import DataLoader

Loader: TypeAlias = "torch.utils.data.DataLoader[Any]"
Original: TypeAlias = Callable[[Any], Iterator[Batch]]

_inside = threading.local()


@contextmanager
def passing() -> Iterator[None]:
    """In the block, on this thread, ``iter()`` of a loader calls its own ``__iter__``."""
    before = getattr(_inside, "active", False)
    _inside.active = True
    try:
        yield
    finally:
        _inside.active = before


@contextmanager
def replaced_iter(iterate: Callable[[Loader, Original], Iterator[Batch]]) -> Iterator[None]:
    """In the block, ``iter()`` of torch's DataLoader and ours calls ``iterate(loader, original)``.

    Within ``iterate``, and in forked processes (workers), the originals are called.
    """
    process = os.getpid()

    def replacing(original: Original) -> Original:
        def __iter__(self: Loader) -> Iterator[Batch]:
            if os.getpid() != process or getattr(_inside, "active", False):
                return original(self)
            with passing():
                return iterate(self, original)

        return __iter__

    kinds: list[Any] = [torch.utils.data.DataLoader, DataLoader]
    with suppress(ImportError):
        kinds.append(importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader)
    with ExitStack() as stack:
        for kind in kinds:
            replaced = replacing(kind.__iter__)
            stack.enter_context(mock.patch.object(kind, "__iter__", replaced))
        yield
