"""Decide which part of a loader's work the prefetch thread does.

a Remainder given as tail= ────────────────────────────────────┐
tail wanted ──> proved once on samples of this loader ──> tail ─┴──> Remainder
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from dataloaders.backend import Backend, Remainder, Specification
from dataloaders.replaying.tail import DeviceTail, device_tail

if TYPE_CHECKING:
    from . import Prefetch


def divided(
    options: Prefetch, inner: Backend, loader: Specification, device: torch.device
) -> tuple[Any, Remainder | str | None]:
    """Return ``inner``, which may leave the tail, and what is left, or why there is no tail.

    None if no tail is wanted: by default on the CPU, where it would only move work from the workers
    to this process. The first call reads samples.
    """
    if isinstance(options.tail, Remainder):
        return inner, options.tail
    wanted = device.type != "cpu" or options.shapes_images
    if options.tail is False or (options.tail is None and not wanted):
        return inner, None
    names = {field.name for field in fields(inner)}  # type: ignore[arg-type]
    if "puts_off" in names:  # it yields bytes and the steps that are left, as h5
        how = f"where {inner.name} makes whole batches: ToTensor, Normalize once a batch"
        tail = DeviceTail(options.dtype, options.memory_format, how)
        return replace(inner, puts_off=True), tail  # type: ignore[type-var]
    if "view" in names and inner.view is None:  # type: ignore[attr-defined]
        # It iterates a view of the loader whose workers record the tail, as stock.
        found = device_tail(loader, options.dtype, options.memory_format)
        if isinstance(found, DeviceTail):
            inner = replace(inner, view=found.recorded)  # type: ignore[type-var]
        return inner, found
    return inner, f"{inner.name} makes whole batches itself"
