"""Which part of a loader's work is left for the prefetch thread.

given ────────────────────────────────────────────────────┐
tail wanted? ──> proved once on samples of this loader ───┴──> the loader without it, and the rest
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from dataloaders.backend import Remainder, Specification
from dataloaders.transforms import NoTail, Tail, device_tail

if TYPE_CHECKING:
    from . import Prefetch

__all__ = ["remainder_of"]

_KNOWN: weakref.WeakKeyDictionary[Specification, tuple[Any, Tail | NoTail]] = (
    weakref.WeakKeyDictionary()
)
"""By loader, what was found; a proof reads samples, so it is made again only after a change."""


def remainder_of(
    options: Prefetch, loader: Specification, device: torch.device | None
) -> tuple[Remainder, dict[str, Any]] | NoTail | None:
    """Return what is left to do and what that changes of the loader for one epoch.

    `NoTail` says why there is no tail.

    None where no tail is wanted: by default on the CPU, where it would only move work from the
    workers to this process. Reads samples when it is asked the first time.
    """
    if isinstance(options.tail, Remainder):
        changes = options.tail.changes(loader)
        return NoTail("the loader has changed") if changes is None else (options.tail, changes)
    on_cpu = device is None or device.type == "cpu"
    if options.tail is False or (options.tail is None and on_cpu and not options.shapes_images):
        return None
    wanted = (options.dtype, options.memory_format, id(loader.dataset), id(loader.collate_fn))
    known = _KNOWN.get(loader)
    if known is not None and known[0] == wanted:
        tail = known[1]
        if isinstance(tail, NoTail):
            return tail
        changes = tail.changes(loader)
        if changes is not None:
            return tail, changes
    tail = device_tail(loader, dtype=options.dtype, memory_format=options.memory_format)
    _KNOWN[loader] = wanted, tail
    if isinstance(tail, NoTail):
        return tail
    changes = tail.changes(loader)
    return NoTail("the dataset changes while it is read") if changes is None else (tail, changes)
