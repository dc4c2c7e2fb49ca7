"""Which part of the dataset's transforms runs behind the copy, for this loader and device.

wanted? ──> proved on this loader's samples (once) ──> the dataset without it, and what to apply
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from dataloaders.backend import Specification
from dataloaders.transforms import NoTail, Tail, device_tail

if TYPE_CHECKING:
    from . import Prefetch

__all__ = ["tail_of"]

_KNOWN: weakref.WeakKeyDictionary[Specification, tuple[Any, Tail | NoTail]] = (
    weakref.WeakKeyDictionary()
)
"""A proof reads samples: one for each loader, and another when it has become another one."""


def tail_of(
    options: Prefetch, loader: Specification, device: torch.device | None
) -> tuple[Tail, dict[str, Any]] | NoTail | None:
    """The tail and what it changes of the loader for one epoch, why there is none, or None.

    None where none is wanted: by default on the CPU, where it would only take work from the
    workers and give it to this process. Reads samples, on this thread, when asked the first time.
    """
    on_cpu = device is None or device.type == "cpu"
    if options.tail is False or (options.tail is None and on_cpu and not options.shapes_images):
        return None
    wanted = (options.dtype, options.memory_format, id(loader.dataset), id(loader.collate_fn))
    known = _KNOWN.get(loader)
    if known is not None and known[0] == wanted:
        tail = known[1]
        changes = tail.changes(loader) if isinstance(tail, Tail) else None
        if isinstance(tail, Tail) and changes is not None:
            return tail, changes
        if isinstance(tail, NoTail):
            return tail
    tail = device_tail(loader, dtype=options.dtype, memory_format=options.memory_format)
    _KNOWN[loader] = wanted, tail
    if isinstance(tail, NoTail):
        return tail
    changes = tail.changes(loader)
    return NoTail("the dataset changes while it is read") if changes is None else (tail, changes)
